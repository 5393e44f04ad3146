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
from tfpolicies.base.type_aliases import Setting
from tfpolicies.base.validators import (
    BOOL,
    FRACTION,
    POSITIVE,
    POSITIVE_INT,
    function,
    int_at_least,
    is_one_of,
    one_of,
)
from tfpolicies.batch.postprocessing import n_step_returns
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.sections import TrainingSettings
from tfpolicies.config.setting import Merge, check, require, setting
from tfpolicies.errors import (
    ConfigError,
    ModelError,
    UnsupportedSpaceError,
    UsageError,
    suggest_similar_names,
)
from tfpolicies.models.catalog.inspection import get_extra_inputs, get_state_shapes
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.losses import masked_mean
from tfpolicies.models.model_source import ModelSource
from tfpolicies.models.spaces import is_float_box
from tfpolicies.models.view_requirements import get_acting_requirements
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.program.networks import NetworkPlan
from tfpolicies.program.traced_arguments import TrainBatch
from tfpolicies.replay import prioritized
from tfpolicies.replay.allocator import check_allocator_arguments
from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer
from tfpolicies.replay.prioritized import MultiAgentPrioritizedReplayBuffer
from tfpolicies.system.paths import resolve_path

logger = logging.getLogger("tfpolicies")

N_STEPS = "n_steps"
"""Column of n-step transitions: the number of rewards summed in each row, int32."""

_WIDE_BOUNDS = 1000.0  # difference of the bounds of an action
_classes_warned_of_width: set[str] = set()  # names of policy classes

_UNIFORM = ("MultiAgentReplayBuffer", "ReplayBuffer")
_PRIORITIZED = ("MultiAgentPrioritizedReplayBuffer", "PrioritizedReplayBuffer")
_CAPACITY = 50_000
_PRIORITY_SETTINGS = {f"prioritized_replay_{name}": name for name in ("alpha", "beta", "eps")}
PRIORITIZED_REPLAY_CONFIG: Mapping[str, Any] = {
    "type": _PRIORITIZED[0],
    "capacity": _CAPACITY,
    "prioritized_replay_alpha": 0.6,
    "prioritized_replay_beta": 0.4,
    "prioritized_replay_eps": 1e-6,
}
"""The default `replay_buffer_config` of algorithms with prioritised replay in RLlib."""

UPDATE_ORDER = one_of("together", "critics_first")
"""Validates `update_order`; with "critics_first" the actor is updated after its critics."""

_STORAGE_KEYS = ("memory_limit_bytes", "storage_path")
_MAX_BYTES_PER_CALL = 256 * 2**20  # maximum size of the rows of one compiled call


class OffPolicyTFPolicy(TFPolicy):
    """A policy with a target network that learns from single transitions."""

    config_class = lazy_class("OffPolicyConfig")
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
    def _get_model_source(
        cls, observation_space: gym.Space, dist_class: ActionDistribution, static: Mapping[str, Any]
    ) -> ModelSource:
        """Returns the source of models; replayed rows are single transitions.

        Raises:
            ConfigError: for model settings that need sequences, such as `use_lstm`.
            ModelError: for a custom model that is recurrent or reads previous actions.
        """
        check_feed_forward("model", static["model"], cls.__name__)
        source = super()._get_model_source(observation_space, dist_class, static)
        return source._replace(make=lambda: require_single_transitions(source.make()))

    def compute_discounts(self, train_batch: TrainBatch) -> tf.Tensor:
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
        added_columns, n = fragments.new_columns, self.config["n_step"]
        added_columns["weights"] = np.ones(rewards.shape, np.float32)
        if n == 1:
            return
        returns = n_step_returns(
            rewards, fragments.ends, terminateds, n, self.get_hyperparameter("gamma")
        )
        added_columns["rewards"] = returns.rewards
        added_columns[N_STEPS] = (returns.next_obs_index - np.arange(rewards.shape[1]) + 1).astype(
            np.int32
        )
        for name in ("terminateds", "truncateds"):
            column = fragments.columns[name]
            added_columns[name] = np.take_along_axis(
                np.asarray(column), returns.next_obs_index, axis=1
            )
        fragments.next_obs_index = returns.next_obs_index

    def update_target(self, tau: float | None = None) -> None:
        """Moves target networks towards the online ones: t <- tau q + (1 - tau) t.

        Args:
            tau: in [0, 1]; None takes the policy's `tau`. 0 changes nothing, 1 copies.

        Raises:
            ConfigError: if `tau` is out of range.
        """
        tau = self.get_hyperparameter("tau") if tau is None else tau
        require("tau", FRACTION, tau)
        self._state.update_targets(float(tau))

    _compiled_target_update = update_target

    def _record_values(self, values: tf.Tensor, errors: tf.Tensor, mask: tf.Tensor) -> None:
        """Records the values and temporal-difference errors of rows `[B]`."""
        is_counted, inf = mask > 0, float("inf")
        self.record(
            mean_q=masked_mean(values, mask),
            min_q=tf.reduce_min(tf.where(is_counted, values, inf)),
            max_q=tf.reduce_max(tf.where(is_counted, values, -inf)),
            mean_td_error=masked_mean(errors, mask),
            td_error=errors,
        )


