"""State dicts of policies with a Program: reads, validates and restores them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.base.finite_checks import NON_NUMERIC_KINDS, find_first_non_finite
from tfpolicies.base.type_aliases import Structure
from tfpolicies.base.validators import is_number
from tfpolicies.errors import MissingStateError, WeightsError, show_value
from tfpolicies.exploration.exploration import Exploration
from tfpolicies.models.mean_std_filters import MeanStdFilter
from tfpolicies.models.running_filter import RunningFilter
from tfpolicies.program.policy_state import PolicyState, Slot, StateLayout
from tfpolicies.program.program import Program


def match_arrays(
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
    """
    if not isinstance(values, Mapping | Sequence):
        raise WeightsError(
            f"{argument} must be a dict or a list of arrays, got {type(values).__name__}."
        )
    slots, all_slots = layout.get_weight_slots(*parts), layout.get_slots(*parts)
    if len(slots) < len(all_slots) == len(values):  # including variables that are never read
        slots = all_slots
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
    arrays = {}
    for slot, value in zip(slots, values, strict=True):
        name = f"{argument}[{slot.key!r}]"
        arrays[slot.key] = _convert_array(slot, value, name)
    non_finite = (
        find_first_non_finite({f"{argument}[{key!r}]": x for key, x in arrays.items()})
        if finite
        else None
    )
    if non_finite is not None:
        raise WeightsError(f"{non_finite[0]} must be finite, got {non_finite[1]}.")
    return arrays


def has_only_acting_weights(layout: StateLayout, weights: object) -> bool:
    """Whether weights have as many arrays as the network that acts."""
    return isinstance(weights, Sized) and len(weights) == len(layout.get_weight_slots("model"))


