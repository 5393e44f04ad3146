"""Base classes of algorithms with replay: n-step transitions, target networks, training loop.

One training step: collect a fragment, store its rows in a replay buffer (Lin 1992), and update on
rows sampled from it. With uniform replay, the rows of all updates of a training step are sampled
before the first update, so that the updates run in one compiled call. With prioritised replay
(`replay/prioritized.py`), each update is a separate call, since its errors change the priorities
for the next one. Checkpoints store buffers and the number of pending updates.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.batch.postprocessing import n_step_returns
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.later import later
from tfpolicies.config.sections import Training
from tfpolicies.config.setting import Merge, check, require, setting
from tfpolicies.errors import (
    ConfigError,
    ModelError,
    UnsupportedSpaceError,
    UsageError,
    near_matches,
)
from tfpolicies.models.catalog.inspection import extra_inputs, memory_of
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.losses import masked_mean
from tfpolicies.models.model_source import ModelSource
from tfpolicies.models.spaces import is_float_box
from tfpolicies.models.views import acting_requirements
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.program.networks import NetworkPlan
from tfpolicies.program.view import TrainBatch
from tfpolicies.replay import prioritized
from tfpolicies.replay.multi_agent import MultiAgentReplayBuffer
from tfpolicies.replay.prioritized import MultiAgentPrioritizedReplayBuffer
from tfpolicies.replay.room import check_room
from tfpolicies.rules import BOOL, COUNT, POSITIVE, UNIT, count, function, is_one_of, one_of
from tfpolicies.system.paths import resolve_path
from tfpolicies.type_aliases import Setting

logger = logging.getLogger("tfpolicies")

N_STEPS = "n_steps"
"""Column of n-step transitions: the number of rewards summed in each row, int32."""

_WIDE = 1000.0  # difference of the bounds of an action
_told_of_width: set[str] = set()  # names of policy classes

_UNIFORM = ("MultiAgentReplayBuffer", "ReplayBuffer")
_PRIORITIZED = ("MultiAgentPrioritizedReplayBuffer", "PrioritizedReplayBuffer")
_CAPACITY = 50_000
_OF_PRIORITIES = {f"prioritized_replay_{name}": name for name in ("alpha", "beta", "eps")}
BY_PRIORITIES: Mapping[str, Any] = {
    "type": _PRIORITIZED[0],
    "capacity": _CAPACITY,
    "prioritized_replay_alpha": 0.6,
    "prioritized_replay_beta": 0.4,
    "prioritized_replay_eps": 1e-6,
}
"""The default `replay_buffer_config` of algorithms with prioritised replay in RLlib."""

UPDATE_ORDER = one_of("together", "critics_first")
"""Validates `update_order`; with "critics_first" the actor is updated after its critics."""

_OF_ROOM = ("memory_limit_bytes", "storage_path")
_BYTES_PER_CALL = 256 * 2**20  # maximum size of the rows of one compiled call


class OffPolicyTFPolicy(TFPolicy):
    """A policy with a target network that learns from single transitions."""

    config_class = later("OffPolicyConfig")
    hyperparameters = (*TFPolicy.hyperparameters, "tau")
    static_keys = (*TFPolicy.static_keys, "n_step")
    _replays = True
    _column_defaults = {"weights": 1.0}  # of rows that are not from a buffer

    @classmethod
    def network_plans(
        cls, observation_space: gym.Space, dist_class: ActionDistribution, static: Mapping[str, Any]
    ) -> dict[str, NetworkPlan]:
        """Returns the plan of one network with a target network."""
        del observation_space, dist_class, static
        return {"model": NetworkPlan(target=True)}

    @classmethod
    def _model_source(
        cls, observation_space: gym.Space, dist_class: ActionDistribution, static: Mapping[str, Any]
    ) -> ModelSource:
        """Returns the source of models; replayed rows are single transitions.

        Raises:
            ConfigError: for model settings that need sequences, such as `use_lstm`.
            ModelError: for a custom model that is recurrent or reads previous actions.
        """
        check_rows_alone("model", static["model"], cls.__name__)
        source = super()._model_source(observation_space, dist_class, static)
        return source._replace(make=lambda: rows_alone(source.make()))

    def discounts(self, train_batch: TrainBatch) -> tf.Tensor:
        """Returns the discount factor `[B]` of the next state's value, 0 where terminated."""
        gamma = self.config["gamma"]
        if self.config["n_step"] > 1:
            gamma = tf.pow(gamma, tf.cast(train_batch[N_STEPS], tf.float32))
        return gamma * (1.0 - tf.cast(train_batch[SampleBatch.TERMINATEDS], tf.float32))

    @property
    def _lookahead(self) -> int:
        return int(self.config["n_step"]) - 1

    def postprocess_fragments(self, fragments: Fragments) -> None:
        """Adds `weights` (ones) and, if `n_step` is not 1, converts rows to n-step transitions."""
        rewards, terminateds = (fragments.columns[x] for x in ("rewards", "terminateds"))
        added, n = fragments.added, self.config["n_step"]
        added["weights"] = np.ones(rewards.shape, np.float32)
        if n == 1:
            return
        found = n_step_returns(rewards, fragments.ends, terminateds, n, self.hyper("gamma"))
        added["rewards"] = found.rewards
        added[N_STEPS] = (found.reached - np.arange(rewards.shape[1]) + 1).astype(np.int32)
        for name in ("terminateds", "truncateds"):
            column = fragments.columns[name]
            added[name] = np.take_along_axis(np.asarray(column), found.reached, axis=1)
        fragments.reached = found.reached

    def update_target(self, tau: float | None = None) -> None:
        """Moves target networks towards the online ones: t <- tau q + (1 - tau) t.

        Args:
            tau: in [0, 1]; None takes the policy's `tau`. 0 changes nothing, 1 copies.

        Raises:
            ConfigError: if `tau` is out of range.
        """
        tau = self.hyper("tau") if tau is None else tau
        require("tau", UNIT, tau)
        self._state.follow(float(tau))

    _moves_target = update_target

    def _record_values(self, values: tf.Tensor, errors: tf.Tensor, mask: tf.Tensor) -> None:
        """Records the values and temporal-difference errors of rows `[B]`."""
        counts, inf = mask > 0, float("inf")
        self.record(
            mean_q=masked_mean(values, mask),
            min_q=tf.reduce_min(tf.where(counts, values, inf)),
            max_q=tf.reduce_max(tf.where(counts, values, -inf)),
            mean_td_error=masked_mean(errors, mask),
            td_error=errors,
        )


