"""Counters, timers and newest episodes of a run, and the result dict of an iteration."""

from __future__ import annotations

import datetime
import logging
import math
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.reporting.system_load import SystemLoad
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.episode_summaries import (
    get_metrics_state,
    restore_metrics,
    summarize_episodes,
    summarize_recent_returns,
)

logger = logging.getLogger("tfpolicies")

_MIN_EPISODES_PER_RESET = 3  # lengths of the longest episode between two resets of all episodes
_RECENT_STEPS = 10_000  # maximum environment steps of the recent episodes ...
_RUN_PARTS_PER_RECENT = 5  # ... early in a run: a fifth of its steps; at least one iteration
_NUM_FIRST_EPISODES = 20  # whose returns are kept for comparison with later ones


class TrainingMetrics:
    """The counters of a run, the timers of its current iteration, and its newest episodes.

    Args:
        config: of the algorithm, frozen.

    Attributes:
        counters: totals by name, since the start of the run.
        episodes: the newest `metrics_num_episodes_for_smoothing`.
        first_returns: of the first 20 episodes of the run; None if a checkpoint did not have them.
        seconds: time spent in the current iteration, by activity.
        max_env_steps: total environment steps at which an iteration ends in any case.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.counters: dict[str, int] = defaultdict(int)
        for unit in ("env_steps", "agent_steps"):
            self.counters |= {f"num_{unit}_sampled": 0, f"num_{unit}_trained": 0}
        self.episodes = deque[RolloutMetrics](maxlen=config.metrics_num_episodes_for_smoothing)
        self.first_returns: list[float] | None = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.max_env_steps = math.inf
        self._config = config
        self._system_load = SystemLoad() if config.log_sys_usage else None
        self._episodes_total = 0
        self._time_total = 0.0
        self._restored_at = (0, 0.0)  # iteration and seconds when built or restored
        self._first_reset_at = self._last_reset_at = 0  # environment steps
        self._num_reset_intervals = 0
        self._has_warned_of_resets = False

    def begin_iteration(self) -> None:
        self._started_at, self._counters_at_start = time.perf_counter(), dict(self.counters)
        self.seconds.clear()

    def add_time(self, name: str, started_at: float) -> None:
        """Adds the time since `started_at` to an activity of the iteration."""
        self.seconds[name] += time.perf_counter() - started_at

    @property
    def unit(self) -> str:
        """The unit of training steps and time steps: "env_steps" or "agent_steps"."""
        return str(self._config.count_steps_by)

    def is_iteration_complete(self) -> bool:
        """Returns whether the iteration has its minimum steps and seconds, or the run ends."""
        if self.counters["num_env_steps_sampled"] >= self.max_env_steps:
            return True
        config, (sampled_steps, trained_steps) = self._config, self._count_iteration_steps()
        return bool(
            sampled_steps >= config.min_sample_timesteps_per_iteration
            and trained_steps >= config.min_train_timesteps_per_iteration
            and time.perf_counter() - self._started_at >= (config.min_time_s_per_iteration or 0.0)
        )

    def _count_iteration_steps(self) -> tuple[int, int]:
        unit = self.unit
        return self._get_increase(f"num_{unit}_sampled"), self._get_increase(f"num_{unit}_trained")

    def _get_increase(self, name: str) -> int:
        return self.counters[name] - self._counters_at_start[name]

    def make_result(
        self, iteration: int, learner: Mapping[str, Any], workers: WorkerSet
    ) -> dict[str, Any]:
        """Ends an iteration and returns its result.

        Args:
            iteration: its number.
            learner: the learner's results by policy id.
            workers: provide the finished episodes.
        """
        new_episodes = workers.get_metrics()
        window = self._add_episodes(new_episodes)
        keep_custom_metrics = self._config.keep_per_episode_custom_metrics
        summary = summarize_episodes(
            window, len(new_episodes), keep_custom_metrics=keep_custom_metrics
        )
        seconds = time.perf_counter() - self._started_at
        self._time_total += seconds
        counters, unit, (sampled_steps, trained_steps) = (
            self.counters,
            self.unit,
            self._count_iteration_steps(),
        )
        env_steps, now = self._get_increase("num_env_steps_sampled"), datetime.datetime.now()
        ms = {name: 1e3 * self.seconds[name] for name in ("sample", "load", "learn", "sync")}
        restored_iteration, restored_time = self._restored_at
        return {
            **summary,
            "sampler_results": summary,
            "recent_returns": summarize_recent_returns(window, self._count_recent_steps()),
            "info": {"learner": learner, **counters},
            **counters,
            "counters": dict(counters),
            "num_healthy_workers": workers.num_healthy_remote_workers(),
            "num_remote_worker_restarts": workers.num_remote_worker_restarts(),
            "num_in_flight_async_reqs": workers.num_in_flight_async_reqs(),
            f"num_{unit}_sampled_this_iter": sampled_steps,
            f"num_{unit}_trained_this_iter": trained_steps,
            "num_env_steps_sampled_throughput_per_sec": env_steps / seconds,
            f"num_{unit}_sampled_throughput_per_sec": sampled_steps / seconds,
            f"num_{unit}_trained_throughput_per_sec": trained_steps / seconds,
            "num_steps_trained_this_iter": trained_steps,
            "timesteps_total": counters[f"num_{unit}_sampled"],
            "agent_timesteps_total": counters["num_agent_steps_sampled"],
            "timers": {
                "training_iteration_time_ms": 1e3 * seconds,
                "sample_time_ms": ms["sample"],
                "load_time_ms": ms["load"],
                "load_throughput": _compute_throughput(trained_steps, ms["load"]),
                "learn_time_ms": ms["learn"],
                "learn_throughput": _compute_throughput(trained_steps, ms["learn"]),
                "synch_weights_time_ms": ms["sync"],
            },
            "training_iteration": iteration,
            "iterations_since_restore": iteration - restored_iteration,
            "episodes_total": self._episodes_total,
            "time_this_iter_s": seconds,
            "time_total_s": self._time_total,
            "time_since_restore": self._time_total - restored_time,
            "date": now.strftime("%Y-%m-%d_%H-%M-%S"),
            "timestamp": int(now.timestamp()),
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "node_ip": workers.local_worker().get_node_ip(),
            "trial_id": "default",
            "done": False,
            "config": self._config.to_dict(),
            "perf": {} if self._system_load is None else self._system_load.read(),
        }

    def _add_episodes(self, new_episodes: list[RolloutMetrics]) -> list[RolloutMetrics]:
        """Adds finished episodes, and returns those to summarize for this iteration."""
        self.episodes.extend(new_episodes)
        self._episodes_total += len(new_episodes)
        if self.first_returns is not None:
            missing = max(0, _NUM_FIRST_EPISODES - len(self.first_returns))
            self.first_returns += [
                float(episode.episode_reward) for episode in new_episodes[:missing]
            ]
        return [*self.episodes] if len(new_episodes) < len(self.episodes) else new_episodes

    def _count_recent_steps(self) -> int:
        steps = self.counters["num_env_steps_sampled"]
        return max(
            self._get_increase("num_env_steps_sampled"),
            min(_RECENT_STEPS, steps // _RUN_PARTS_PER_RECENT),
        )

    def get_progress(self, iteration: int) -> dict[str, Any]:
        """Returns the counters after an iteration, for a checkpoint."""
        return {
            "iteration": iteration,
            "counters": dict(self.counters),
            "episodes": get_metrics_state(self.episodes),
            "episodes_total": self._episodes_total,
            "first_returns": self.first_returns,
            "time_total_s": self._time_total,
        }

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        self.counters.update(progress["counters"])
        self.episodes.clear()
        self.episodes.extend(restore_metrics(progress["episodes"]))
        self._episodes_total = progress["episodes_total"]
        first_returns = progress.get("first_returns")  # which older checkpoints lack
        self.first_returns = None if first_returns is None else list(first_returns)
        self._time_total = progress["time_total_s"]
        self._restored_at = progress["iteration"], self._time_total
        self._first_reset_at = self._last_reset_at = self.counters["num_env_steps_sampled"]
        self._num_reset_intervals = 0

    def add_reset(self, num_envs: int) -> None:
        """Counts a reset of all episodes; warns once if earlier ones came too soon.

        Only episodes that end between two resets have returns, so frequent resets leave out long
        ones.

        Args:
            num_envs: environments of all workers together.
        """
        steps = self.counters["num_env_steps_sampled"]
        if steps == self._last_reset_at or self._has_warned_of_resets:
            return
        total = self._last_reset_at - self._first_reset_at
        interval = total / max(1, self._num_reset_intervals) / num_envs
        self._last_reset_at = steps
        self._num_reset_intervals += 1
        longest = max((episode.episode_length for episode in self.episodes), default=0)
        is_short = not longest or interval < _MIN_EPISODES_PER_RESET * longest
        if not interval or not is_short:
            return
        self._has_warned_of_resets = True
        ended = f"the longest that has ended has {longest:,} steps" if longest else "none has ended"
        logger.warning(
            "Episodes are cut: reset_episodes_at_checkpoint=True begins new ones at each "
            "checkpoint, here every %s steps of each environment, and %s. Episodes that are cut "
            "have no return, and long ones are cut most often, so the mean return is wrong. Save "
            "less often (checkpoint_every=N, --checkpoint-every N): an interval should have at "
            "least %d times as many steps as the longest episode.",
            f"{interval:,.0f}",
            ended,
            _MIN_EPISODES_PER_RESET,
        )


def _compute_throughput(count: int, ms: float) -> float:
    """Returns the throughput per second; 0 if no time was measured."""
    return 1e3 * count / ms if ms else 0.0
