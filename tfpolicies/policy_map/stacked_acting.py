"""Acting with many policies in one call: policies that share a Program run as one stack."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import TfPoliciesError, UnknownPolicyError, UsageError, suggest_similar_names
from tfpolicies.policy.acting import CompiledActing
from tfpolicies.policy.driver import Acting
from tfpolicies.policy.policy import ActionBatch, Policy
from tfpolicies.program.functions import ActOutputs
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.runtimes.stacked import StackedRuntime

_MAX_PADDING = 2
"""Maximum ratio between the padded rows of a stack and its actual rows."""

_MAX_ROWS_TO_STACK = 32
"""Maximum mean rows per policy that samplers stack; with more, one call each is as fast."""

_Call = tuple[Any, CompiledActing, list[np.ndarray], int]
"""One policy's checked call: id or index, acting driver, one array `[N, ...]` per port, and N."""


def compute_actions(
    policies: Mapping[str, Policy],
    obs_batches: Mapping[str, Any],
    state_batches: Mapping[str, Sequence[Any]] | None = None,
    prev_action_batches: Mapping[str, Any] | None = None,
    prev_reward_batches: Mapping[str, Any] | None = None,
    *,
    view_batches: Mapping[str, Mapping[str, Any]] | None = None,
    explore: bool | None = None,
    timestep: int | None = None,
) -> dict[str, ActionBatch]:
    """Chooses actions for the observations of many policies.

    The results, counters and generators are those of one `compute_actions` call per policy, up to
    the last digits. Policies that share a Program run in one call, which may be many times
    faster; shorter batches are padded for it. Graph-mode policies, custom policies and those that
    share their Program with no other act one by one.

    Args:
        policies: by id; only those in `obs_batches` are looked up.
        obs_batches: by id, observations `[N, ...]`; N may differ.
        state_batches: by id, the recurrent state, for policies that have one: arrays `[N, size]`.
        prev_action_batches: by id, the previous actions `[N, ...]`, for models that read them.
        prev_reward_batches: by id, the previous rewards `[N]`, for models that read them.
        view_batches: by id, the other views that its model reads, by name.
        explore: sample or be greedy; None takes the config of each policy.
        timestep: for schedules of exploration; None takes each policy's own.

    Returns:
        By id, in the order of `obs_batches`, the result of `Policy.compute_actions`; the caller
        owns the arrays, though those of several policies may be views of one array.

    Raises:
        UnknownPolicyError: if there is no policy of an id.
        UsageError: if an argument is not a mapping, or has ids that `obs_batches` lacks.
        ObservationError: if observations do not fit their policy, which is named.

    All inputs are checked before noise is drawn or rows are counted, except those of custom
    policies: they check for themselves, and act first.

    >>> import gymnasium as gym
    >>> from tfpolicies import PGTF2Policy
    >>> spaces = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)
    >>> policies = {name: PGTF2Policy(*spaces, {"model": {"fcnet_hiddens": [8]}}) for name in "ab"}
    >>> result = compute_actions(policies, {"a": np.zeros((2, 3)), "b": np.zeros((5, 3))})
    >>> result["b"].actions.shape
    (5,)
    """
    optional_batches = (state_batches, prev_action_batches, prev_reward_batches, view_batches)
    arguments = _CallArguments(obs_batches, *(batches or {} for batches in optional_batches))
    arguments.check_ids()
    groups, separate = _group_calls(policies, arguments, explore)
    results: dict[str, ActionBatch] = {}
    for policy_id, policy in separate:
        states, actions, rewards, views = arguments.select(policy_id)
        results[policy_id] = policy.compute_actions(
            obs_batches[policy_id],
            states,
            prev_action_batch=actions,
            prev_reward_batch=rewards,
            **({} if views is None else {"views": views}),
            explore=explore,
            timestep=timestep,
        )
    for runtime, calls, explores in _iter_runs(groups):
        if runtime is None:
            for policy_id, acting, inputs, _ in calls:
                outputs = acting.run(inputs, explores, timestep)
                arrays = acting.collect_arrays(outputs, explore=explores, caller_owned=False)
                results[policy_id] = acting.make_action_batch(arrays)
            continue
        longest = max(rows for *_, rows in calls)
        outputs = _run_stacked(runtime, calls, explores, timestep)
        arrays = calls[0][1].collect_arrays(outputs, explore=explores, caller_owned=True)
        for (policy_id, acting, _, rows), *parts in zip(calls, *arrays, strict=True):
            if rows < longest:
                parts = [part[:rows] for part in parts]
            results[policy_id] = acting.make_action_batch(parts)
    return {policy_id: results[policy_id] for policy_id in obs_batches}


