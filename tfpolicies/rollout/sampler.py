"""Base class of samplers: returns batches, plays episodes, and saves running episodes."""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.callbacks import DefaultCallbacks, gets_batches
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.envs.vector import Environments
from tfpolicies.errors import ConfigError
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.batches import Postprocessor
from tfpolicies.rollout.episode import Episode, RolloutMetrics
from tfpolicies.rollout.metrics import metrics_state, restored_metrics
from tfpolicies.rollout.timing import StepTimes

logger = logging.getLogger("tfpolicies")

LONG = 30_000
"""Steps after which an episode that delays a result is reported."""


def warn_long_episode(index: int, steps: int, *, evaluates: bool = False) -> None:
    """Logs a warning about an episode that delays sampling or an evaluation.

    Args:
        index: of its environment.
        steps: its length so far.
        in_evaluation: whether an evaluation waits for it.
    """
    waits, way_out = "batch_mode='complete_episodes'", "use batch_mode='truncate_episodes'"
    if evaluates:
        waits, way_out = "evaluation", "set evaluation_sample_timeout_s in the config"
    logger.warning(
        "Environment %d: an episode has not ended after %d steps, and %s waits for its end. Give "
        "the environment a time limit, such as gym.make(..., max_episode_steps=1000), or %s.",
        *(index, steps, waits, way_out),
    )


class Goal(NamedTuple):
    """The number of episodes or steps to play, in whole episodes."""

    amount: int  # of episodes, or minimum number of steps
    by_episodes: bool  # whether `amount` counts episodes
    limit: float = math.inf  # time, by `timing.now`; later episodes do not count


class Played(NamedTuple):
    """The episodes of an evaluation, and the agent steps in those that are not faulty."""

    episodes: list[RolloutMetrics]
    agent_steps: int
    is_cut: bool = False  # whether the time limit ended the evaluation

    def done(self, *, by_episodes: bool) -> int:
        """Returns the number of episodes that are not faulty, or of their environment steps."""
        sound = [episode for episode in self.episodes if not episode.episode_faulty]
        return len(sound) if by_episodes else sum(e.episode_length for e in sound)

    def plus(self, other: Played) -> Played:
        """Merges two results."""
        episodes, steps = self.episodes + other.episodes, self.agent_steps + other.agent_steps
        return Played(episodes, steps, self.is_cut or other.is_cut)


class Sampler(abc.ABC):
    """Steps environments with policies, and returns their experience.

    Args:
        envs: step together.
        policies: by id; may change between samples.
        fragment_length: steps of each environment per sample.
        complete_episodes: yield whole episodes, at least `fragment_length * N` steps of them.
        clip_rewards: None, True (the sign) or a bound. Learning gets clipped rewards, metrics
            raw ones.
        enable_connectors: see `Postprocessor`.
        rng: draws episode ids.
        callbacks: the user's; None for none.
        worker: passed to callbacks.
        perf_stats_ema_coef: see `StepTimes`.

    Attributes:
        envs: the environments, wrapped with connectors if there are any.
        policies: by id.
        rng: draws episode ids; may be replaced.
        metrics: of finished episodes, until the worker collects them.
        times: of the parts of a step.
    """

    def __init__(
        self,
        envs: Environments | MultiAgentEnvironments,
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
    ) -> None:
        self.envs = self._environments = envs
        self.policies = policies
        self.rng = rng
        self.metrics: list[RolloutMetrics] = []
        self.times = StepTimes(perf_stats_ema_coef)
        self._length = fragment_length
        self._complete = complete_episodes
        self._callbacks = DefaultCallbacks() if callbacks is None else callbacks
        self._gives_batches = gets_batches(self._callbacks)
        self._worker = worker
        self._postprocessor = Postprocessor(
            clip_rewards, self._callbacks, worker, policies, self._running_ids, enable_connectors
        )

    @property
    def running_episodes(self) -> Sequence[Episode]:
        """The running episodes, if they are tracked."""
        return ()

    @abc.abstractmethod
    def _running_ids(self) -> list[int]:
        """Returns the ids of running episodes."""

    def _require_fitting_exploration(self, policy: Policy, whose: str = "") -> None:
        """Raises a ConfigError if the policy's exploration needs whole episodes and gets none."""
        if policy.driver.acting.resets_per_episode and not self._complete:
            raise ConfigError(
                f"exploration_config={{'type': 'ParameterNoise'}}{whose} perturbs the weights for "
                "a whole episode, so it needs batch_mode='complete_episodes', got "
                "'truncate_episodes'."
            )

    def _reads_infos(self, policy: Policy) -> bool:
        return policy.driver.learning.postprocesses_trajectories or self._gives_batches

    def _tell(self, moment: str, episode: object, env_index: int) -> None:
        """Calls an episode callback; `episode` is the error if an error ended the episode."""
        getattr(self._callbacks, moment)(
            worker=self._worker,
            base_env=self._environments,
            policies=self.policies,
            episode=episode,
            env_index=env_index,
        )

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
    def play(self, goal: Goal, seeds: Sequence[int] | None) -> Played:
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
        if self._keeps_anything() or self._postprocessor.holds_infos:
            return None
        states = self.envs.get_state()
        running = None if states is None else self._get_running()
        if running is None:
            return None
        return {
            "envs": states,
            "pending": metrics_state(self.metrics),
            "rng": self.rng.bit_generator.state,
            **running,
            **self._postprocessor.get_state(),
        }

    @abc.abstractmethod
    def _keeps_anything(self) -> bool:
        """Returns whether running episodes may have data that a file cannot store."""

    @abc.abstractmethod
    def _get_running(self) -> dict[str, Any] | None:
        """Returns the running episodes as plain values and arrays; None without any."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self.metrics = restored_metrics(state["pending"])
        self.rng.bit_generator.state = state["rng"]
        if self._set_running(state):
            self.envs.set_state(state["envs"])
            self._postprocessor.set_state(state)
        else:
            self.reset(None)

    @abc.abstractmethod
    def _set_running(self, state: Mapping[str, Any]) -> bool:
        """Restores the running episodes; returns whether that was possible."""