def check_rows_alone(name: str, config: Mapping[str, Any], owner: str) -> None:
    """Checks that a `model` config describes a feed-forward model for single transitions.

    Args:
        name: of the setting.
        config: complete.
        class_name: the policy class, for messages.

    Raises:
        ConfigError: if the model is recurrent, or has no final linear layer.
    """
    for key in ("use_lstm", "use_gru", "use_attention", "no_final_linear"):
        if config[key]:
            raise ConfigError(
                f"{name}[{key!r}] must be False for {owner}: replayed rows are single transitions, "
                "and its outputs need a final linear layer."
            )


def require_vectors(action_space: gym.Space, owner: str, besides: str = "") -> None:
    """Checks that actions are float vectors, which critics take as input.

    Args:
        action_space: of the policy.
        class_name: the policy class, for messages.
        other_spaces: other supported spaces, for messages.

    Raises:
        UnsupportedSpaceError: for another space.
    """
    if not is_float_box(action_space) or len(action_space.shape or ()) != 1:
        raise UnsupportedSpaceError(
            f"{owner} supports {besides}one-dimensional Boxes of floats as action spaces only, got "
            f"{action_space}. For Discrete actions use DQN, SAC or PPO; flatten other Boxes in the "
            "environment, for example with a gymnasium.ActionWrapper."
        )


def require_bounds(action_space: gym.Space, owner: str, way_out: str = "") -> None:
    """Checks that each dimension of a Box has finite bounds, into which actions are squashed.

    Warns once per class if the bounds are so far apart that random first actions are hardly useful.

    Args:
        action_space: of the policy, a vector of floats.
        class_name: the policy class, for messages.
        alternative: an alternative to bounds, for the message.

    Raises:
        UnsupportedSpaceError: if a bound is not finite; it names the dimension.
    """
    low, high = action_space.low, action_space.high  # type: ignore[attr-defined]
    unbounded = np.flatnonzero(~(np.isfinite(low) & np.isfinite(high)))
    if len(unbounded):
        i = unbounded[0]
        raise UnsupportedSpaceError(
            f"{owner} squashes actions into the bounds of their dimension, which must be finite, "
            f"but those of dimension {i} of the action space are [{low[i]:g}, {high[i]:g}]. Give "
            "the environment bounds: `gymnasium.wrappers.TransformAction(env, lambda action: "
            f"action, gymnasium.spaces.Box(low, high))`.{way_out}"
        )
    width = high.astype(np.float64) - low
    if (width >= _WIDE).any() and owner not in _told_of_width:
        _told_of_width.add(owner)
        i = int(np.argmax(width))
        logger.warning(
            "Environment: the bounds of dimension %d of its action space are [%g, %g], and the "
            "first actions of %s are spread over this whole range. If only small actions are "
            "useful, give the environment narrower bounds.",
            i,
            low[i],
            high[i],
            owner,
        )