class SamplerCall(NamedTuple):
    """The arguments of one `Acting.act` call by a sampler."""

    acting: Acting
    obs: Sequence[np.ndarray]
    views: Sequence[np.ndarray]
    states: Sequence[np.ndarray]
    extra_arguments: Mapping[str, Any] = {}  # infos and episodes, if the policy reads them

    def act_separately(self) -> tuple[Any, dict[str, np.ndarray]]:
        """Acts with this policy only."""
        return self.acting.act(self.obs, self.views, self.states, **self.extra_arguments)


def act_for_samplers(
    calls: Sequence[SamplerCall],
) -> Iterator[tuple[int, Any, dict[str, np.ndarray]]]:
    """Acts for a sampler with many policies, with the results of one `Acting.act` call each.

    Policies that share a Program run in one call, as in `compute_actions`, if they have few rows
    each.

    Args:
        calls: one for each policy.

    Yields:
        The index of a call, in any order, and the result of `Acting.act` for it; the arrays are
        valid until the next item.
    """
    groups: _Groups = {}
    for number, call in enumerate(calls):
        acting: CompiledActing = call.acting.stackable
        if acting is None:
            yield number, *call.act_separately()
            continue
        key = acting.program, acting.inference, bool(acting.config["explore"])
        inputs = [*call.obs, *call.views, *call.states]
        groups.setdefault(key, []).append((number, acting, inputs, len(inputs[0])))
    for runtime, group, explores in _iter_runs(groups, max_rows=_MAX_ROWS_TO_STACK):
        outputs = None if runtime is None else _run_stacked(runtime, group, explores)
        for i, (number, acting, _, rows) in enumerate(group):
            if outputs is None:
                yield number, *calls[number].act_separately()
            else:
                call_outputs = acting.program.act_layout.select_state(outputs, i, rows)
                yield number, *acting.make_columns(call_outputs)


_Groups = dict[tuple[Any, str, bool], list[_Call]]
"""Calls by Program, runtime and whether they explore."""


class _CallArguments(NamedTuple):
    """The arguments that are dicts by policy id."""

    obs_batches: Mapping[str, Any]
    state_batches: Mapping[str, Any]
    prev_action_batches: Mapping[str, Any]
    prev_reward_batches: Mapping[str, Any]
    view_batches: Mapping[str, Any]

    def select(self, policy_id: str) -> tuple[Any, Any, Any, Any]:
        """Returns states, previous actions and rewards, and views of one policy, or None."""
        _, states, actions, rewards, views = self
        selected = (batches.get(policy_id) for batches in (states, actions, rewards, views))
        return tuple(selected)  # type: ignore[return-value]

    def check_ids(self) -> None:
        """Raises a `UsageError` unless these are dicts whose ids all have observations."""
        for name, batches in zip(self._fields, self, strict=True):
            if not isinstance(batches, Mapping):
                raise UsageError(
                    f"{name} must be a dict by policy id, got {type(batches).__name__}. For one "
                    "policy use `policy.compute_actions(obs)`."
                )
            unknown = [policy_id for policy_id in batches if policy_id not in self.obs_batches]
            if unknown:
                raise UsageError(
                    f"{name} has the policy {unknown[0]!r}, which has no observations; obs_batches "
                    f"has {sorted(map(str, self.obs_batches))}. Give observations for it, or leave "
                    "it out."
                )


def _group_calls(
    policies: Mapping[str, Policy], arguments: _CallArguments, explore: bool | None
) -> tuple[_Groups, list[tuple[str, Policy]]]:
    """Returns checked calls by Program, runtime and exploration, and all other policies."""
    groups: _Groups = {}
    separate: list[tuple[str, Policy]] = []
    for policy_id, obs in arguments.obs_batches.items():
        policy: Any = _get_policy(policies, policy_id)
        acting: CompiledActing = policy.driver.acting.stackable
        if acting is None:
            separate.append((policy_id, policy))
            continue
        try:
            inputs = acting.reader.read(obs, *arguments.select(policy_id))
            inference = acting.inference
        except TfPoliciesError as error:
            raise type(error)(f"Policy {policy_id!r}: {error}") from error
        explores = acting.config["explore"] if explore is None else explore
        key = acting.program, inference, bool(explores)
        groups.setdefault(key, []).append((policy_id, acting, inputs, len(inputs[0])))
    return groups, separate


