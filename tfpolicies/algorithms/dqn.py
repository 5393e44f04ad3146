"""Deep Q-learning, Mnih et al. 2015 (doi:10.1038/nature14236).

One training step: collect a fragment, keep its rows in a ring buffer, and update on rows drawn
uniformly from it, by minimising

    L = E[w l(Q(s, a) - y)]                          l: Huber (delta 1), or the square
    y = r + gamma^n (1 - terminated) Q'(s', a*)      (Mnih et al.; n-step: Sutton & Barto 2018, 7.1)

where Q' is the target network and a* maximises Q (double Q-learning, van Hasselt et al. 2016,
arXiv:1509.06461, equation 4) or else Q'. The network may be duelling (Wang et al. 2016,
arXiv:1511.06581). A truncated episode is bootstrapped, a terminated one is not.

Deviations from the papers: Adam; gradients are clipped by each variable's norm; the rows of all
updates of one training step are drawn before the first of them, which run in one compiled call.
Near the end of a fragment, n-step sums have fewer terms, and gamma's exponent is their number.
Distributional and noisy networks and prioritised replay are not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.batch.multi_agent_batch import MultiAgentBatch
from tfpolicies.batch.postprocessing import n_step_returns
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.sections import (
    Training,
    check,
    check_bools,
    check_unit_interval,
    is_count,
    is_number,
)
from tfpolicies.errors import ConfigError, ModelError, UnsupportedSpaceError, near_matches
from tfpolicies.models.catalog import build_q_model, extra_inputs, memory_of
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.distributions.dueling import DuelingValues
from tfpolicies.models.losses import huber, masked_mean
from tfpolicies.models.network import ModelSource, fingerprint
from tfpolicies.models.ports import model_leaves
from tfpolicies.models.preprocessing import encoded_shape
from tfpolicies.models.q_learning import chosen_values, td_errors, td_targets
from tfpolicies.models.settings import is_list_of_counts
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.replay.multi_agent import MultiAgentReplayBuffer
from tfpolicies.state import PolicyState

N_STEPS = "n_steps"
"""Column of n-step transitions: how many rewards are summed up in each row, int32."""

_UNIFORM = ("ReplayBuffer", "MultiAgentReplayBuffer")
_BYTES_PER_CALL = 256 * 2**20  # of rows that one compiled call learns from, at most


@dataclass(frozen=True, kw_only=True)
class DQNTraining(Training):
    """The training settings of DQN."""

    lr: float = 5e-4
    grad_clip: float | None = 40.0
    grad_clip_by: str = "norm"
    adam_epsilon: float = 1e-8  # > 0, of the default optimizer
    double_q: bool = True  # the online network chooses the action that the target one values
    dueling: bool = True  # off for a model of one's own
    hiddens: Any = field(default_factory=lambda: [256])  # hidden layers of the heads
    n_step: int = 1  # rewards of a transition
    td_error_loss_fn: str = "huber"  # or "mse"
    target_network_update_freq: int = 500  # environment steps between updates of the target
    tau: float = 1.0  # its step towards the online network, in [0, 1]
    num_steps_sampled_before_learning_starts: int = 1000  # rows in the buffer before updates
    training_intensity: float | None = None  # rows trained per row sampled; None: one update a step
    replay_buffer_config: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "MultiAgentReplayBuffer", "capacity": 50_000}
    )
    store_buffer_in_checkpoints: bool = False
    num_atoms: int = 1  # 1: the only one; distributional Q-learning is not offered
    noisy: bool = False  # False: the only one; noisy networks are not offered

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bools(self, "double_q", "dueling", "store_buffer_in_checkpoints")
        check(is_list_of_counts(self.hiddens), "hiddens", "a list of integers >= 1", self.hiddens)
        check(is_count(self.n_step), "n_step", "an integer >= 1", self.n_step)
        losses, loss = ("huber", "mse"), self.td_error_loss_fn
        check(loss in losses, "td_error_loss_fn", f"one of {losses}", loss)
        check_unit_interval("tau", self.tau)
        for name in ("target_network_update_freq", "num_steps_sampled_before_learning_starts"):
            check(is_count(getattr(self, name), 0), name, "an integer >= 0", getattr(self, name))
        epsilon, intensity = self.adam_epsilon, self.training_intensity
        check(is_number(epsilon) and epsilon > 0, "adam_epsilon", "a number > 0", epsilon)
        valid = intensity is None or (is_number(intensity) and intensity > 0)
        check(valid, "training_intensity", "None or a number > 0", intensity)
        check(self.num_atoms == 1, "num_atoms", "1 (no distributional network)", self.num_atoms)
        check(self.noisy is False, "noisy", "False (no noisy network)", self.noisy)
        _check_buffer(self.replay_buffer_config)


def _check_buffer(config: Any) -> None:
    name = "replay_buffer_config"
    check(isinstance(config, Mapping), name, "a dict {'capacity': ...}", config)
    kind = config.get("type") or _UNIFORM[1]
    if "prioritized" in " ".join(map(str, (kind, *config))).lower():
        raise ConfigError(
            f"{name}={dict(config)!r}: prioritised replay is not offered, rows are drawn "
            f"uniformly. Use {{'type': '{_UNIFORM[1]}', 'capacity': ...}}."
        )
    check(kind in _UNIFORM, f"{name}['type']", f"one of {_UNIFORM}", kind)
    for key in config:
        known = ("type", "capacity")
        if key not in known:
            raise ConfigError(
                f"{name} has no key {key!r}.{near_matches(str(key), known)} It takes "
                f"{', '.join(known)}."
            )
    capacity = config.get("capacity", 50_000)
    check(is_count(capacity), f"{name}['capacity']", "an integer >= 1", capacity)


class DQNConfig(AlgorithmConfig):
    """The config of DQN.

    >>> config = DQNConfig().environment("CartPole-v1").training(lr=1e-3, n_step=3)
    >>> config.fragment_length(), config.exploration_config["type"]
    (3, 'EpsilonGreedy')
    """

    training_section = DQNTraining

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or DQN)
        self.rollouts(rollout_fragment_length="auto")
        self.reporting(min_sample_timesteps_per_iteration=1000)
        self.evaluation(evaluation_config={"explore": False})
        self.exploration(
            exploration_config={
                "type": "EpsilonGreedy",
                "initial_epsilon": 1.0,
                "final_epsilon": 0.02,
                "epsilon_timesteps": 10_000,
            }
        )

    def fragment_length(self, num_envs: int | None = None) -> int:
        """Returns the rows that each environment yields per training step; "auto" is `n_step`."""
        del num_envs
        length = self.rollout_fragment_length
        return int(self.n_step if length == "auto" else length)

    def validate(self) -> None:
        """Checks settings against each other.

        Raises:
            ConfigError: naming the contradiction.
        """
        super().validate()
        if self.fragment_length() < self.n_step:
            raise ConfigError(
                f"rollout_fragment_length={self.rollout_fragment_length} must not be smaller than "
                f"n_step={self.n_step}; or use 'auto'."
            )


class DQNTFPolicy(TFPolicy):
    """The mathematics of DQN, for any runtime.

    `extras["q_values"]` `[B, n]` of acting are the action values; those of actions that a mask
    forbids are the smallest float32. `learn_on_batch` gives `td_error` `[B]`.
    """

    config_class = DQNConfig
    hyperparameters = (*TFPolicy.hyperparameters, "tau")
    static_keys = (
        *TFPolicy.static_keys,
        "adam_epsilon",
        "double_q",
        "dueling",
        "hiddens",
        "n_step",
        "td_error_loss_fn",
    )

    def validate_spaces(
        self, observation_space: gym.Space, action_space: gym.Space, config: Mapping[str, Any]
    ) -> None:
        super().validate_spaces(observation_space, action_space, config)
        if not isinstance(action_space, gym.spaces.Discrete):
            raise UnsupportedSpaceError(
                f"{type(self).__name__} supports Discrete actions only, got {action_space}: a "
                "value is estimated for each action."
            )

    @classmethod
    def wants_target(cls, static: Mapping[str, Any]) -> bool:
        """Whether there is a target network: always."""
        del static
        return True

    @classmethod
    def distribution(cls, action_space: gym.Space, static: Mapping[str, Any]) -> Any:
        """Returns what turns action values into actions: the largest one is the greedy action."""
        kind = DuelingValues if _is_dueling(static) else ActionDistribution
        return kind.of(action_space)

    @classmethod
    def model_source(
        cls,
        observation_space: gym.Space,
        dist_class: Any,
        static: Mapping[str, Any],
        *,
        with_value: bool,
    ) -> ModelSource:
        """Returns where Q-networks come from.

        A model of the user's gives the values of all actions, `[B, n]`; `dueling` and `hiddens` do
        not concern it.

        Raises:
            ConfigError: for settings of models that a Q-network cannot have, such as a memory.
            ModelError: for a model of the user's that has a memory or reads previous actions.
        """
        config = static["model"]
        for name in ("use_lstm", "use_gru", "use_attention", "no_final_linear"):
            if config[name]:
                raise ConfigError(
                    f"model[{name!r}] must be False for {cls.__name__}: replayed rows are single "
                    "transitions, and the values come from linear layers of their own."
                )
        if config["custom_model"] is not None:
            source = super().model_source(
                observation_space, dist_class, static, with_value=with_value
            )
            return source._replace(make=lambda seed: _without_memory(source.make(seed)))
        found, actions = model_leaves(observation_space), dist_class.num_inputs
        hiddens, dueling = list(static["hiddens"]), static["dueling"]
        shapes = tuple((encoded_shape(leaf), leaf.path) for leaf in found)
        settings = {k: v for k, v in config.items() if not k.startswith("custom_model")}
        key = ("q", shapes, actions, tuple(hiddens), dueling, fingerprint(settings))

        def make(seed: int) -> keras.Model:
            return build_q_model(
                found, actions, config, hiddens=hiddens, dueling=dueling, seed=seed
            )

        return ModelSource(key, make, None)

    @classmethod
    def make_optimizer(cls, static: Mapping[str, Any]) -> Any:
        """Returns a new Keras optimizer; Adam, the default one, gets `adam_epsilon`."""
        settings = dict(static["optimizer"])
        if str(settings.get("type", "adam")).lower() == "adam":
            settings.setdefault("epsilon", static["adam_epsilon"])
        return super().make_optimizer({**static, "optimizer": settings})

    # -- learning -----------------------------------------------------------------------------

    def loss(self, model: Any, dist_class: Any, train_batch: Any) -> tf.Tensor:
        """Returns the mean loss of the temporal-difference errors, weighted by `weights`."""
        del dist_class
        q, _ = model(train_batch)
        reached = {SampleBatch.OBS: train_batch[SampleBatch.NEXT_OBS]}
        next_target, _ = self.target_model(reached)
        chooser = model(reached)[0] if self.config["double_q"] else next_target
        goes_on = 1.0 - tf.cast(train_batch[SampleBatch.TERMINATEDS], tf.float32)
        targets = td_targets(
            train_batch[SampleBatch.REWARDS],
            self._discounts(train_batch) * goes_on,
            next_target,
            chooser,
        )
        self._chosen = chosen_values(q, train_batch[SampleBatch.ACTIONS])
        self._td_error = td_errors(self._chosen, tf.stop_gradient(targets))
        self._mask = train_batch["loss_mask"]
        error = huber if self.config["td_error_loss_fn"] == "huber" else tf.square
        return masked_mean(train_batch["weights"] * error(self._td_error), self._mask)

    def _discounts(self, train_batch: Any) -> tf.Tensor:
        gamma = self.config["gamma"]
        if self.config["n_step"] == 1:
            return gamma
        return tf.pow(gamma, tf.cast(train_batch[N_STEPS], tf.float32))

    def stats_fn(self, train_batch: Any) -> dict[str, tf.Tensor]:
        """Returns mean, minimum and maximum of the chosen actions' values, and the mean error."""
        del train_batch
        counts, inf = self._mask > 0, float("inf")
        return {
            "mean_q": masked_mean(self._chosen, self._mask),
            "min_q": tf.reduce_min(tf.where(counts, self._chosen, inf)),
            "max_q": tf.reduce_max(tf.where(counts, self._chosen, -inf)),
            "mean_td_error": masked_mean(self._td_error, self._mask),
        }

    def extra_learn_fetches_fn(self) -> dict[str, tf.Tensor]:
        """Returns the temporal-difference error of each row, `td_error` `[B]`."""
        return {"td_error": self._td_error}

    def extra_action_out_fn(self) -> dict[str, tf.Tensor]:
        """Returns the action values, `q_values` `[N, n]`."""
        return {"q_values": self.dist_inputs}

    def postprocess_fragments(self, fragments: Fragments) -> None:
        """Adds `weights` (ones) and, if `n_step` is not 1, makes n-step transitions."""
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

    def compute_td_error(
        self,
        obs_t: Any,
        act_t: Any,
        rew_t: Any,
        obs_tp1: Any,
        terminateds_mask: Any,
        importance_weights: Any = None,
    ) -> np.ndarray:
        """Returns the temporal-difference error of each transition, float32 `[B]`; updates nothing.

        Args:
            obs_t: observations `[B, ...]`.
            act_t: actions `[B]`.
            rew_t: rewards `[B]`, sums over `n_step` steps.
            obs_tp1: the observations reached `[B, ...]`.
            terminateds_mask: `[B]`, 1 or True where the episode terminated.
            importance_weights: accepted and unused: they weigh the loss, not the errors.

        Raises:
            ObservationError: if observations do not fit their space.
        """
        del importance_weights
        next_target = self._q_values(self._target_state(), obs_tp1)
        chooser = self._q_values(self._state, obs_tp1) if self.config["double_q"] else next_target
        discount = self.hyper("gamma") ** self.config["n_step"]
        goes_on = discount * (1.0 - np.asarray(terminateds_mask, np.float32))
        targets = td_targets(np.asarray(rew_t, np.float32), goes_on, next_target, chooser)
        chosen = chosen_values(self._q_values(self._state, obs_t), np.asarray(act_t))
        return td_errors(chosen, targets).numpy()

    @cached_property
    def _scratch(self) -> PolicyState:
        return PolicyState(self.program.layout, self._state.hyper, np.random.default_rng(0))

    def _target_state(self) -> PolicyState:
        """Returns a state whose model is the target network, for acting."""
        layout, arrays = self.program.layout, self._state.arrays
        pairs = zip(layout.of("model"), layout.of("target"), strict=True)
        target = {model.key: arrays[target.key] for model, target in pairs}
        self._scratch.write({**self._state.copy_of("filter"), **target})
        return self._scratch

    def _q_values(self, state: PolicyState, obs: Any) -> np.ndarray:
        inputs, explorer = self._acting.checked_inputs(obs), self.exploration
        noise = np.zeros((len(inputs[0]), explorer.noise_size), np.float32)
        params = np.zeros(explorer.num_params, np.float32)
        return self._acting.runner.run(state, inputs, noise, params).dist_inputs.copy()

    def update_target(self, tau: float | None = None) -> None:
        """Moves the target network towards the online one: t <- tau q + (1 - tau) t.

        Args:
            tau: in [0, 1]; None takes the policy's own. 0 changes nothing, 1 copies.

        Raises:
            ConfigError: if `tau` is out of range.
        """
        tau = self.hyper("tau") if tau is None else tau
        check_unit_interval("tau", tau)
        self._state.copy_part("model", "target", float(tau))


