"""State dicts of policies with a Program: reads, validates and restores them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import MissingStateError, WeightsError, show_value
from tfpolicies.exploration.exploration import Exploration
from tfpolicies.finite import NO_NUMBERS, first_bad
from tfpolicies.models.filters import MeanStdFilter
from tfpolicies.models.running_filter import RunningFilter
from tfpolicies.program.program import Program
from tfpolicies.rules import is_number
from tfpolicies.state import PolicyState, Slot, StateLayout
from tfpolicies.type_aliases import Structure


def matched(
    layout: StateLayout,
    values: Mapping[str, Any] | Sequence[Any],
    parts: Sequence[str],
    argument: str,
    *,
    finite: bool,
) -> dict[str, np.ndarray]:
    """Returns the arrays of some parts of a state by key, in the layout's dtypes.

    Args:
        layout: the layout of the state.
        values: a dict with the layout's keys; or arrays in the layout's order, as a list or a dict
            with other keys. They may include variables that are never read.
        parts: of the layout.
        argument: the name of `values` in messages.
        finite: whether NaN and infinity are refused.

    Raises:
        WeightsError: if number, types or shapes differ, or a number is not finite.
    """
    if not isinstance(values, Mapping | Sequence):
        raise WeightsError(
            f"{argument} must be a dict or a list of arrays, got {type(values).__name__}."
        )
    slots, every = layout.weights(*parts), layout.of(*parts)
    if len(slots) < len(every) == len(values):  # including variables that are never read
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
        found[slot.key] = _array(slot, value, name)
    bad = first_bad({f"{argument}[{key!r}]": x for key, x in found.items()}) if finite else None
    if bad is not None:
        raise WeightsError(f"{bad[0]} must be finite, got {bad[1]}.")
    return found


def _array(slot: Slot, value: Structure, name: str) -> np.ndarray:
    try:
        given = np.asarray(value)
        if given.dtype.kind in NO_NUMBERS:
            raise TypeError(f"it has the dtype {given.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            array = given.astype(slot.dtype, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise WeightsError(f"{name} must be an array of {slot.dtype}: {error}.") from error
    if array.shape != slot.shape:
        raise WeightsError(f"{name} must have shape {slot.shape}, got {array.shape}.")
    return array


class Checked(NamedTuple):
    """The validated parts of a state dict."""

    arrays: dict[str, np.ndarray]  # by key of the layout
    hyper: np.ndarray  # float32 [H]
    global_timestep: int
    num_grad_updates: int


def _check_form(given: object, mappings: Sequence[str]) -> None:
    if not isinstance(given, Mapping):
        raise WeightsError(f"A state must be a dict from `get_state()`; got {given!r:.80}.")
    for key in ("weights", "global_timestep"):
        if key not in given:
            raise MissingStateError(
                f"The state has no {key!r}; it has {sorted(map(str, given))}. Give a state that "
                "`get_state()` returned."
            )
    for key in mappings:
        if not isinstance(given.get(key, {}), Mapping | None):
            raise WeightsError(f"state[{key!r}] must be a dict, got {given[key]!r:.80}.")


@dataclass(frozen=True, eq=False)
class Owned:
    """All state of one policy, as a dict and back.

    Args:
        program: the Program, shared with other policies.
        state: its variables, hyper-parameters, generator and counters.
        exploration: its exploration.
        filters: its running statistics, by the key of a state: `filter` of observations,
            `reward_filter` of rewards.
        aliases: by the key of a state, the hyper-parameter that it stores.
    """

    program: Program
    state: PolicyState
    exploration: Exploration
    filters: Mapping[str, RunningFilter]
    aliases: Mapping[str, str]

    def get(self) -> dict[str, Any]:
        """Returns copies of everything; see `TFPolicy.get_state` for the keys."""
        state, layout = self.state, self.program.layout
        names = self.program.spec.hyperparameters
        hyper = {name: float(x) for name, x in zip(names, state.hyper, strict=True)}
        found: dict[str, Any] = {"weights": state.copy_of(*layout.networks)}
        if layout.followers:
            found["target_weights"] = state.copy_of(*layout.followers)
        found |= {name: running.get_state() for name, running in self.filters.items()}
        found |= {key: hyper.pop(name) for key, name in self.aliases.items()}
        return {
            **found,
            "_optimizer_variables": state.copy_of(*layout.learners),
            "_exploration_state": self.exploration.state(),
            "global_timestep": state.global_timestep,
            "num_grad_updates": state.num_grad_updates,
            "hyperparameters": hyper,
            **{key: each.bit_generator.state for key, each in state.generators.items()},
        }

    def checked(self, given: Mapping[str, Any], *, finite: bool) -> Checked:
        """Validates a state dict, and changes nothing.

        Args:
            state_dict: the state dict.
            finite: whether weights and slots with NaN or infinity are refused.

        Raises:
            MissingStateError: if `weights` or `global_timestep` is missing; also a KeyError.
            WeightsError: if a part does not fit.
        """
        state = self.state
        generators = state.generators
        _check_form(given, [*self.filters, "hyperparameters", "_exploration_state", *generators])
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
        for key, rng in generators.items():
            _check_generator(rng, given.get(key), f"state[{key!r}]")
        timestep, updates = map(int, counters)
        arrays = self._arrays(given, finite=finite)
        return Checked(arrays, self._hyper(given), timestep, updates)

    def _arrays(self, given: Mapping[str, Any], *, finite: bool) -> dict[str, np.ndarray]:
        layout = self.program.layout

        def part(key: str, parts: Sequence[str], values: Any) -> dict[str, np.ndarray]:
            return matched(layout, values, parts, f"state[{key!r}]", finite=finite)

        arrays = part("weights", layout.networks, given["weights"])
        if layout.followers:
            followed = [arrays[slot.key] for slot in layout.weights(*layout.followed)]
            target = given.get("target_weights") or followed
            arrays |= part("target_weights", layout.followers, target)
        slots = given.get("_optimizer_variables")
        if slots is not None:
            arrays |= part("_optimizer_variables", layout.learners, slots)
        return arrays

    def _hyper(self, given: Mapping[str, Any]) -> np.ndarray:
        names = self.program.spec.hyperparameters
        aliased = {name: given[key] for key, name in self.aliases.items() if key in given}
        hyper = self.state.hyper.copy()
        for name, value in {**(given.get("hyperparameters") or {}), **aliased}.items():
            if name not in names:
                owner = self.program.spec.policy_class.__name__
                raise WeightsError(f"state['hyperparameters'] has {name!r}, unknown to {owner}.")
            number = value.item() if isinstance(value, np.generic) else value
            number = math.inf if value is None else number
            try:
                if not is_number(number):
                    raise TypeError("not a number")
                hyper[names.index(name)] = number
            except (TypeError, OverflowError) as error:
                raise WeightsError(
                    f"{name} in a state must be a number, got {show_value(value)}."
                ) from error
        return hyper

    def restore(self, given: Mapping[str, Any], *, finite: bool) -> None:
        """Validates a state dict, which stays unchanged, and restores everything from it.

        Args:
            state_dict: the state dict.
            finite: whether weights and slots with NaN or infinity are refused.

        Raises:
            KeyError: if `weights` or `global_timestep` is missing.
            WeightsError: if a part does not fit; nothing is changed then.
        """
        checked, state = self.checked(given, finite=finite), self.state
        if "_exploration_state" in given:
            self.exploration.set_state(given["_exploration_state"])
        for name, running in self.filters.items():
            if name in given:
                running.set_state(given[name])
        for key, rng in state.generators.items():
            if given.get(key) is not None:
                rng.bit_generator.state = given[key]
        state.write(checked.arrays)
        observed = self.filters.get("filter")
        if isinstance(observed, MeanStdFilter):
            self.apply_filter(observed)
        state.hyper[...] = checked.hyper
        state.global_timestep = checked.global_timestep
        state.num_grad_updates = checked.num_grad_updates

    def apply_filter(self, observed: MeanStdFilter) -> None:
        """Writes a filter's current statistics to the state, for acting and learning."""
        frozen = [array for scaling in observed.tensors() for array in scaling]
        slots = self.program.layout.of("filter")
        self.state.write(
            {slot.key: x.reshape(slot.shape) for slot, x in zip(slots, frozen, strict=True)}
        )


def _check_generator(rng: np.random.Generator, given: Any, argument: str) -> None:
    if given is None:
        return
    try:
        type(rng.bit_generator)().state = given
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{argument} must be a state of a {type(rng.bit_generator).__name__}: {error}"
        ) from error
