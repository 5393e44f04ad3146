"""Driving a policy by the methods of its page: those written by hand, and those that override it.

A policy with a Program is driven by its parts, which never call `compute_actions` and its like.
Where a class has methods of its own in their place, these are what everybody has to call. Which
ones they are, and what they ask for, is found out once for each class.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.batch.leaves import iterate_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import UsageError
from tfpolicies.models.env_actions import outside_of_range
from tfpolicies.models.ports import action_ports
from tfpolicies.models.spaces import Leaf, action_leaves, batch_leaves, nest

logger = logging.getLogger("tfpolicies")

ACTING = ("compute_actions", "compute_actions_from_input_dict")
LOADING = (
    "load_batch_into_buffer",
    "get_num_samples_loaded_into_buffer",
    "learn_on_loaded_batch",
)
GRADIENTS = ("compute_gradients", "apply_gradients")
UPDATING = ("learn_on_batch", *GRADIENTS)
WEIGHTS = ("get_weights", "set_weights")

_SLOWER = (*ACTING, *LOADING, *UPDATING)
_told: weakref.WeakSet[type] = weakref.WeakSet()
_warned: weakref.WeakSet[type] = weakref.WeakSet()


def overridden(policy_class: type, base: type) -> frozenset[str]:
    """Returns which methods a class has of its own in the place of those that drive `base`."""
    names = (*_SLOWER, *WEIGHTS, "get_initial_state")
    return frozenset(x for x in names if getattr(policy_class, x) is not getattr(base, x))


def announce(policy_class: type, names: frozenset[str]) -> None:
    """Says in one line, once for each class, that its own methods are what runs."""
    slower = [name for name in _SLOWER if name in names]
    if slower and policy_class not in _told:
        _told.add(policy_class)
        logger.warning(
            "%s overrides %s: this runs in place of the compiled functions, and is slower.",
            policy_class.__name__,
            ", ".join(slower),
        )


class Asked(NamedTuple):
    """What the signature of a class's `compute_actions` asks for."""

    names: frozenset[str]  # of the parameters
    takes_all: bool  # whether others can be given, too, by **kwargs
    episodes: bool  # whether `episodes` or the last infos are among them


def asked_by(acts: Callable[..., Any], acts_on_dict: Callable[..., Any] | None) -> Asked:
    """Returns what is asked for by a class's `compute_actions`.

    Args:
        acts: that method.
        acts_on_dict: its own `compute_actions_from_input_dict`; None if it has none.
    """
    parameters = inspect.signature(acts).parameters
    takes_all = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
    named = set(parameters)
    if acts_on_dict is not None:
        named |= set(inspect.signature(acts_on_dict).parameters)
    return Asked(frozenset(parameters), takes_all, bool(named & {"info_batch", "episodes"}))


def act(
    policy: Any,
    obs: Any,
    previous: Sequence[np.ndarray],
    states: Sequence[np.ndarray],
    explore: bool | None,
    infos: Sequence[Any] | None,
    episodes: Sequence[Any] | None,
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Acts for a sampler by `compute_actions_from_input_dict`; see `Policy.act_columns`.

    Returns:
        The policy's own actions, an array per leaf, and the columns to keep.
    """
    ports = action_ports("actions", found := action_leaves(policy.action_space))
    asked: dict[str, Any] = {"obs": obs}
    if len(previous) > len(found):
        *actions, rewards = previous
        asked["prev_actions"] = nest(policy.action_space, actions)
        asked["prev_rewards"] = rewards
    if infos is not None:
        asked["infos"] = list(infos)
    if states:
        form = policy.get_initial_state() if policy.memory_form is None else policy.memory_form
        policy.memory_form = form
        memory = formed(form, states)
        named = isinstance(memory, Mapping)
        asked |= {"state_in": memory} if named else _numbered("state_in", memory)
    given = policy.compute_actions_from_input_dict(
        SampleBatch(asked), explore=explore, timestep=policy.global_timestep, episodes=episodes
    )
    here = f"{type(policy).__name__}.compute_actions"
    chosen, after, extras = _three(given, here)
    parts = batch_leaves(found, chosen, "actions")
    columns = {port.name: part for port, part in zip(ports, parts, strict=True)}
    columns |= _numbered("state_out", memory_leaves(after))
    columns |= {name: np.asarray(extra) for name, extra in extras.items()}
    rows = len(next(iterate_leaves(obs)))
    for name, column in columns.items():
        if column.shape[:1] != (rows,):
            raise UsageError(
                f"{here} got {rows} observations, but gave {name} of the shape {column.shape}; its "
                "first axis must have one for each."
            )
    return parts, columns


def _three(given: Any, here: str) -> tuple[Any, Any, Mapping[str, Any]]:
    if isinstance(given, tuple | list) and len(given) == 3:
        chosen, after, extras = given
        if isinstance(after, list | tuple | Mapping) and isinstance(extras, Mapping):
            return chosen, after, extras
    raise UsageError(
        f"{here} must return (actions, state_outs, extras): state_outs a list or dict of arrays, "
        f"extras a dict; without a memory (actions, [], {{}}). Got {given!r:.200}."
    )


def updated(policy: Any, method: str, result: Any) -> Mapping[str, Any]:
    """Returns what a method of a class gave for an update.

    Raises:
        UsageError: if it is no dict.
    """
    if isinstance(result, Mapping):
        return result
    raise UsageError(
        f"{type(policy).__name__}.{method} must return a dict of results, such as what "
        f"super().{method} returns, or {{}}; got {result!r:.200}."
    )


def _numbered(name: str, parts: Sequence[Any]) -> dict[str, Any]:
    return {f"{name}_{i}": part for i, part in enumerate(parts)}


def memory_leaves(memory: Any) -> list[np.ndarray]:
    """Returns the arrays of a memory in order: that of a dict, at any depth, is by its keys.

    >>> memory_leaves([np.zeros(1), {"b": np.ones(2), "a": np.zeros(3)}])
    [array([0.]), array([0., 0., 0.]), array([1., 1.])]
    """
    return [np.asarray(leaf) for leaf in _walk(memory)]


def _walk(memory: Any) -> Iterator[Any]:
    for part in [memory[key] for key in sorted(memory)] if isinstance(memory, Mapping) else memory:
        if isinstance(part, Mapping):
            yield from _walk(part)
        else:
            yield part


def formed(form: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Inverts `memory_leaves`: returns arrays in the form that a memory has."""
    left = iter(arrays)

    def put(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: put(part[key]) for key in sorted(part)}
        return next(left)

    return put(form) if isinstance(form, Mapping) else [put(part) for part in form]


def warn_of_range(policy: Any, leaves: Sequence[Leaf], actions: Sequence[np.ndarray]) -> None:
    """Warns, once for each class, of an action that `normalize_actions` does not expect."""
    kind = type(policy)
    if kind in _warned:
        return
    found = outside_of_range(leaves, actions)
    if found is not None:
        _warned.add(kind)
        logger.warning(
            "%s gave the action %g, but with normalize_actions=True actions are from -1 to 1: the "
            "environment gets them scaled to the bounds of its action space, and clipped. If your "
            "policy gives the environment's own actions, set "
            "environment(normalize_actions=False).",
            kind.__name__,
            found,
        )
