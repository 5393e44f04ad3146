"""Reads the inputs of acting from the caller's arguments: one checked array per input port."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.errors import ObservationError, UsageError
from tfpolicies.models.ports import PREVIOUS_STEP_SOURCES, InputPorts, ViewInput
from tfpolicies.models.rllib_flattening import decode_flat_observations
from tfpolicies.models.spaces import batch_leaves, to_float32

_PREVIOUS_STEP_ARGUMENTS = {"prev_n_actions": "prev_actions", "prev_n_rewards": "prev_rewards"}
"""Views of n steps that the argument for the previous step fills, if no view is that step."""


class StateCountError(UsageError):
    """The recurrent state is missing, or has another number of arrays."""


class InputReader:
    """Reads inputs of acting for the policies of one Program.

    Args:
        ports: of the Program.
        config: of the policy; has `check_inputs`.
        check: raises an `ObservationError` for invalid inputs.

    Attributes:
        obs_leaves: the leaves of the observation space.
        reads_obs_only: whether there are no other inputs.
        check: the same.
    """

    def __init__(
        self,
        ports: InputPorts,
        config: Mapping[str, Any],
        check: Callable[[Sequence[np.ndarray]], None],
    ) -> None:
        self.obs_leaves = ports.obs_leaves
        self.reads_obs_only = not ports.views and not ports.is_recurrent
        self._ports, self._config, self.check = ports, config, check

    def read(
        self,
        obs_batch: Structure,
        state_batches: Sequence[Any] | None = None,
        prev_action_batch: Structure | None = None,
        prev_reward_batch: Structure | None = None,
        views: Mapping[str, Any] | None = None,
        *,
        to_act: bool = True,
    ) -> list[np.ndarray]:
        """Returns one array per input port.

        Also accepts observations from RLlib's preprocessors: see `decode_flat_observations`.

        Raises:
            ObservationError: if the observations do not fit their space; with `to_act` also for NaN
                and infinity, and for masks that allow nothing, unless `check_inputs=False`.
            UsageError: if the recurrent state, or a view that the model reads, is missing or does
                not fit.
        """
        try:
            inputs = batch_leaves(self.obs_leaves, obs_batch, "obs_batch")
        except ObservationError as error:
            inputs = decode_flat_observations(self.obs_leaves, obs_batch, error)
        if not (self.reads_obs_only and state_batches is None):
            previous = prev_action_batch, prev_reward_batch
            inputs = self._add_views_and_states(inputs, state_batches, previous, views)
        if to_act and self._config["check_inputs"]:
            self.check(inputs)
        return inputs

    def _add_views_and_states(
        self,
        inputs: list[np.ndarray],
        state_batches: Sequence[Any] | None,
        previous: tuple[Structure | None, Structure | None],
        views: Mapping[str, Any] | None,
    ) -> list[np.ndarray]:
        """Appends views and recurrent state to the inputs; checks that all have the same length."""
        ports = self._ports
        if ports.views:
            arguments = dict(zip(PREVIOUS_STEP_SOURCES, previous, strict=True))
            inputs = inputs + self._read_views({**(views or {}), **arguments})
        if ports.is_recurrent:
            inputs = inputs + self._read_states(state_batches, len(inputs[0]))
        elif state_batches is not None and len(state_batches):
            raise UsageError(
                f"state_batches has {len(state_batches)} arrays, but this policy has no recurrent "
                "state; leave it out."
            )
        sizes = sorted({len(array) for array in inputs})
        if len(sizes) > 1:
            raise UsageError(
                "Observations, recurrent state, previous actions and rewards and other views need "
                f"the same number of rows, but have {sizes}."
            )
        return inputs

    def _read_views(self, batches: Mapping[str, Any]) -> list[np.ndarray]:
        arrays: list[np.ndarray] = []
        for view in self._ports.views:
            batch = batches.get(view.name)
            if batch is None:
                batch = self._get_previous(view.name, batches)
            if batch is None:
                raise UsageError(_make_missing_message(view.name))
            if view.name == "prev_rewards":
                arrays.append(to_float32(batch, "prev_reward_batch").reshape(-1))
            else:
                arrays += _read_view_leaves(view, batch)
        return arrays

    def _get_previous(self, view_name: str, batches: Mapping[str, Any]) -> Any:
        """Returns the previous action or reward for a view of n steps, if no view is that step."""
        argument = _PREVIOUS_STEP_ARGUMENTS.get(view_name)
        names = [view.name for view in self._ports.views]
        return None if argument is None or argument in names else batches.get(argument)

    def _read_states(self, states: Sequence[Any] | None, rows: int) -> list[np.ndarray]:
        ports = self._ports.states
        if states is None or len(states) != len(ports):
            count = "none" if states is None else len(states)
            raise StateCountError(
                f"This policy has a recurrent state of {len(ports)} arrays, but state_batches has "
                f"{count}. Use `session = policy.session()` and call `session.act(obs)`; or pass "
                "it yourself: `state = policy.get_initial_state()`, then `action, state, _ = "
                "policy.compute_single_action(obs, state)`; for a batch of B rows, arrays "
                "[B, *shape] as `state_batches`."
            )
        arrays = []
        for i, (port, array) in enumerate(zip(ports, states, strict=True)):
            converted = to_float32(array, f"state_batches[{i}]")
            if converted.shape != (rows, *port.shape):
                expected = ", ".join(map(str, (rows, *port.shape)))
                raise UsageError(
                    f"state_batches[{i}] must have the shape [{expected}], got "
                    f"{list(converted.shape)}; `policy.get_initial_state()` gives one row."
                )
            arrays.append(converted)
        return arrays


def _read_view_leaves(view: ViewInput, batch: Structure) -> list[np.ndarray]:
    """Returns the leaves of a view, checked; previous actions may have an axis of one step."""
    if view.name not in PREVIOUS_STEP_SOURCES:
        return batch_leaves(view.leaves, batch, f"views[{view.name!r}]")
    try:
        return batch_leaves(view.leaves, batch, "prev_action_batch")
    except ObservationError:
        steps = [leaf._replace(shape=(1, *leaf.shape)) for leaf in view.leaves]
        with contextlib.suppress(ObservationError):
            return [leaf[:, 0] for leaf in batch_leaves(steps, batch, "prev_action_batch")]
        raise


def _make_missing_message(view: str) -> str:
    arguments = {
        "prev_actions": ("prev_action_batch", "`prev_action=...` to compute_single_action"),
        "prev_rewards": ("prev_reward_batch", "`prev_reward=...` to compute_single_action"),
    }
    input_dict_hint = f"`input_dict={{'obs': ..., {view!r}: ...}}` to compute_single_action"
    argument, hint = arguments.get(view, (f"views[{view!r}]", input_dict_hint))
    return (
        f"The model reads {view}, but {argument} is missing. Use `session = policy.session()`, "
        f"which keeps it; or pass {hint}, with zeros for the steps before an episode."
    )
