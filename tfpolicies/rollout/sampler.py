"""Base class of samplers: returns batches, plays episodes, and saves running episodes."""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.callbacks import DefaultCallbacks, has_batch_methods
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.vector_adapters import VectorEnvAdapter
from tfpolicies.errors import ConfigError
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.episode import Episode, RolloutMetrics
from tfpolicies.rollout.episode_summaries import get_metrics_state, restore_metrics
from tfpolicies.rollout.postprocessor import Postprocessor, TrajectoryOwners
from tfpolicies.rollout.rollout_rows import RolloutRows
from tfpolicies.rollout.timing import StepTimes

logger = logging.getLogger("tfpolicies")

LONG_EPISODE_STEPS = 30_000
"""Steps after which an episode that delays a result is reported."""


def warn_long_episode(index: int, steps: int, *, in_evaluation: bool = False) -> None:
    """Logs a warning about an episode that delays sampling or an evaluation.

    Args:
        index: of its environment.
        steps: its length so far.
        in_evaluation: whether an evaluation waits for it.
    """
    waiting_for, advice = "batch_mode='complete_episodes'", "use batch_mode='truncate_episodes'"
    if in_evaluation:
        waiting_for, advice = "evaluation", "set evaluation_sample_timeout_s in the config"
    logger.warning(
        "Environment %d: an episode has not ended after %d steps, and %s waits for its end. Give "
        "the environment a time limit, such as gym.make(..., max_episode_steps=1000), or %s.",
        *(index, steps, waiting_for, advice),
    )


class EvaluationDuration(NamedTuple):
    """The number of episodes or steps to play, in whole episodes."""

    amount: int  # of episodes, or minimum number of steps
    by_episodes: bool  # whether `amount` counts episodes
    deadline: float = math.inf  # time, by `timing.now`; later episodes do not count


class EvaluationResult(NamedTuple):
    """The episodes of an evaluation, and the agent steps in those that are not faulty."""

    episodes: list[RolloutMetrics]
    agent_steps: int
    timed_out: bool = False  # whether the time limit ended the evaluation

    def get_amount(self, *, by_episodes: bool) -> int:
        """Returns the number of episodes that are not faulty, or of their environment steps."""
        valid = [episode for episode in self.episodes if not episode.episode_faulty]
        return len(valid) if by_episodes else sum(e.episode_length for e in valid)

    def merge(self, other: EvaluationResult) -> EvaluationResult:
        """Merges two results."""
        episodes, steps = self.episodes + other.episodes, self.agent_steps + other.agent_steps
        return EvaluationResult(episodes, steps, self.timed_out or other.timed_out)


