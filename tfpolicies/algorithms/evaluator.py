"""Evaluates policies during training, in separate environments, here or in remote workers."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.multi_agent_setup import policy_config
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.config.read_only import copied, is_equal
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.metrics import summarize_episodes
from tfpolicies.rollout.policy_changes import MappingAndTrainable
from tfpolicies.rollout.rollout_worker import RolloutWorker
from tfpolicies.rollout.sampler import Played

logger = logging.getLogger("tfpolicies")

_MOST_ENVS = 32  # maximum number of environments of one evaluation
_STEPS_PER_ENV = 1000  # each finishes its episode, so few steps need few environments

Remaining = Callable[[int], int]
"""Given the episodes or steps done so far, returns how many remain."""


class _Change(NamedTuple):
    """A setting with another value in evaluation."""

    trained: Any
    evaluated: Any
    is_asked_for: bool  # set by `evaluation_config`, not implied by evaluation


class RunningEvaluation(NamedTuple):
    """An evaluation that runs in the background.

    Attributes:
        future: future of the result.
        training_done: set it to end an evaluation of duration "auto".
    """

    played: Future[Played]
    training_is_over: threading.Event


class Evaluator:
    """Plays episodes with the current policies of a training worker.

    It has separate environments, policies and random generators, so that evaluation does not affect
    training. It runs in this process, or in `evaluation_num_workers` remote workers.

    Args:
        config: of the algorithm.
        make_workers: creates a `WorkerSet` from a config and a number of workers.
        training_worker: the training worker, whose policies are evaluated.

    Attributes:
        workers: the evaluation workers; None before `prepare`.
        explore: whether policies explore, overriding the config; None: as in the config.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        new_workers: Callable[[AlgorithmConfig, int], WorkerSet],
        leader: RolloutWorker,
    ) -> None:
        self.config = config
        self.workers: WorkerSet | None = None
        self.explore: bool | None = None
        self._new_workers = new_workers
        self._leader = leader
        self._explores: bool | None = None  # `explore` as the workers have it
        self._changes_by_class: dict[type, dict[str, _Change]] = {}

    @property
    def is_greedy_by_config(self) -> bool | None:
        """Whether `evaluation_config` makes policies greedy; None if it does not set `explore`."""
        explore = (self.config.evaluation_config or {}).get("explore")
        return None if explore is None else not explore

    def changed(self, changes: Mapping[str, Any], explore: bool | None) -> Evaluator:
        """Returns another evaluator of the same policies, which the caller must stop.

        Args:
            changes: settings that override `evaluation_config`.
            explore: its `explore`.
        """
        config = self.config.copy(copy_frozen=False)
        config.evaluation(evaluation_config={**(self.config.evaluation_config or {}), **changes})
        evaluator = Evaluator(config, self._new_workers, self._leader)
        evaluator.explore = explore
        return evaluator

    def prepare(self) -> WorkerSet:
        """Returns the workers with `explore` applied; the first call creates them."""
        if self.workers is not None:
            if self._explores != self.explore:
                self._set_exploration(self.workers)
            return self.workers
        self._explores = self.explore
        workers = self._new_workers(self._config(), self.config.evaluation_num_workers)
        here, leader = workers.local_worker(), self._leader
        for policy_id, policy in leader.policy_map.items():
            if policy_id not in here.policy_map:
                here.add_policy(policy_id, policy=self.copy_of(policy, policy_id))
        for policy_id in set(here.policy_map) - set(leader.policy_map):
            here.policies.remove(policy_id)
        here.set_policy_mapping_fn(self._mapping_of(here, leader.policy_mapping_fn))
        workers.align()
        self.workers = workers
        return workers

    def _set_exploration(self, workers: WorkerSet) -> None:
        """Applies `explore` to the policies of workers, except those whose own config sets it.

        Environments, seeds and generators are kept, so that evaluations continue where they were.
        """
        self._explores = self.explore
        self._changes_by_class.clear()
        explore, here = self._config().explore, workers.local_worker()
        for policy_id in here.policy_map:
            spec = self.config.policies.get(policy_id)
            policy, trained = here.policy_map.handle(policy_id), self._leader.policy_map
            decides = spec is not None and "explore" in (spec.config or {})
            if not decides and policy_id in trained:
                decides = trained.handle(policy_id).config.get("explore") != self.config.explore
            if not decides and "explore" in policy.config:
                policy.config["explore"] = explore
        workers.align()

    def copy_of(self, policy: Policy, policy_id: str) -> Any:
        """Returns a copy of an added policy for the evaluation workers.

        It has the same settings as if it had been in the config: `evaluation_config` applies to
        settings that the policy shares with the training config, and its own settings are kept. If
        `evaluation_config` changes more than `explore`, a policy with a Program is rebuilt from its
        constructor, and its other attributes are copied.
        """
        changes, own = self._changes(type(policy)), policy.config
        changed = {
            name: copied(change.evaluated)
            for name, change in changes.items()
            if name in own and is_equal(own[name], change.trained)
        }
        asked = {name for name in changed if changes[name].is_asked_for} - {"explore"}
        return policy.driver.copy_with_settings(policy_id, changed, rebuild=bool(asked))

    def _changes(self, policy_class: type) -> dict[str, _Change]:
        """Returns the settings that differ in evaluation for policies of a class, by name."""
        found = self._changes_by_class.get(policy_class)
        if found is None:
            asked = self.config.evaluation_config or {}
            overridden = self.config.copy(copy_frozen=False).update_from_dict(asked)
            trained, evaluated, told = (
                policy_config(config, DEFAULT_POLICY_ID, policy_class, {}).to_dict()
                for config in (self.config, self._config(), overridden)
            )
            found = self._changes_by_class[policy_class] = {
                name: _Change(x, evaluated[name], not is_equal(x, told[name]))
                for name, x in trained.items()
                if not is_equal(x, evaluated[name])
            }
        return found

    def _mapping_of(self, here: RolloutWorker, followed: Callable[..., str]) -> Callable[..., str]:
        """Returns the mapping function: that of `evaluation_config`, else that of training."""
        own = here.config.policy_mapping_fn
        return followed if own is self.config.policy_mapping_fn else own

    def assign(self, roles: MappingAndTrainable) -> None:
        """Sets mapping function and trained policies, if there are workers.

        Args:
            mapping_and_trainable: of the training workers; a mapping function of `evaluation_config` is kept.
        """
        if self.workers is not None:
            here, (mapping_fn, to_train) = self.workers.local_worker(), roles
            self.workers.set_mapping_and_trainable(self._mapping_of(here, mapping_fn), to_train)

    def restore_generators(
        self, seeds_used: int, generators: Mapping[str, np.random.Generator]
    ) -> None:
        """Restores the seeds and generators of a checkpoint for later evaluations.

        Args:
            seeds_used: how many environment seeds were used.
            generators: by policy id.
        """
        worker = self.prepare().local_worker()
        worker.seeds.used = seeds_used
        for policy_id, rng in generators.items():
            generator = worker.policy_map.handle(policy_id).driver.generator
            if generator is not None:
                generator.bit_generator.state = rng.bit_generator.state

    def _config(self) -> AlgorithmConfig:
        """Returns the config of the evaluation workers, with environments for their share.

        A `custom_evaluation_function` gets the configured number of environments.
        """
        config = self.config.get_evaluation_config_object()
        if self._explores is not None:
            config.exploration(explore=self._explores)
        if config.custom_evaluation_function is not None:
            return config.rollouts(num_rollout_workers=0)
        duration, workers = config.evaluation_duration, max(1, config.evaluation_num_workers)
        envs = 1
        if duration != "auto":
            by_episodes = config.evaluation_duration_unit == "episodes"
            envs = duration // ((1 if by_episodes else _STEPS_PER_ENV) * workers)
        envs = max(1, min(envs, _MOST_ENVS))
        processes = min(envs, config.env_processes)
        return config.rollouts(
            num_envs_per_worker=envs, env_processes=processes, num_rollout_workers=0
        )

    def play(self, remaining: Remaining | None = None, episodes: int | None = None) -> Played:
        """Plays `evaluation_duration` episodes or steps with the current policies.

        Args:
            remaining: overrides the duration.
            episodes: overrides the duration with a number of episodes.
        """
        self.prepare().follow(self._leader)
        if episodes is not None:
            return self._play(lambda done: episodes - done, by_episodes=True)
        return self._play(self._fixed if remaining is None else remaining)

    def start(self) -> RunningEvaluation:
        """Starts to play with the current policies in remote workers, and returns at once."""
        workers = self.prepare()
        workers.follow(self._leader)
        over = threading.Event()
        duration = self.config.evaluation_duration

        def as_long_as_training(done: int) -> int:
            return 0 if over.is_set() and done else max(1, workers.num_healthy_remote_workers())

        executor = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        remaining = as_long_as_training if duration == "auto" else self._fixed
        played = executor.submit(self._play, remaining)
        executor.shutdown(wait=False)
        return RunningEvaluation(played, over)

    def _fixed(self, done: int) -> int:
        return int(self.config.evaluation_duration) - done

    def _play(self, remaining: Remaining, *, by_episodes: bool | None = None) -> Played:
        workers = self.prepare()
        if by_episodes is None:
            by_episodes = self.config.evaluation_duration_unit == "episodes"
        whole = Played([], 0)
        while (amount := remaining(whole.done(by_episodes=by_episodes))) > 0:
            part = workers.play(amount, by_episodes=by_episodes)
            whole = whole if part is None else whole.plus(part)
            if part is None or part.is_cut:
                self._say_it_was_cut(whole.done(by_episodes=by_episodes))
                break
        return whole

    def no_metrics(self) -> dict[str, Any]:
        """Returns the metrics reported before the first evaluation: means are NaN."""
        found = as_metrics(Played([], 0), self.prepare())
        del found["hist_stats"]
        return found

    def _say_it_was_cut(self, done: int) -> None:
        config = self.config
        logger.warning(
            "An evaluation was ended by evaluation_sample_timeout_s=%g seconds, after %d of %s %s. "
            "Give its environment a time limit, such as gym.make(..., max_episode_steps=1000), or "
            "raise evaluation_sample_timeout_s.",
            config.evaluation_sample_timeout_s,
            done,
            config.evaluation_duration,
            config.evaluation_duration_unit,
        )

    def stop(self) -> None:
        """Stops the evaluation workers."""
        if self.workers is not None:
            self.workers.stop()
            self.workers = None


def standard_deviation(returns: Sequence[float]) -> float:
    """Returns the population standard deviation of returns; NaN where there are none.

    >>> standard_deviation([1.0, 3.0]), standard_deviation([])
    (1.0, nan)
    """
    return float(np.std(returns)) if returns else math.nan


def as_metrics(played: Played, workers: WorkerSet) -> dict[str, Any]:
    """Returns the metrics of an evaluation."""
    summary = summarize_episodes(played.episodes)
    steps = played.done(by_episodes=False)
    summary["episode_reward_std"] = standard_deviation(summary["hist_stats"]["episode_reward"])
    return {
        **summary,
        "sampler_results": summary,
        "num_env_steps_sampled_this_iter": steps,
        "num_agent_steps_sampled_this_iter": played.agent_steps,
        "timesteps_this_iter": steps,
        "num_healthy_workers": workers.num_healthy_remote_workers(),
        "num_remote_worker_restarts": workers.num_remote_worker_restarts(),
        "num_in_flight_async_reqs": workers.num_in_flight_async_reqs(),
    }