def rows_alone(model: keras.Model) -> keras.Model:
    """Returns a custom model after checking that it takes single transitions.

    Raises:
        ModelError: if it is recurrent or reads past steps.
    """
    found = [*extra_inputs(model), *acting_requirements(model)]
    found += ["state_in" for _ in memory_of(model)]
    if found:
        raise ModelError(
            f"The model {model.name!r} takes {found[0]!r}, but replayed rows are single "
            "transitions. Use a model that reads only the observation, for example several stacked "
            "frames."
        )
    return model


class OffPolicyAlgorithm(Algorithm):
    """The training loop of algorithms with replay.

    Learning starts after `num_steps_sampled_before_learning_starts` rows were added to the buffer.
    A training step then does one update, or as many as `training_intensity` requires: rows trained
    are rows sampled times intensity, and fractions are carried over. The target network is updated
    after the first update at which at least `target_network_update_freq` environment steps have
    passed since its last update; the steps of a training step count as spread evenly over its
    updates.

    Attributes:
        replay_buffer: the newest rows of each policy, with the columns that its loss reads.
    """

    config_class = later("OffPolicyConfig")
    overlaps = True
    _replays = True

    def setup(self, config: AlgorithmConfig) -> None:
        """Creates the replay buffer."""
        self.replay_buffer = self._new_buffer()
        self.counters |= {"num_target_updates": 0, "last_target_update_ts": 0}
        self._updates_owed = 0.0
        self._targets_owed: set[str] = set()  # policies without rows at the last target update

    def _new_buffer(self) -> MultiAgentReplayBuffer:
        given = self.config.replay_buffer_config
        made = (
            MultiAgentPrioritizedReplayBuffer if _by_priorities(given) else MultiAgentReplayBuffer
        )
        names = {**_OF_PRIORITIES, **{key: key for key in _OF_ROOM}}
        more = {name: given[key] for key, name in names.items() if key in given}
        return made(given.get("capacity", _CAPACITY), self.config.seed, **more)

    def training_step(self) -> dict[str, Any]:
        """Samples a fragment per environment, then updates on rows of the buffer."""
        began = self.counters["num_env_steps_sampled"]
        batches = {pid: self._kept(pid, batch) for pid, batch in self.sample_train_batch(1).items()}
        rows = sum(batch.count for batch in batches.values())
        self.replay_buffer.add(MultiAgentBatch(batches, rows))
        if self.replay_buffer.num_added < self.config.num_steps_sampled_before_learning_starts:
            return {}
        updates = self._updates_due(rows)
        if not updates:
            return {}
        follows, last = self._follows(updates, began)
        changes = self.config.before_learn_on_batch is not None
        learn = self._learn_changed if changes else self._learn_drawn
        results = learn(list(batches), follows)
        if follows.any():
            self._targets_owed |= self.replay_buffer.buffers.keys() - batches.keys()
        self.counters["num_target_updates"] += int(follows.sum())
        self.counters["last_target_update_ts"] = last
        return results

    def _kept(self, policy_id: str, batch: SampleBatch) -> SampleBatch:
        names = self.get_policy(policy_id).driver.learning.select_columns(batch)
        return SampleBatch({name: batch[name] for name in names})

    def _updates_due(self, rows: int) -> int:
        if self.config.training_intensity is None:
            return 1
        self._updates_owed += self.config.training_intensity * rows / self.config.train_batch_size
        due = int(self._updates_owed)
        self._updates_owed -= due
        return due

    def _follows(self, updates: int, began: int) -> tuple[np.ndarray, int]:
        """Returns a mask of updates followed by a target update, and the step of the last one."""
        freq, now = self.config.target_network_update_freq, self.counters["num_env_steps_sampled"]
        last = self.counters["last_target_update_ts"]
        follows = np.zeros(updates, bool)
        for k in range(updates):
            at = began + (now - began) * (k + 1) // updates
            if at - last >= freq:
                follows[k], last = True, at
        return follows, last

    def _learn_drawn(self, policy_ids: list[str], follows: np.ndarray) -> dict[str, Any]:
        """Does all updates of one policy before those of the next."""
        return {pid: self._learn(pid, follows) for pid in policy_ids}

    def _learn_changed(self, policy_ids: list[str], follows: np.ndarray) -> dict[str, Any]:
        """Updates all policies in turn, on rows changed by `before_learn_on_batch`.

        Raises:
            UsageError: if that does not return `train_batch_size` rows per policy.
        """
        size, results = self.config.train_batch_size, {}
        for k in range(len(follows)):
            drawn = {pid: self.replay_buffer.sample(size, pid) for pid in policy_ids}
            whole = MultiAgentBatch(drawn, size)
            changed = self.config.before_learn_on_batch(whole, self.workers, self.config)
            _require_rows(changed, size)
            for pid, batch in changed.policy_batches.items():
                results[pid] = self._learn(pid, follows[k : k + 1], batch)
        rows = len(follows) * size
        return {pid: {**each, "num_agent_steps_trained": rows} for pid, each in results.items()}

    def _learn(
        self, policy_id: str, follows: np.ndarray, given: SampleBatch | None = None
    ) -> dict[str, Any]:
        """Updates a policy once per flag, on given rows (for one update) or sampled ones."""
        size, policy = self.config.train_batch_size, self.get_policy(policy_id)
        if policy_id in self._targets_owed:
            self._targets_owed.discard(policy_id)
            follows = follows.copy()
            follows[0] = True
        bytes_per_update = size * self.replay_buffer.buffers[policy_id].row_bytes
        most = max(1, _BYTES_PER_CALL // max(1, bytes_per_update))
        reports_rows = _by_priorities(self.config.replay_buffer_config)
        most = 1 if reports_rows else most
        result: Mapping[str, Any] = {}
        for done in range(0, len(follows), most):
            now = follows[done : done + most]
            batch = given
            if batch is None:
                batch = self.replay_buffer.sample(size * len(now), policy_id)
            result = policy.driver.learning.replay(batch, None if reports_rows else size, now)
            self._set_priorities(policy_id, batch, result)
        return {**result, "num_agent_steps_trained": len(follows) * size}

    def _set_priorities(
        self, policy_id: str, batch: SampleBatch, result: Mapping[str, Any]
    ) -> None:
        """Sets the priorities of replayed rows from their errors, where these are finite.

        Raises:
            UsageError: if a custom policy returns no errors.
        """
        buffer = self.replay_buffer
        if not isinstance(buffer, MultiAgentPrioritizedReplayBuffer):
            return
        errors = result.get("td_error", result.get("learner_stats", {}).get("td_error"))
        indexes = batch.get(prioritized.INDEXES)
        if errors is None or indexes is None or np.shape(errors) != indexes.shape:
            raise UsageError(
                f"Prioritised replay needs the 'td_error' [B] of policy {policy_id!r} and the rows "
                "it belongs to: `learn_on_batch` must return it, and `before_learn_on_batch` must "
                f"keep the column {prioritized.INDEXES!r}. Or use "
                f"replay_buffer_config={{'type': '{_UNIFORM[0]}'}}."
            )
        known = np.isfinite(errors)
        buffer.update_priorities({policy_id: (indexes[known], np.asarray(errors)[known])})

    def warm_up(self) -> None:
        """Compiles the updates of one training step."""
        size, intensity = self.config.train_batch_size, self.config.training_intensity
        rows = self.workers.rows_per_sample()
        updates = 1 if intensity is None else max(1, int(intensity * rows / size))
        if _by_priorities(self.config.replay_buffer_config):
            self._warm_up_policies(size, 1, None)
        else:
            self._warm_up_policies(updates * size, 1, size)

    def get_extra_state(self) -> dict[str, Any]:
        """Returns pending updates, and the replay buffer if `store_buffer_in_checkpoints`."""
        stored = self.config.store_buffer_in_checkpoints
        buffer = self.replay_buffer.get_state() if stored else None
        return {
            "updates_owed": self._updates_owed,
            "targets_owed": sorted(self._targets_owed),
            "replay_buffer": buffer,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `get_extra_state`; without rows, the buffer starts empty."""
        buffer = self._new_buffer()
        if state["replay_buffer"] is not None:
            buffer.set_state(state["replay_buffer"])
        self.replay_buffer = buffer
        self._updates_owed = float(state["updates_owed"])
        self._targets_owed = set(state.get("targets_owed", ()))


@dataclass(frozen=True, kw_only=True)
class OffPolicyTraining(Training):
    """Training settings shared by algorithms with replay."""

    n_step: int = setting(1, COUNT)  # rewards summed in a transition
    target_network_update_freq: int = setting(500, count(0))  # env steps between target updates
    tau: float = setting(1.0, UNIT)  # the target's step towards the online network
    num_steps_sampled_before_learning_starts: int = setting(1000, count(0))  # rows in the buffer
    training_intensity: float | None = setting(  # rows trained per row sampled
        None, POSITIVE.or_none()
    )
    replay_buffer_config: Mapping[str, Any] = setting(
        {"type": _UNIFORM[0], "capacity": _CAPACITY},
        merge=Merge.TYPED,
        kept=lambda config: _by_name(config),
    )
    store_buffer_in_checkpoints: bool = setting(False, BOOL)
    before_learn_on_batch: Callable[..., MultiAgentBatch] | None = setting(  # changes sampled rows
        None, function("a function (batch, workers, config) -> batch").or_none()
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_buffer(self.replay_buffer_config)


def _by_priorities(config: Mapping[str, Any]) -> bool:
    return config.get("type") in _PRIORITIZED


def _by_name(config: Setting) -> Any:
    """Returns a buffer's config with the type as a name and an absolute storage folder.

    A missing folder stays as written, so that the check rejects it.
    """
    if not isinstance(config, Mapping):
        return config
    kind, folder = config.get("type"), config.get("storage_path")
    if isinstance(folder, str | os.PathLike) and (path := resolve_path(folder)).is_dir():
        config = {**config, "storage_path": str(path)}
    if isinstance(kind, type) and kind.__module__.startswith("tfpolicies."):
        kind = kind.__name__
    return {**config, "type": kind.rpartition(".")[2]} if isinstance(kind, str) else config


def _check_buffer(config: Mapping[str, Any]) -> None:
    name = "replay_buffer_config"
    check(isinstance(config, Mapping), name, "a dict {'capacity': ...}", config)
    kind = config.get("type")
    kind = _UNIFORM[0] if is_one_of(kind, None, "") else kind
    require(f"{name}['type']", one_of(*_UNIFORM, *_PRIORITIZED), kind)
    known = ("type", "capacity", *_OF_ROOM, *(_OF_PRIORITIES if _by_priorities(config) else ()))
    for key in config:
        if key in _OF_PRIORITIES and key not in known:
            raise ConfigError(
                f"{name} has {key!r}, but type {kind!r} replays uniformly. For prioritised replay "
                f"set {{'type': '{_PRIORITIZED[0]}'}}."
            )
        if key not in known:
            raise ConfigError(
                f"{name} has no key {key!r}.{near_matches(str(key), known)} It takes "
                f"{', '.join(known)}."
            )
    require(f"{name}['capacity']", COUNT, config.get("capacity", _CAPACITY))
    check_room(*(config.get(key) for key in _OF_ROOM))
    for key in set(_OF_PRIORITIES) & set(config):
        require(f"{name}[{key!r}]", prioritized.AMOUNT, config[key])


def _require_rows(batch: MultiAgentBatch, rows: int) -> None:
    is_batch = isinstance(batch, MultiAgentBatch)
    if not is_batch or any(each.count != rows for each in batch.policy_batches.values()):
        raise UsageError(
            f"before_learn_on_batch must return a MultiAgentBatch with {rows} rows "
            f"(train_batch_size) of each policy to train, got {batch!r:.200}. Change the "
            "columns of the batch that is passed to it, and return that batch."
        )


class OffPolicyConfig(AlgorithmConfig):
    """The config of algorithms with replay; the fragment length "auto" is `n_step`."""

    training_section = OffPolicyTraining

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class)
        self.rollouts(rollout_fragment_length="auto")

    def fragment_length(self, num_envs: int | None = None, worker_index: int = 0) -> int:
        """Returns the rows that each environment yields per training step; "auto" is `n_step`."""
        del num_envs, worker_index
        length = self.rollout_fragment_length
        return int(self.n_step if length == "auto" else length)

    def validate(self) -> None:
        """Checks settings against each other.

        Raises:
            ConfigError: if settings contradict each other.
        """
        super().validate()
        if self.fragment_length() < self.n_step:
            raise ConfigError(
                f"rollout_fragment_length={self.rollout_fragment_length} must not be smaller than "
                f"n_step={self.n_step}; or use 'auto'."
            )
