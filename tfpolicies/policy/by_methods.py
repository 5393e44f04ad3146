"""Driving a policy by the methods of its page: those written by hand, and those that override it.

A policy with a Program is driven by its parts, which never call `compute_actions` and its like.
Where a class has methods of its own in their place, these are what everybody has to call. Which
ones they are, and what they ask for, is found out once for each class.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.batch.leaves import iterate_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import UsageError
from tfpolicies.models.action_mapping import ActionMapping, find_unscaled
from tfpolicies.models.ports import PREVIOUS, View, leaf_ports, previous
from tfpolicies.models.spaces import Leaf, action_leaves, batch_leaves, nest
from tfpolicies.policy import parts

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
FILTERS = ("filter", "reward_filter")
"""The attributes of a policy that hold its running statistics; None where there are none."""

_SLOWER = (*ACTING, *LOADING, *UPDATING)
_told: weakref.WeakSet[type] = weakref.WeakSet()
_warned: weakref.WeakSet[type] = weakref.WeakSet()


def overridden(policy_class: type, base: type) -> frozenset[str]:
    """Returns which methods a class has of its own in the place of those that drive `base`."""
    names = (*_SLOWER, *WEIGHTS, "get_initial_state", "learn_epochs")
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


class ActingByMethods(parts.Acting):
    """Acts for samplers by a policy's `compute_actions_from_input_dict`, and so `compute_actions`.

    It is a view: it is made when somebody asks for it. See `parts.Acting` for its methods.

    Args:
        policy: whose methods are called.
    """

    views: tuple[View, ...] = ()
    starts_alike = False
    follows_episodes = False
    shared: Any = None

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._memory_form: Any = None  # a memory as `get_initial_state` gave it

    @functools.cached_property
    def given(self) -> tuple[View, ...]:
        """The previous action and reward, and what else the model reads."""
        own = previous(self._policy.action_space)
        return (*own, *(view for view in self.views if view.name not in PREVIOUS))

    @property
    def inference(self) -> str | None:
        """None: there is no runtime."""
        return None

    @property
    def asks_for_episodes(self) -> bool:
        """Whether `columns` is to be given the last infos and the episodes of its rows."""
        return bool(self._policy._asked.episodes)

    def columns(
        self,
        obs: Sequence[np.ndarray],
        seen: Sequence[np.ndarray] = (),
        states: Sequence[np.ndarray] = (),
        *,
        explore: bool | None = None,
        infos: Sequence[Any] | None = None,
        episodes: Sequence[Any] | None = None,
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Returns actions for the environment and the columns to keep; see `parts.Acting.columns`.

        Raises:
            UsageError: if `compute_actions` gives something else, or not one for each observation.
            ObservationError: if actions are not of the action space's shape.
        """
        policy = self._policy
        ports = leaf_ports("actions", found := action_leaves(policy.action_space))
        batch = policy._as_given(nest(policy.observation_space, policy.learning.seen(obs)))
        asked: dict[str, Any] = {"obs": batch}
        arrays = iter(seen)
        for view in self.given if seen else ():
            asked[view.name] = view.nested([next(arrays) for _ in view.ports])
        if infos is not None:
            asked["infos"] = list(infos)
        asked |= self._memory(states)
        given = policy.compute_actions_from_input_dict(
            SampleBatch(asked), explore=explore, timestep=policy.global_timestep, episodes=episodes
        )
        here = f"{type(policy).__name__}.compute_actions"
        chosen, after, extras = _three(given, here)
        actions = batch_leaves(found, chosen, "actions")
        columns = {port.name: x for port, x in zip(ports, actions, strict=True)}
        columns |= _numbered("state_out", memory_leaves(after))
        columns |= {name: np.asarray(extra) for name, extra in extras.items()}
        _require_rows(columns, len(next(iterate_leaves(batch))), here)
        return nest(policy.action_space, self.to_env(actions)), columns

    def ahead(self, rows: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context that changes nothing: who knows what the methods draw."""
        del rows
        return contextlib.nullcontext()

    def _memory(self, states: Sequence[np.ndarray]) -> dict[str, Any]:
        """Returns a memory by the names that it has in an input dict."""
        if not states:
            return {}
        if self._memory_form is None:
            self._memory_form = self._policy.get_initial_state()
        return named_memory(formed(self._memory_form, states))

    def to_env(
        self,
        actions: Sequence[np.ndarray],
        *,
        unsquash: bool | None = None,
        clip: bool | None = None,
    ) -> list[np.ndarray]:
        """Returns leaves of the policy's own actions as the environment takes them."""
        policy = self._policy
        config = policy.config
        normalize = config.get("normalize_actions", True) if unsquash is None else unsquash
        clip = config.get("clip_actions", False) if clip is None else clip
        mapping = ActionMapping(policy.action_space, normalize, clip, from_zero=False)
        if normalize:
            _warn_of_range(policy, mapping.leaves, actions)
        return mapping.to_env(actions)


def _require_rows(columns: Mapping[str, np.ndarray], rows: int, here: str) -> None:
    for name, column in columns.items():
        if column.shape[:1] != (rows,):
            raise UsageError(
                f"{here} got {rows} observations, but gave {name} of the shape {column.shape}; its "
                "first axis must have one for each."
            )


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


def _numbered(name: str, each: Sequence[Any]) -> dict[str, Any]:
    return {f"{name}_{i}": part for i, part in enumerate(each)}


def named_memory(memory: Any) -> dict[str, Any]:
    """Returns a memory by the names that it has in an input dict."""
    named = isinstance(memory, Mapping)
    return {"state_in": memory} if named else _numbered("state_in", memory)


def memory_leaves(memory: Any) -> list[np.ndarray]:
    """Returns the arrays of a memory in order: that of a dict, at any depth, is by its keys.

    >>> memory_leaves([np.zeros(1), {"b": np.ones(2), "a": np.zeros(3)}])
    [array([0.]), array([0., 0., 0.]), array([1., 1.])]
    """
    each = [memory[key] for key in sorted(memory)] if isinstance(memory, Mapping) else memory
    found = [memory_leaves(x) if isinstance(x, Mapping) else [np.asarray(x)] for x in each]
    return [leaf for leaves in found for leaf in leaves]


def formed(form: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Inverts `memory_leaves`: returns arrays in the form that a memory has."""
    left = iter(arrays)

    def put(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: put(part[key]) for key in sorted(part)}
        return next(left)

    return put(form) if isinstance(form, Mapping) else [put(part) for part in form]


def _warn_of_range(policy: Any, leaves: Sequence[Leaf], actions: Sequence[np.ndarray]) -> None:
    """Warns, once for each class, of an action that `normalize_actions` does not expect."""
    kind = type(policy)
    if kind in _warned:
        return
    found = find_unscaled(leaves, actions)
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


class LearningByMethods(parts.Learning):
    """Lets a policy learn by its `learn_on_batch`, and looks after its filters.

    It is a view: it is made when somebody asks for it. See `parts.Learning` for its methods.

    Args:
        policy: whose methods are called.
    """

    finds_non_finite = False

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    @property
    def compiled_as(self) -> str | None:
        """None: there is no Program."""
        return None

    @property
    def learns(self) -> bool:
        """Whether the class has a `learn_on_batch` of its own."""
        return bool(self._policy._learns())

    @property
    def by_trajectory(self) -> bool:
        """Whether `postprocess_trajectory` must be called for each trajectory."""
        return bool(self._policy._has_own_postprocessing())

    @property
    def lookahead(self) -> int:
        """0: trajectories end where fragments do."""
        return 0

    def columns(self, batch: Mapping[str, Any]) -> list[str]:
        """Returns which columns of a batch are kept to learn from them later: all but infos."""
        return [name for name in batch if name != SampleBatch.INFOS]

    def train(self, batch: Any, *how: Any, **more: Any) -> Mapping[str, Any]:
        """Calls `learn_on_batch` with the whole batch: epochs are the policy's own affair."""
        del how, more
        result: Mapping[str, Any] = self._policy.learn_on_batch(batch)
        return result

    def update(
        self,
        batch: Any,
        num_epochs: int,
        minibatch_size: int,
        *,
        shuffle: bool = True,
        rng: np.random.Generator | None = None,
    ) -> dict[str, Any]:
        """Calls `learn_on_batch` for each minibatch of each epoch; returns what the last one gave.

        Rows are shuffled in the batch itself (those of sequences are not). A `learn_epochs` of the
        policy's own shuffles by itself.

        Raises:
            UsageError: if a result is no dict.
        """
        own = getattr(self._policy, "learn_epochs", None)
        if own is not None and shuffle:
            return dict(
                updated(self._policy, "learn_epochs", own(batch, num_epochs, minibatch_size))
            )
        result: Mapping[str, Any] = {}
        for _ in range(num_epochs):
            if shuffle and SampleBatch.SEQ_LENS not in batch:
                batch.shuffle(rng)
            for minibatch in batch.timeslices(minibatch_size):
                learned = self._policy.learn_on_batch(minibatch)
                result = updated(self._policy, "learn_on_batch", learned)
        return {**result}

    def replay(
        self, batch: SampleBatch, minibatch_size: int | None, follows: np.ndarray
    ) -> Mapping[str, Any]:
        """Calls `update`, and the policy's `update_target` where that is due, if it has one."""
        result: Mapping[str, Any] = {}
        size = minibatch_size or batch.count
        ends = [0, *(np.flatnonzero(follows) + 1).tolist(), len(follows)]
        for start, stop in itertools.pairwise(ends):
            if start < stop:
                rows = batch.slice(start * size, stop * size)
                result = self.update(rows, 1, size, shuffle=False)
                if follows[stop - 1] and hasattr(self._policy, "update_target"):
                    self._policy.update_target()
        return result

    def observe(self, obs: Sequence[np.ndarray], columns: Mapping[str, np.ndarray]) -> None:
        """Takes the rows of a sample into the filters, if there are any, until their next flush."""
        filters = self._policy.holding.filters
        if "filter" in filters:
            filters["filter"].observe([leaf.reshape(-1, *leaf.shape[2:]) for leaf in obs])
        if "reward_filter" in filters:
            filters["reward_filter"].observe(columns["rewards"])

    def flush_filters(self) -> None:
        """Lets running statistics take effect, between two rounds of training."""
        for each in self._policy.holding.filters.values():
            each.flush()

    def seen(self, obs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns observation leaves `[..., *shape]` as learning is to see them: filtered."""
        running = self._policy.holding.filters.get("filter")
        return obs if running is None else running.scaled(obs)

    def scaled(self, rewards: np.ndarray) -> np.ndarray:
        """Returns rewards as learning is to see them: at the scale of a reward filter, if any."""
        running = self._policy.holding.filters.get("reward_filter")
        return rewards if running is None else running(rewards)

    def settled_views(self) -> Mapping[str, ViewRequirement]:
        """Returns which views batches are to have; from now on that cannot be changed."""
        views = self._policy._own_views()
        views.is_settled = True
        found: Mapping[str, ViewRequirement] = views.added
        return found

    def take_seconds_loading(self) -> float:
        """Returns 0: nothing is loaded."""
        return 0.0


class HoldingByMethods(parts.Holding):
    """Takes care of what a policy owns by the methods of its page.

    It is a view: it is made when somebody asks for it. See `parts.Holding` for its methods.

    Args:
        policy: whose methods are called.
    """

    state: Any = None
    program: Any = None
    automatic: Collection[str] = ()

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    @property
    def spaces(self) -> tuple[Any, Any]:
        """The spaces of observations and of actions; None for one that the policy does not have."""
        names = "observation_space", "action_space"
        observed, acted = (getattr(self._policy, name, None) for name in names)
        return observed, acted

    @property
    def version(self) -> Any:
        """None: nobody knows."""
        return None

    @property
    def is_frozen(self) -> bool:
        """False: there is nothing to be frozen."""
        return False

    @property
    def generator(self) -> np.random.Generator | None:
        """The policy's attribute `generator`, if it is a NumPy generator."""
        found = vars(self._policy).get("generator")
        return found if isinstance(found, np.random.Generator) else None

    @property
    def filters(self) -> dict[str, Any]:
        """The running statistics `filter` (observations) and `reward_filter`, as far as there."""
        own = vars(self._policy)
        return {name: own[name] for name in FILTERS if own.get(name) is not None}

    def acting_weights(self) -> Mapping[str, np.ndarray] | None:
        """Returns None: nobody knows what the methods need."""
        return None

    def accepting_non_finite(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: nobody refuses such numbers."""
        return contextlib.nullcontext()

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks a state as far as it can be done without a change; see `parts.Holding.check`."""
        self._policy._check_state(state)

    def require_changeable(self) -> None:
        """Raises a `UsageError`: nobody knows of hyper-parameters here."""
        raise self._untunable()

    def hyper(self, name: str) -> float:
        """Raises a `UsageError`: nobody knows of hyper-parameters here."""
        raise self._untunable()

    def set_hyper(self, name: str, value: float | None) -> None:
        """Raises a `UsageError`: nobody knows of hyper-parameters here."""
        raise self._untunable()

    def _untunable(self) -> UsageError:
        return UsageError(f"{self._policy!r} has no hyper-parameters that the map knows of.")

    def take_over(self, other: Any) -> None:
        """Takes over from a policy of the same kind all that acting depends on."""
        self._policy.set_weights(other.get_weights())
        self._take_over_filters(other.holding)

    def _take_over_filters(self, theirs: parts.Holding) -> None:
        for name, mine in self.filters.items():
            if name in theirs.filters:
                mine.sync(theirs.filters[name])

    def twin(self, state: Any) -> Any:
        """Returns a deep copy of the policy, with a state; a class refines it by `__deepcopy__`."""
        made = copy.deepcopy(self._policy)
        made.set_state(state)
        return made

    def changed_copy(self, policy_id: str, changes: Mapping[str, Any], *, anew: bool) -> Any:
        """Returns a copy with other settings in its config."""
        del anew
        made = self._policy.copy(policy_id)
        made.config.update(changes)
        return made