def check_feed_forward(name: str, config: Mapping[str, Any], class_name: str) -> None:
    """Checks that a `model` config describes a feed-forward model for single transitions.

    Args:
        name: of the setting.
        config: complete.
        class_name: the policy class, for messages.
    """
    for key in ("use_lstm", "use_gru", "use_attention", "no_final_linear"):
        if config[key]:
            raise ConfigError(
                f"{name}[{key!r}] must be False for {class_name}: replayed rows are single "
                "transitions, and its outputs need a final linear layer."
            )


def check_action_vectors(action_space: gym.Space, class_name: str, other_spaces: str = "") -> None:
    """Checks that actions are float vectors, which critics take as input.

    Args:
        action_space: of the policy.
        class_name: the policy class, for messages.
        other_spaces: other supported spaces, for messages.
    """
    if not is_float_box(action_space) or len(action_space.shape or ()) != 1:
        raise UnsupportedSpaceError(
            f"{class_name} supports {other_spaces}one-dimensional Boxes of floats as action spaces "
            f"only, got {action_space}. For Discrete actions use DQN, SAC or PPO; flatten other "
            "Boxes in the environment, for example with a gymnasium.ActionWrapper."
        )


def check_action_bounds(action_space: gym.Space, class_name: str, alternative: str = "") -> None:
    """Checks that each dimension of a Box has finite bounds, into which actions are squashed.

    Warns once per class if the bounds are so far apart that random first actions are hardly useful.

    Args:
        action_space: of the policy, a vector of floats.
        class_name: the policy class, for messages.
        alternative: an alternative to bounds, for the message.
    """
    low, high = action_space.low, action_space.high  # type: ignore[attr-defined]
    unbounded = np.flatnonzero(~(np.isfinite(low) & np.isfinite(high)))
    if len(unbounded):
        i = unbounded[0]
        raise UnsupportedSpaceError(
            f"{class_name} squashes actions into the bounds of their dimension, which must be "
            f"finite, but those of dimension {i} of the action space are [{low[i]:g}, "
            f"{high[i]:g}]. Give the environment bounds: `gymnasium.wrappers.TransformAction(env, "
            f"lambda action: action, gymnasium.spaces.Box(low, high))`.{alternative}"
        )
    width = high.astype(np.float64) - low
    if (width >= _WIDE_BOUNDS).any() and class_name not in _classes_warned_of_width:
        _classes_warned_of_width.add(class_name)
        i = int(np.argmax(width))
        logger.warning(
            "Environment: the bounds of dimension %d of its action space are [%g, %g], and the "
            "first actions of %s are spread over this whole range. If only small actions are "
            "useful, give the environment narrower bounds.",
            i,
            low[i],
            high[i],
            class_name,
        )


