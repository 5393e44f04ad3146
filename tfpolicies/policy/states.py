"""What a policy with a Program owns, as one dict and back, and how given arrays are checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import MissingStateError, WeightsError
from tfpolicies.exploration.exploration import Exploration
from tfpolicies.models.filters import MeanStdFilter
from tfpolicies.models.running_filter import RunningFilter
from tfpolicies.program.program import Program
from tfpolicies.state import PolicyState, StateLayout


def matched(layout: StateLayout, values: Any, part: str, argument: str) -> dict[str, np.ndarray]:
    """Returns the arrays of one part of a state by key, in the layout's dtypes.

    Args:
        layout: the layout of the state.
        values: a dict with the layout's keys; or, if its keys are others, and for a list, arrays in
            the layout's order. Variables that nothing reads may be among them.
        part: "model", "filter", "target" or "learner".
        argument: what `values` is called in messages.

    Raises:
        WeightsError: if number, types or shapes differ.
    """
    if not isinstance(values, Mapping | Sequence):
        raise WeightsError(
            f"{argument} must be a dict or a list of arrays, got {type(values).__name__}."
        )
    slots, every = layout.weights(part), layout.of(part)
    if len(slots) < len(every) == len(values):  # with those that nothing reads
        slots = every
    if isinstance(values, Mapping):
        if set(values) == {slot.key for slot in slots}:
            values = [values[slot.key] for slot in slots]
        else:
            values = list(values.values())
    if len(values) != len(slots):
        raise WeightsError(
            f"{argument} has {len(values)} arrays, but this policy has {len(slots)}: "
            f"{', '.join(slot.key for slot in slots)}."
        )
    found = {}
    for slot, value in zip(slots, values, strict=True):
        name = f"{argument}[{slot.key!r}]"
        try:
            array = np.asarray(value, slot.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise WeightsError(f"{name} must be an array of {slot.dtype}: {error}") from error
        if array.shape != slot.shape:
            raise WeightsError(f"{name} must have shape {slot.shape}, got {array.shape}.")
        found[slot.key] = array
    return found


class Checked(NamedTuple):
    """The parts of a state that fit."""

    arrays: dict[str, np.ndarray]  # by key of the layout
    hyper: np.ndarray  # float32 [H]
    global_timestep: int
    num_grad_updates: int


def _check_form(given: Any, mappings: Sequence[str]) -> None:
    """Checks that a state has the parts that every state has, and dicts where those belong."""
    if not isinstance(given, Mapping):
        raise WeightsError(f"A state must be a dict, as `get_state()` gives it; got {given!r:.80}.")
    for key in ("weights", "global_timestep"):
        if key not in given:
            raise MissingStateError(
                f"The state has no {key!r}; it has {sorted(map(str, given))}. Give what "
                "`get_state()` returned."
            )
    for key in mappings:
        if not isinstance(given.get(key, {}), Mapping | None):
            raise WeightsError(f"state[{key!r}] must be a dict, got {given[key]!r:.80}.")


class Owned:
    """Everything that one policy owns, as one dict and back.

    Args:
        program: what the policy shares with its kind.
        state: its variables, hyper-parameters, generator and counters.
        exploration: its exploration.
        filters: its running statistics, by the key of a state: `filter` of observations,
            `reward_filter` of rewards.
        aliases: by the key of a state, the hyper-parameter that stands under it.
    """

    def __init__(
        self,
        program: Program,
        state: PolicyState,
        exploration: Exploration,
        filters: Mapping[str, RunningFilter],
        aliases: Mapping[str, str],
    ) -> None:
        self.program = program
        self.state = state
        self.exploration = exploration
        self.filters = filters
        self.aliases = aliases

    def get(self) -> dict[str, Any]:
        """Returns all of it as copies; see `TFPolicy.get_state` for the keys."""
        state, layout = self.state, self.program.layout
        names = self.program.spec.hyperparameters
        hyper = {name: float(x) for name, x in zip(names, state.hyper, strict=True)}
        found: dict[str, Any] = {"weights": state.copy_of("model")}
        if layout.of("target"):
            found["target_weights"] = state.copy_of("target")
        found |= {name: running.get_state() for name, running in self.filters.items()}
        found |= {key: hyper.pop(name) for key, name in self.aliases.items()}
        return {
            **found,
            "_optimizer_variables": state.copy_of("learner"),
            "_exploration_state": self.exploration.state(),
            "global_timestep": state.global_timestep,
            "num_grad_updates": state.num_grad_updates,
            "hyperparameters": hyper,
            "rng": state.rng.bit_generator.state,
        }

    def checked(self, given: Mapping[str, Any]) -> Checked:
        """Checks that a given state fits, and changes nothing.

        Raises:
            MissingStateError: if `weights` or `global_timestep` is missing; a KeyError, too.
            WeightsError: if a part does not fit.
        """
        state = self.state
        _check_form(given, [*self.filters, "hyperparameters", "_exploration_state", "rng"])
        counters = [given["global_timestep"], given.get("num_grad_updates", state.num_grad_updates)]
        for name, value in zip(("global_timestep", "num_grad_updates"), counters, strict=True):
            if not isinstance(value, int | np.integer) or not 0 <= value < 2**63:
                raise WeightsError(f"state[{name!r}] must be an integer >= 0, got {value!r}.")
        if "_exploration_state" in given:
            shared = self.exploration.transform
            trial = copy.deepcopy(self.exploration, {id(shared): shared})
            trial.set_state(given["_exploration_state"])
        for name, running in self.filters.items():
            if name in given:
                running.snapshot().set_state(given[name])
        _check_generator(state.rng, given.get("rng"))
        timestep, updates = map(int, counters)
        return Checked(self._arrays(given), self._hyper(given), timestep, updates)

    def _arrays(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        layout = self.program.layout
        arrays = matched(layout, given["weights"], "model", "state['weights']")
        if layout.of("target"):
            target = given.get("target_weights") or list(arrays.values())
            arrays |= matched(layout, target, "target", "state['target_weights']")
        slots = given.get("_optimizer_variables")
        if slots is not None:
            arrays |= matched(layout, slots, "learner", "state['_optimizer_variables']")
        return arrays

    def _hyper(self, given: Mapping[str, Any]) -> np.ndarray:
        names = self.program.spec.hyperparameters
        aliased = {name: given[key] for key, name in self.aliases.items() if key in given}
        hyper = self.state.hyper.copy()
        for name, value in {**(given.get("hyperparameters") or {}), **aliased}.items():
            if name not in names:
                owner = self.program.spec.policy_class.__name__
                raise WeightsError(f"state['hyperparameters'] has {name!r}, unknown to a {owner}.")
            try:
                hyper[names.index(name)] = float("inf") if value is None else value
            except (TypeError, ValueError, OverflowError) as error:
                raise WeightsError(f"{name} in a state must be a number, got {value!r}.") from error
        return hyper

    def restore(self, given: Mapping[str, Any]) -> None:
        """Overwrites all of it with a given state, which is checked first and never changed.

        Raises:
            KeyError: if `weights` or `global_timestep` is missing.
            WeightsError: if a part does not fit; nothing is changed then.
        """
        checked, state = self.checked(given), self.state
        if "_exploration_state" in given:
            self.exploration.set_state(given["_exploration_state"])
        for name, running in self.filters.items():
            if name in given:
                running.set_state(given[name])
        if given.get("rng") is not None:
            state.rng.bit_generator.state = given["rng"]
        state.write(checked.arrays)
        observed = self.filters.get("filter")
        if isinstance(observed, MeanStdFilter):
            self.apply_filter(observed)
        state.hyper[...] = checked.hyper
        state.global_timestep = checked.global_timestep
        state.num_grad_updates = checked.num_grad_updates

    def apply_filter(self, observed: MeanStdFilter) -> None:
        """Writes a filter's frozen statistics to where acting and learning read them."""
        frozen = [array for scaling in observed.tensors() for array in scaling]
        slots = self.program.layout.of("filter")
        self.state.write(
            {slot.key: x.reshape(slot.shape) for slot, x in zip(slots, frozen, strict=True)}
        )


def _check_generator(rng: np.random.Generator, given: Any) -> None:
    if given is None:
        return
    try:
        type(rng.bit_generator)().state = given
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise WeightsError(
            f"state['rng'] must be a state of a {type(rng.bit_generator).__name__}: {error}"
        ) from error