def _is_dueling(static: Mapping[str, Any]) -> bool:
    return static["dueling"] and static["model"]["custom_model"] is None


def _without_memory(model: keras.Model) -> keras.Model:
    found = [*extra_inputs(model), *("state_in" for _ in memory_of(model))]
    if found:
        raise ModelError(
            f"The model {model.name!r} takes {found[0]!r}, but replayed rows are single "
            "transitions. Give DQN a model of the observation alone, for example of several "
            "stacked frames."
        )
    return model


class DQNTF2Policy(DQNTFPolicy):
    """DQN on traced TensorFlow functions.

    >>> from gymnasium import spaces
    >>> space, actions = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
    >>> policy = DQNTF2Policy(space, actions, {"seed": 0, "inference": "tf"})
    >>> policy.compute_actions(np.zeros((3, 4), np.float32)).extras["q_values"].shape
    (3, 2)
    """


class DQNTF1Policy(DQNTFPolicy):
    """DQN in graph mode, in a `tf.Graph` and its own session."""

    runtime = "session"


class DQN(Algorithm):
    """The training loop of DQN; made by `DQNConfig().build()`.

    Learning starts when the buffer was given `num_steps_sampled_before_learning_starts` rows. A
    training step then does one update, or as many as `training_intensity` asks for: rows sampled
    times intensity is rows trained, fractions are carried over.

    Attributes:
        replay_buffer: the newest rows of each policy, with the columns its loss reads.
    """

    config_class = DQNConfig

    @classmethod
    def default_policy_class(cls, config: AlgorithmConfig) -> type[TFPolicy]:
        """Returns the class of policies that name none."""
        return DQNTF1Policy if config.framework_str == "tf" else DQNTF2Policy

    def setup(self) -> None:
        """Makes the replay buffer."""
        self.replay_buffer = self._new_buffer()
        self.counters |= {"num_target_updates": 0, "last_target_update_ts": 0}
        self._updates_owed = 0.0

    def _new_buffer(self) -> MultiAgentReplayBuffer:
        capacity = self.config.replay_buffer_config.get("capacity", 50_000)
        return MultiAgentReplayBuffer(capacity, self.config.seed)

    def training_step(self) -> dict[str, Any]:
        """Samples a fragment of each environment, then updates on rows of the buffer."""
        batches = {pid: self._kept(pid, batch) for pid, batch in self.sample_rows(1).items()}
        rows = sum(batch.count for batch in batches.values())
        self.replay_buffer.add(MultiAgentBatch(batches, rows))
        if self.replay_buffer.num_added < self.config.num_steps_sampled_before_learning_starts:
            return {}
        updates = self._updates_due(rows)
        results = {pid: self._learn(pid, updates) for pid in batches} if updates else {}
        self._update_targets()
        return results

    def _kept(self, policy_id: str, batch: SampleBatch) -> SampleBatch:
        """Returns the columns of a batch that learning reads."""
        return SampleBatch({name: batch[name] for name in self.get_policy(policy_id).loss_columns})

    def _updates_due(self, rows: int) -> int:
        if self.config.training_intensity is None:
            return 1
        self._updates_owed += self.config.training_intensity * rows / self.config.train_batch_size
        due = int(self._updates_owed)
        self._updates_owed -= due
        return due

    def _learn(self, policy_id: str, updates: int) -> dict[str, Any]:
        size, policy = self.config.train_batch_size, self.get_policy(policy_id)
        stats = self.replay_buffer.buffers[policy_id].stats()
        bytes_per_update = size * stats["size_bytes"] // stats["capacity"]
        most = max(1, _BYTES_PER_CALL // max(1, bytes_per_update))
        result: dict[str, Any] = {}
        for done in range(0, updates, most):
            batch = self.replay_buffer.sample(size * min(most, updates - done), policy_id)
            result = policy.learn_epochs(batch, 1, size, shuffle=False)
        return {**result, "num_agent_steps_trained": updates * size}

    def _update_targets(self) -> None:
        counters, freq = self.counters, self.config.target_network_update_freq
        now = counters["num_env_steps_sampled"]
        if now - counters["last_target_update_ts"] < freq:
            return
        for policy_id in self.replay_buffer.buffers:
            self.get_policy(policy_id).update_target()
        counters["num_target_updates"] += 1
        counters["last_target_update_ts"] = now

    def warm_up(self) -> None:
        """Compiles the updates of one training step."""
        size, intensity = self.config.train_batch_size, self.config.training_intensity
        rows = self.expected_rows_per_sample()
        updates = 1 if intensity is None else max(1, int(intensity * rows / size))
        self.get_policy().warm_up(updates * size, 1, size)

    def get_extra_state(self) -> dict[str, Any]:
        """Returns what is owed, and the replay buffer if `store_buffer_in_checkpoints`."""
        stored = self.config.store_buffer_in_checkpoints
        buffer = self.replay_buffer.get_state() if stored else None
        return {"updates_owed": self._updates_owed, "replay_buffer": buffer}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_extra_state` returned; without rows, the buffer begins empty."""
        buffer = self._new_buffer()
        if state["replay_buffer"] is not None:
            buffer.set_state(state["replay_buffer"])
        self.replay_buffer = buffer
        self._updates_owed = float(state["updates_owed"])