def require_single_transitions(model: keras.Model) -> keras.Model:
    """Returns a custom model after checking that it takes single transitions."""
    sequence_inputs = [*get_extra_inputs(model), *get_acting_requirements(model)]
    sequence_inputs += ["state_in" for _ in get_state_shapes(model)]
    if sequence_inputs:
        raise ModelError(
            f"The model {model.name!r} takes {sequence_inputs[0]!r}, but replayed rows are single "
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

    config_class = lazy_class("OffPolicyConfig")
    samples_while_learning = True
    _replays = True

    def setup(self, config: AlgorithmConfig) -> None:
        """Creates the replay buffer."""
        self.replay_buffer = self._make_buffer()
        self.counters |= {"num_target_updates": 0, "last_target_update_ts": 0}
        self._pending_updates = 0.0
        self._pending_target_ids: set[str] = (
            set()
        )  # policies without rows at the last target update

    def _make_buffer(self) -> MultiAgentReplayBuffer:
        config = self.config.replay_buffer_config
        buffer_class = (
            MultiAgentPrioritizedReplayBuffer if _is_prioritized(config) else MultiAgentReplayBuffer
        )
        names = {**_PRIORITY_SETTINGS, **{key: key for key in _STORAGE_KEYS}}
        kwargs = {name: config[key] for key, name in names.items() if key in config}
        return buffer_class(config.get("capacity", _CAPACITY), self.config.seed, **kwargs)

    def training_step(self) -> dict[str, Any]:
        """Samples a fragment per environment, then updates on rows of the buffer."""
        env_steps_before = self.counters["num_env_steps_sampled"]
        batches = {
            pid: self._select_columns(pid, batch)
            for pid, batch in self.sample_train_batch(1).items()
        }
        rows = sum(batch.count for batch in batches.values())
        self.replay_buffer.add(MultiAgentBatch(batches, rows))
        if self.replay_buffer.num_added < self.config.num_steps_sampled_before_learning_starts:
            return {}
        updates = self._take_due_updates(rows)
        if not updates:
            return {}
        target_mask, last_target_step = self._make_target_mask(updates, env_steps_before)
        has_batch_function = self.config.before_learn_on_batch is not None
        learn = self._learn_transformed if has_batch_function else self._learn_sampled
        results = learn(list(batches), target_mask)
        if target_mask.any():
            self._pending_target_ids |= self.replay_buffer.buffers.keys() - batches.keys()
        self.counters["num_target_updates"] += int(target_mask.sum())
        self.counters["last_target_update_ts"] = last_target_step
        return results

    def _select_columns(self, policy_id: str, batch: SampleBatch) -> SampleBatch:
        """Returns the columns that the loss reads; recorded rows get those that have defaults."""
        policy = self.get_policy(policy_id)
        names = policy.driver.learning.select_columns(batch)
        defaults = getattr(type(policy), "_column_defaults", {})
        return SampleBatch(
            {
                name: np.full(batch.count, defaults[name], np.float32)
                if name in defaults and name not in batch
                else batch[name]
                for name in names
            }
        )

    def _take_due_updates(self, rows: int) -> int:
        if self.config.training_intensity is None:
            return 1
        self._pending_updates += (
            self.config.training_intensity * rows / self.config.train_batch_size
        )
        due = int(self._pending_updates)
        self._pending_updates -= due
        return due

    def _make_target_mask(self, updates: int, env_steps_before: int) -> tuple[np.ndarray, int]:
        """Returns a mask of updates followed by a target update, and the step of the last one."""
        freq, env_steps_now = (
            self.config.target_network_update_freq,
            self.counters["num_env_steps_sampled"],
        )
        last_target_step = self.counters["last_target_update_ts"]
        target_mask = np.zeros(updates, bool)
        for k in range(updates):
            env_step = env_steps_before + (env_steps_now - env_steps_before) * (k + 1) // updates
            if env_step - last_target_step >= freq:
                target_mask[k], last_target_step = True, env_step
        return target_mask, last_target_step

    def _learn_sampled(self, policy_ids: list[str], target_mask: np.ndarray) -> dict[str, Any]:
        """Does all updates of one policy before those of the next."""
        return {pid: self._learn(pid, target_mask) for pid in policy_ids}

    def _learn_transformed(self, policy_ids: list[str], target_mask: np.ndarray) -> dict[str, Any]:
        """Updates all policies in turn, on rows changed by `before_learn_on_batch`.

        Raises:
            UsageError: if that does not return `train_batch_size` rows per policy.
        """
        size, results = self.config.train_batch_size, {}
        for k in range(len(target_mask)):
            batches = {pid: self.replay_buffer.sample(size, pid) for pid in policy_ids}
            train_batch = MultiAgentBatch(batches, size)
            transformed = self.config.before_learn_on_batch(train_batch, self.workers, self.config)
            _require_rows(transformed, size)
            for pid, batch in transformed.policy_batches.items():
                results[pid] = self._learn(pid, target_mask[k : k + 1], batch)
        rows = len(target_mask) * size
        return {pid: {**result, "num_agent_steps_trained": rows} for pid, result in results.items()}

    def _learn(
        self, policy_id: str, target_mask: np.ndarray, given_batch: SampleBatch | None = None
    ) -> dict[str, Any]:
        """Updates a policy once per flag, on given rows (for one update) or sampled ones."""
        size, policy = self.config.train_batch_size, self.get_policy(policy_id)
        if policy_id in self._pending_target_ids:
            self._pending_target_ids.discard(policy_id)
            target_mask = target_mask.copy()
            target_mask[0] = True
        bytes_per_update = size * self.replay_buffer.buffers[policy_id].row_bytes
        updates_per_call = max(1, _MAX_BYTES_PER_CALL // max(1, bytes_per_update))
        reports_rows = _is_prioritized(self.config.replay_buffer_config)
        updates_per_call = 1 if reports_rows else updates_per_call
        result: Mapping[str, Any] = {}
        for done in range(0, len(target_mask), updates_per_call):
            call_mask = target_mask[done : done + updates_per_call]
            batch = given_batch
            if batch is None:
                batch = self.replay_buffer.sample(size * len(call_mask), policy_id)
            result = policy.driver.learning.replay(batch, None if reports_rows else size, call_mask)
            self._set_priorities(policy_id, batch, result)
        return {**result, "num_agent_steps_trained": len(target_mask) * size}

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
        is_finite = np.isfinite(errors)
        buffer.update_priorities({policy_id: (indexes[is_finite], np.asarray(errors)[is_finite])})

    def warm_up(self) -> None:
        """Compiles the updates of one training step."""
        size, intensity = self.config.train_batch_size, self.config.training_intensity
        rows = self.workers.rows_per_sample()
        updates = 1 if intensity is None else max(1, int(intensity * rows / size))
        if _is_prioritized(self.config.replay_buffer_config):
            self._warm_up_policies(size, lambda _: (1, None))
        else:
            self._warm_up_policies(updates * size, lambda _: (1, size))

    def get_extra_state(self) -> dict[str, Any]:
        """Returns pending updates, and the replay buffer if `store_buffer_in_checkpoints`."""
        stores_buffer = self.config.store_buffer_in_checkpoints
        buffer = self.replay_buffer.get_state() if stores_buffer else None
        return {
            "updates_owed": self._pending_updates,
            "targets_owed": sorted(self._pending_target_ids),
            "replay_buffer": buffer,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `get_extra_state`; without rows, the buffer starts empty."""
        buffer = self._make_buffer()
        if state["replay_buffer"] is not None:
            buffer.set_state(state["replay_buffer"])
        self.replay_buffer = buffer
        self._pending_updates = float(state["updates_owed"])
        self._pending_target_ids = set(state.get("targets_owed", ()))


@dataclass(frozen=True, kw_only=True)
class OffPolicyTrainingSettings(TrainingSettings):
    """Training settings shared by algorithms with replay."""

    n_step: int = setting(1, POSITIVE_INT)  # rewards summed in a transition
    target_network_update_freq: int = setting(
        500, int_at_least(0)
    )  # env steps between target updates
    tau: float = setting(1.0, FRACTION)  # the target's step towards the online network
    num_steps_sampled_before_learning_starts: int = setting(
        1000, int_at_least(0)
    )  # rows in the buffer
    training_intensity: float | None = setting(  # rows trained per row sampled
        None, POSITIVE.or_none()
    )
    replay_buffer_config: Mapping[str, Any] = setting(
        {"type": _UNIFORM[0], "capacity": _CAPACITY},
        merge=Merge.TYPED,
        normalize=lambda config: _normalize_buffer_config(config),
    )
    store_buffer_in_checkpoints: bool = setting(False, BOOL)
    before_learn_on_batch: Callable[..., MultiAgentBatch] | None = setting(  # changes sampled rows
        None, function("a function (batch, workers, config) -> batch").or_none()
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_buffer_config(self.replay_buffer_config)


def _is_prioritized(config: Mapping[str, Any]) -> bool:
    return config.get("type") in _PRIORITIZED


def _normalize_buffer_config(config: Setting) -> Any:
    """Returns a buffer's config with the type as a name and an absolute storage folder.

    A missing folder stays as written, so that the check rejects it.
    """
    if not isinstance(config, Mapping):
        return config
    buffer_type, folder = config.get("type"), config.get("storage_path")
    if isinstance(folder, str | os.PathLike) and (path := resolve_path(folder)).is_dir():
        config = {**config, "storage_path": str(path)}
    if isinstance(buffer_type, type) and buffer_type.__module__.startswith("tfpolicies."):
        buffer_type = buffer_type.__name__
    return (
        {**config, "type": buffer_type.rpartition(".")[2]}
        if isinstance(buffer_type, str)
        else config
    )


def _check_buffer_config(config: Mapping[str, Any]) -> None:
    name = "replay_buffer_config"
    check(isinstance(config, Mapping), name, "a dict {'capacity': ...}", config)
    buffer_type = config.get("type")
    buffer_type = _UNIFORM[0] if is_one_of(buffer_type, None, "") else buffer_type
    require(f"{name}['type']", one_of(*_UNIFORM, *_PRIORITIZED), buffer_type)
    allowed_keys = (
        "type",
        "capacity",
        *_STORAGE_KEYS,
        *(_PRIORITY_SETTINGS if _is_prioritized(config) else ()),
    )
    for key in config:
        if key in _PRIORITY_SETTINGS and key not in allowed_keys:
            raise ConfigError(
                f"{name} has {key!r}, but type {buffer_type!r} replays uniformly. For prioritised "
                f"replay set {{'type': '{_PRIORITIZED[0]}'}}."
            )
        if key not in allowed_keys:
            raise ConfigError(
                f"{name} has no key {key!r}.{suggest_similar_names(str(key), allowed_keys)} It "
                f"takes {', '.join(allowed_keys)}."
            )
    require(f"{name}['capacity']", POSITIVE_INT, config.get("capacity", _CAPACITY))
    check_allocator_arguments(*(config.get(key) for key in _STORAGE_KEYS))
    for key in set(_PRIORITY_SETTINGS) & set(config):
        require(f"{name}[{key!r}]", prioritized.NON_NEGATIVE, config[key])


def _require_rows(batch: MultiAgentBatch, rows: int) -> None:
    is_batch = isinstance(batch, MultiAgentBatch)
    if not is_batch or any(
        policy_batch.count != rows for policy_batch in batch.policy_batches.values()
    ):
        raise UsageError(
            f"before_learn_on_batch must return a MultiAgentBatch with {rows} rows "
            f"(train_batch_size) of each policy to train, got {batch!r:.200}. Change the "
            "columns of the batch that is passed to it, and return that batch."
        )


class OffPolicyConfig(AlgorithmConfig):
    """The config of algorithms with replay; the fragment length "auto" is `n_step`."""

    training_section = OffPolicyTrainingSettings

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class)
        self.rollouts(rollout_fragment_length="auto")

    def get_fragment_length(self, num_envs: int | None = None, worker_index: int = 0) -> int:
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
        if self.get_fragment_length() < self.n_step:
            raise ConfigError(
                f"rollout_fragment_length={self.rollout_fragment_length} must not be smaller than "
                f"n_step={self.n_step}; or use 'auto'."
            )