class Sampler(abc.ABC):
    """Steps environments with policies, and returns their experience.

    Args:
        envs: step together.
        policies: by id; may change between samples.
        fragment_length: steps of each environment per sample.
        complete_episodes: yield whole episodes, at least `get_fragment_length * N` steps of them.
        clip_rewards: None, True (the sign) or a bound. Learning gets clipped rewards, metrics
            raw ones.
        enable_connectors: see `Postprocessor`.
        rng: draws episode ids.
        callbacks: the user's; None for none.
        worker: passed to callbacks.
        perf_stats_ema_coef: see `StepTimes`.
        record: called with the rows of each sample, of each policy, before postprocessing, and the
            number of environment steps; None for nothing.

    Attributes:
        envs: the environments, wrapped with connectors if there are any.
        policies: by id.
        rng: draws episode ids; may be replaced.
        metrics: of finished episodes, until the worker collects them.
        times: of the parts of a step.
    """

    state_kind: str | None = None  # in states of other inputs; None: running episodes

    def __init__(
        self,
        envs: VectorEnvAdapter | MultiAgentEnvAdapter,
        policies: Mapping[str, Any],
        *,
        fragment_length: int,
        rng: np.random.Generator,
        complete_episodes: bool = False,
        clip_rewards: bool | float | None = None,
        enable_connectors: bool = True,
        callbacks: DefaultCallbacks | None = None,
        worker: object = None,
        perf_stats_ema_coef: float | None = None,
        record: Callable[[Sequence[RolloutRows], int], None] | None = None,
    ) -> None:
        self.envs = self._base_envs = envs
        self.policies = policies
        self.rng = rng
        self.metrics: list[RolloutMetrics] = []
        self.times = StepTimes(perf_stats_ema_coef)
        self._fragment_length = fragment_length
        self._complete_episodes = complete_episodes
        self._callbacks = DefaultCallbacks() if callbacks is None else callbacks
        self._callbacks_read_batches = has_batch_methods(self._callbacks)
        self._worker = worker
        self._postprocessor = Postprocessor(
            clip_rewards,
            self._callbacks,
            worker,
            policies,
            self._get_running_ids,
            enable_connectors,
        )
        self._record = record

    @property
    def num_envs(self) -> int:
        """The number of environments."""
        return int(self.envs.num_envs)

    @property
    def running_episodes(self) -> Sequence[Episode]:
        return ()

    @abc.abstractmethod
    def _get_running_ids(self) -> list[int]:
        """Returns the ids of running episodes."""

    def _require_fitting_exploration(self, policy: Policy, policy_label: str = "") -> None:
        """Raises a ConfigError if the policy's exploration needs whole episodes and gets none."""
        if policy.driver.acting.resets_per_episode and not self._complete_episodes:
            raise ConfigError(
                f"exploration_config={{'type': 'ParameterNoise'}}{policy_label} perturbs the "
                "weights for a whole episode, so it needs batch_mode='complete_episodes', got "
                "'truncate_episodes'."
            )

    def _reads_infos(self, policy: Policy) -> bool:
        return policy.driver.learning.postprocesses_trajectories or self._callbacks_read_batches

    def _run_callback(self, callback_name: str, episode: object, env_index: int) -> None:
        """Calls an episode callback; `episode` is the error if an error ended the episode."""
        getattr(self._callbacks, callback_name)(
            worker=self._worker,
            base_env=self._base_envs,
            policies=self.policies,
            episode=episode,
            env_index=env_index,
        )

    def _make_batches(
        self,
        samples: Sequence[RolloutRows],
        get_owners: Callable[[], TrajectoryOwners],
        env_steps: int,
    ) -> dict[str, SampleBatch]:
        """Records the rows of a sample; returns the postprocessed batches by policy id."""
        if self._record is not None and samples:
            self._record(samples, env_steps)
        return self._postprocessor.make_batches(samples, get_owners)

    def close(self) -> None:  # noqa: B027
        """Does nothing: the worker closes its environments."""

    @abc.abstractmethod
    def reset(self, seeds: Sequence[int] | None) -> None:
        """Starts new episodes in all environments; drops rows that were not returned yet.

        Args:
            seeds: one for each environment; None for none.
        """

    @abc.abstractmethod
    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Returns the next postprocessed batch of the running episodes.

        Raises:
            UsageError: if no episodes are running.
        """

    @abc.abstractmethod
    def play(self, goal: EvaluationDuration, seeds: Sequence[int] | None) -> EvaluationResult:
        """Plays whole episodes without returning rows.

        Each environment plays a fixed share, the first ones get the remainder: collecting whichever
        episodes end first would favour short episodes.

        Args:
            goal: how much to play.
            seeds: one for each environment; new episodes start.
        """

    def get_state(self) -> dict[str, Any] | None:
        """Returns the state of the running episodes, or None if that is not possible.

        It is not possible without running episodes, if an environment cannot return its state, or
        if callbacks track episodes or rows have infos, which may hold arbitrary objects.
        """
        if self._has_unsavable_state() or self._postprocessor.has_infos:
            return None
        env_states = self.envs.get_state()
        running_state = None if env_states is None else self._get_running_state()
        if running_state is None:
            return None
        return {
            "envs": env_states,
            "pending": get_metrics_state(self.metrics),
            "rng": self.rng.bit_generator.state,
            **running_state,
            **self._postprocessor.get_state(),
        }

    @abc.abstractmethod
    def _has_unsavable_state(self) -> bool:
        """Returns whether running episodes may have data that a file cannot store."""

    @abc.abstractmethod
    def _get_running_state(self) -> dict[str, Any] | None:
        """Returns the running episodes as plain values and arrays; None without any."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self.metrics = restore_metrics(state["pending"])
        self.rng.bit_generator.state = state["rng"]
        if self._set_running_state(state):
            self.envs.set_state(state["envs"])
            self._postprocessor.set_state(state)
        else:
            self.reset(None)

    @abc.abstractmethod
    def _set_running_state(self, state: Mapping[str, Any]) -> bool:
        """Restores the running episodes; returns whether that was possible."""