def _get_policy(policies: Mapping[str, Policy], policy_id: str) -> Policy:
    # Handles of a `PolicyMap` do not load variables, which the stack may still have.
    get = getattr(policies, "get_handle", policies.__getitem__)
    try:
        return get(policy_id)
    except UnknownPolicyError:
        raise
    except KeyError:
        raise UnknownPolicyError(
            f"obs_batches has {policy_id!r}, but there is no such policy; there are "
            f"{sorted(map(str, policies))}.{suggest_similar_names(policy_id, policies)}"
        ) from None


def _iter_runs(
    groups: _Groups, max_rows: float = math.inf
) -> Iterator[tuple[StackedRuntime | None, list[_Call], bool]]:
    """Yields a stacked runtime, its calls, and whether they explore.

    The runtime is None for calls that act one by one, which includes groups with more than
    `max_rows` rows per call.
    """
    for (program, inference, explores), calls in groups.items():
        are_few = sum(rows for *_, rows in calls) <= max_rows * len(calls)
        can_stack = len(calls) > 1 and are_few
        runtime = program.inference.get_stacked_runtime(inference) if can_stack else None
        for part in [calls] if runtime is None else _split_group(calls, runtime.max_states):
            yield runtime if len(part) > 1 else None, part, explores


def _split_group(calls: list[_Call], max_policies: int) -> list[list[_Call]]:
    """Splits a group into parts that each run as one stack.

    A part has at most `max_policies` policies, and padding all batches to its longest one at most
    doubles the rows; batches without rows get separate parts. The order within a part is that of
    the calls, so that the same call finds its stack again.
    """
    sizes = [rows for *_, rows in calls]
    if len(calls) <= max_policies and min(sizes) == max(sizes) > 0:
        return [calls]
    parts: list[list[int]] = []
    longest = total = 0
    for i in sorted(range(len(calls)), key=lambda i: -sizes[i]):
        rows = sizes[i]
        full = not parts or len(parts[-1]) >= max_policies or rows == 0
        if full or longest * (len(parts[-1]) + 1) > _MAX_PADDING * (total + rows):
            parts.append([])
            longest, total = rows, 0
        parts[-1].append(i)
        total += rows
    return [[calls[i] for i in sorted(part)] for part in parts]


def _run_stacked(
    runtime: StackedRuntime, calls: Sequence[_Call], explore: bool, timestep: int | None = None
) -> ActOutputs:
    """Runs the calls as one stack; returns arrays `[P, N, ...]`, padded to the longest N."""
    longest = max(rows for *_, rows in calls)
    states, noise, params = _prepare_calls(calls, longest, explore, timestep)
    return runtime.run(states, _stack_inputs(calls, longest), noise, params)


def _prepare_calls(
    calls: Sequence[_Call], longest: int, explore: bool, timestep: int | None
) -> tuple[list[PolicyState], np.ndarray, np.ndarray]:
    """Counts the rows of each call; returns states, noise `[P, N, noise_size]` and parameters."""
    first = calls[0][1]
    explorer = first.program.spec.explorer
    noise = np.zeros((len(calls), longest, explorer.noise_size), np.float32)
    params = np.zeros((len(calls), explorer.num_params), np.float32)
    kind = first.noise_kind if explore else None
    if kind is not None and any(acting.noise_kind is not kind for _, acting, _, _ in calls):
        kind = None
    states = []
    for i, (_, acting, _, rows) in enumerate(calls):
        noise_rows = noise[i] if rows == longest else noise[i, :rows]
        with acting.state.lock:
            state, call_noise, call_params = acting.prepare_call(
                rows, explore, timestep, None if kind is None else noise_rows
            )
        states.append(state)
        if call_noise is not None:
            noise_rows[...] = call_noise
        if len(call_params):
            params[i] = call_params
    if kind is not None:
        kind.transform(noise)
    return states, noise, params


def _stack_inputs(calls: Sequence[_Call], longest: int) -> list[np.ndarray]:
    """Returns one array `[P, N, ...]` per port, padded with zeros."""
    leading_shape = len(calls), longest
    if all(rows == longest for *_, rows in calls):
        columns = zip(*(inputs for _, _, inputs, _ in calls), strict=True)
        return [np.concatenate(x).reshape(*leading_shape, *x[0].shape[1:]) for x in columns]
    result = [np.zeros((*leading_shape, *x.shape[1:]), x.dtype) for x in calls[0][2]]
    for i, (_, _, inputs, rows) in enumerate(calls):
        for stacked, array in zip(result, inputs, strict=True):
            stacked[i, :rows] = array
    return result