def _convert_array(slot: Slot, value: Structure, name: str) -> np.ndarray:
    try:
        raw = np.asarray(value)
        if raw.dtype.kind in NON_NUMERIC_KINDS:
            raise TypeError(f"it has the dtype {raw.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            array = raw.astype(slot.dtype, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise WeightsError(f"{name} must be an array of {slot.dtype}: {error}.") from error
    if array.shape != slot.shape:
        raise WeightsError(f"{name} must have shape {slot.shape}, got {array.shape}.")
    return array


class ValidatedState(NamedTuple):
    """The validated parts of a state dict."""

    arrays: dict[str, np.ndarray]  # by key of the layout
    hyperparameters: np.ndarray  # float32 [H]
    global_timestep: int
    num_grad_updates: int


def _check_structure(state: object, mappings: Sequence[str]) -> None:
    if not isinstance(state, Mapping):
        raise WeightsError(f"A state must be a dict from `get_state()`; got {state!r:.80}.")
    for key in ("weights", "global_timestep"):
        if key not in state:
            raise MissingStateError(
                f"The state has no {key!r}; it has {sorted(map(str, state))}. Give a state that "
                "`get_state()` returned."
            )
    for key in mappings:
        if not isinstance(state.get(key, {}), Mapping | None):
            raise WeightsError(f"state[{key!r}] must be a dict, got {state[key]!r:.80}.")


@dataclass(frozen=True, eq=False)
class PolicyStateDict:
    """All state of one policy, as a dict and back.

    Args:
        program: the Program, shared with other policies.
        state: its variables, hyperparameters, generator and counters.
        exploration: its exploration.
        filters: its running statistics, by the key of a state: `filter` of observations,
            `reward_filter` of rewards.
        aliases: by the key of a state, the hyperparameter that it stores.
    """

    program: Program
    state: PolicyState
    exploration: Exploration
    filters: Mapping[str, RunningFilter]
    aliases: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Returns copies of everything; see `TFPolicy.get_state` for the keys."""
        state, layout = self.state, self.state.layout
        names = self.program.spec.hyperparameters
        hyperparameters = {
            name: float(x) for name, x in zip(names, state.hyperparameters, strict=True)
        }
        result: dict[str, Any] = {"weights": state.copy_weights(*layout.networks)}
        if layout.targets:
            result["target_weights"] = state.copy_weights(*layout.targets)
        result |= {name: running.get_state() for name, running in self.filters.items()}
        result |= {key: hyperparameters.pop(name) for key, name in self.aliases.items()}
        if state.frozen_as is None:
            result["_optimizer_variables"] = state.copy_weights(*layout.optimizers)
        return {
            **result,
            "_exploration_state": self.exploration.get_state(),
            "global_timestep": state.global_timestep,
            "num_grad_updates": state.num_grad_updates,
            "hyperparameters": hyperparameters,
            **{key: rng.bit_generator.state for key, rng in state.generators.items()},
        }

    def validate(self, state_dict: Mapping[str, Any], *, finite: bool) -> ValidatedState:
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
        _check_structure(
            state_dict, [*self.filters, "hyperparameters", "_exploration_state", *generators]
        )
        counters = [
            state_dict["global_timestep"],
            state_dict.get("num_grad_updates", state.num_grad_updates),
        ]
        for name, value in zip(("global_timestep", "num_grad_updates"), counters, strict=True):
            if not isinstance(value, int | np.integer) or not 0 <= value < 2**63:
                raise WeightsError(f"state[{name!r}] must be an integer >= 0, got {value!r}.")
        if "_exploration_state" in state_dict:
            transform = self.exploration.transform
            exploration = copy.deepcopy(self.exploration, {id(transform): transform})
            exploration.set_state(state_dict["_exploration_state"])
        for name, running in self.filters.items():
            if name in state_dict:
                running.snapshot().set_state(state_dict[name])
        for key, rng in generators.items():
            _check_generator(rng, state_dict.get(key), f"state[{key!r}]")
        timestep, updates = map(int, counters)
        arrays = self._match_all_arrays(state_dict, finite=finite)
        return ValidatedState(arrays, self._read_hyperparameters(state_dict), timestep, updates)

    def _match_all_arrays(
        self, state_dict: Mapping[str, Any], *, finite: bool
    ) -> dict[str, np.ndarray]:
        layout = self.state.layout

        def part(key: str, parts: Sequence[str], values: Any) -> dict[str, np.ndarray]:
            return match_arrays(layout, values, parts, f"state[{key!r}]", finite=finite)

        weights = state_dict["weights"]
        if has_only_acting_weights(layout, weights):  # the state of a frozen policy
            networks: Sequence[str] = ("model",)
        else:
            networks = layout.networks
        arrays = part("weights", networks, weights)
        pairs = zip(layout.targets, layout.networks_with_targets, strict=True)
        sources = {target: network for target, network in pairs if network in networks}
        if sources:
            source_weights = [
                arrays[slot.key] for slot in layout.get_weight_slots(*sources.values())
            ]
            target_weights = state_dict.get("target_weights") or source_weights
            arrays |= part("target_weights", [*sources], target_weights)
        slots = state_dict.get("_optimizer_variables")
        if slots is not None:
            arrays |= part("_optimizer_variables", layout.optimizers, slots)
        return arrays

    def _read_hyperparameters(self, state_dict: Mapping[str, Any]) -> np.ndarray:
        names = self.program.spec.hyperparameters
        aliased = {name: state_dict[key] for key, name in self.aliases.items() if key in state_dict}
        hyperparameters = self.state.hyperparameters.copy()
        for name, value in {**(state_dict.get("hyperparameters") or {}), **aliased}.items():
            if name not in names:
                owner = self.program.spec.policy_class.__name__
                raise WeightsError(f"state['hyperparameters'] has {name!r}, unknown to {owner}.")
            number = value.item() if isinstance(value, np.generic) else value
            number = math.inf if value is None else number
            try:
                if not is_number(number):
                    raise TypeError("not a number")
                hyperparameters[names.index(name)] = number
            except (TypeError, OverflowError) as error:
                raise WeightsError(
                    f"{name} in a state must be a number, got {show_value(value)}."
                ) from error
        return hyperparameters

    def restore(self, state_dict: Mapping[str, Any], *, finite: bool) -> None:
        """Validates a state dict, which stays unchanged, and restores everything from it.

        Args:
            state_dict: the state dict.
            finite: whether weights and slots with NaN or infinity are refused.

        Raises:
            KeyError: if `weights` or `global_timestep` is missing.
            WeightsError: if a part does not fit; nothing is changed then.
        """
        validated, state = self.validate(state_dict, finite=finite), self.state
        if "_exploration_state" in state_dict:
            self.exploration.set_state(state_dict["_exploration_state"])
        for name, running in self.filters.items():
            if name in state_dict:
                running.set_state(state_dict[name])
        for key, rng in state.generators.items():
            if state_dict.get(key) is not None:
                rng.bit_generator.state = state_dict[key]
        state.write(validated.arrays)
        obs_filter = self.filters.get("filter")
        if isinstance(obs_filter, MeanStdFilter):
            self.apply_filter(obs_filter)
        state.hyperparameters[...] = validated.hyperparameters
        state.global_timestep = validated.global_timestep
        state.num_grad_updates = validated.num_grad_updates

    def apply_filter(self, obs_filter: MeanStdFilter) -> None:
        """Writes a filter's current statistics to the state, for acting and learning."""
        frozen = [array for scaling in obs_filter.get_scalings() for array in scaling]
        slots = self.state.layout.get_slots("filter")
        self.state.write(
            {slot.key: x.reshape(slot.shape) for slot, x in zip(slots, frozen, strict=True)}
        )


def _check_generator(rng: np.random.Generator, rng_state: Any, argument: str) -> None:
    if rng_state is None:
        return
    try:
        type(rng.bit_generator)().state = rng_state
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{argument} must be a state of a {type(rng.bit_generator).__name__}: {error}"
        ) from error
