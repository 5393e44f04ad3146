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
from tfpolicies.config.live_dict import copy_containers, is_equal
from tfpolicies.config.multi_agent_setup import make_policy_config
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.episode_summaries import summarize_episodes
from tfpolicies.rollout.policy_changes import MappingAndTrainable
from tfpolicies.rollout.rollout_worker import RolloutWorker
from tfpolicies.rollout.sampler import EvaluationResult

logger = logging.getLogger("tfpolicies")

_MAX_ENVS = 32  # maximum number of environments of one evaluation
_STEPS_PER_ENV = 1000  # each finishes its episode, so few steps need few environments

Remaining = Callable[[int], int]
"""Given the episodes or steps done so far, returns how many remain."""


class _SettingChange(NamedTuple):
    """A setting with another value in evaluation."""

    training_value: Any
    evaluation_value: Any
    is_explicit: bool  # set by `evaluation_config`, not implied by evaluation


class RunningEvaluation(NamedTuple):
    """An evaluation that runs in the background.

    Attributes:
        future: future of the result.
        training_done: set it to end an evaluation of duration "auto".
    """

    future: Future[EvaluationResult]
    training_done: threading.Event


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
        make_workers: Callable[[AlgorithmConfig, int], WorkerSet],
        training_worker: RolloutWorker,
    ) -> None:
        self.config = config
        self.workers: WorkerSet | None = None
        self.explore: bool | None = None
        self._make_workers = make_workers
        self._training_worker = training_worker
        self._workers_explore: bool | None = None  # `explore` as the workers have it
        self._changes_by_class: dict[type, dict[str, _SettingChange]] = {}

    @property
    def is_greedy_by_config(self) -> bool | None:
        """Whether `evaluation_config` makes policies greedy; None if it does not set `explore`."""
        explore = (self.config.evaluation_config or {}).get("explore")
        return None if explore is None else not explore

    def with_settings(self, changes: Mapping[str, Any], explore: bool | None) -> Evaluator:
        """Returns another evaluator of the same policies, which the caller must stop.

        Args:
            changes: settings that override `evaluation_config`.
            explore: its `explore`.
        """
        config = self.config.copy(copy_frozen=False)
        config.evaluation(evaluation_config={**(self.config.evaluation_config or {}), **changes})
        evaluator = Evaluator(config, self._make_workers, self._training_worker)
        evaluator.explore = explore
        return evaluator

    def prepare(self) -> WorkerSet:
        """Returns the workers with `explore` applied; the first call creates them."""
        if self.workers is not None:
            if self._workers_explore != self.explore:
                self._set_exploration(self.workers)
            return self.workers
        self._workers_explore = self.explore
        workers = self._make_workers(self._make_config(), self.config.evaluation_num_workers)
        local_worker, training_worker = workers.local_worker(), self._training_worker
        for policy_id, policy in training_worker.policy_map.items():
            if policy_id not in local_worker.policy_map:
                local_worker.add_policy(policy_id, policy=self.copy_policy(policy, policy_id))
        for policy_id in set(local_worker.policy_map) - set(training_worker.policy_map):
            local_worker.policies.remove(policy_id)
        local_worker.set_policy_mapping_fn(
            self._choose_mapping_fn(local_worker, training_worker.policy_mapping_fn)
        )
        workers.sync_workers()
        self.workers = workers
        return workers

    def _set_exploration(self, workers: WorkerSet) -> None:
        """Applies `explore` to the policies of workers, except those whose own config sets it.

        Environments, seeds and generators are kept, so that evaluations continue where they were.
        """
        self._workers_explore = self.explore
        self._changes_by_class.clear()
        explore, local_worker = self._make_config().explore, workers.local_worker()
        for policy_id in local_worker.policy_map:
            spec = self.config.policies.get(policy_id)
            policy, training_policies = (
                local_worker.policy_map.get_handle(policy_id),
                self._training_worker.policy_map,
            )
            has_explore_override = spec is not None and "explore" in (spec.config or {})
            if not has_explore_override and policy_id in training_policies:
                has_explore_override = (
                    training_policies.get_handle(policy_id).config.get("explore")
                    != self.config.explore
                )
            if not has_explore_override and "explore" in policy.config:
                policy.config["explore"] = explore
        workers.sync_workers()

    def copy_policy(self, policy: Policy, policy_id: str) -> Any:
        """Returns a copy of an added policy for the evaluation workers.

        It has the same settings as if it had been in the config: `evaluation_config` applies to
        settings that the policy shares with the training config, and its own settings are kept. If
        `evaluation_config` changes more than `explore`, a policy with a Program is rebuilt from its
        constructor, and its other attributes are copied.
        """
        changes, policy_settings = self._get_setting_changes(type(policy)), policy.config
        overrides = {
            name: copy_containers(change.evaluation_value)
            for name, change in changes.items()
            if name in policy_settings and is_equal(policy_settings[name], change.training_value)
        }
        explicit_names = {name for name in overrides if changes[name].is_explicit} - {"explore"}
        return policy.driver.copy_with_settings(policy_id, overrides, rebuild=bool(explicit_names))

    def _get_setting_changes(self, policy_class: type) -> dict[str, _SettingChange]:
        """Returns the settings that differ in evaluation for policies of a class, by name."""
        changes = self._changes_by_class.get(policy_class)
        if changes is None:
            evaluation_config = self.config.evaluation_config or {}
            explicit_config = self.config.copy(copy_frozen=False).update_from_dict(
                evaluation_config
            )
            training_settings, evaluation_settings, explicit_settings = (
                make_policy_config(config, DEFAULT_POLICY_ID, policy_class, {}).to_dict()
                for config in (self.config, self._make_config(), explicit_config)
            )
            changes = self._changes_by_class[policy_class] = {
                name: _SettingChange(
                    x, evaluation_settings[name], not is_equal(x, explicit_settings[name])
                )
                for name, x in training_settings.items()
                if not is_equal(x, evaluation_settings[name])
            }
        return changes

    def _choose_mapping_fn(
        self, local_worker: RolloutWorker, training_mapping_fn: Callable[..., str]
    ) -> Callable[..., str]:
        """Returns the mapping function: that of `evaluation_config`, else that of training."""
        evaluation_mapping_fn = local_worker.config.policy_mapping_fn
        return (
            training_mapping_fn
            if evaluation_mapping_fn is self.config.policy_mapping_fn
            else evaluation_mapping_fn
        )

    def set_mapping_and_trainable(self, mapping_and_trainable: MappingAndTrainable) -> None:
        """Sets mapping function and trained policies, if there are workers.

        Args:
            mapping_and_trainable: of the training workers; a mapping function of
                `evaluation_config` is kept.
        """
        if self.workers is not None:
            local_worker, (mapping_fn, to_train) = (
                self.workers.local_worker(),
                mapping_and_trainable,
            )
            self.workers.set_mapping_and_trainable(
                self._choose_mapping_fn(local_worker, mapping_fn), to_train
            )

    def restore_generators(
        self, seeds_used: int, generators: Mapping[str, np.random.Generator]
    ) -> None:
        """Restores the seeds and generators of a checkpoint for later evaluations.

        Args:
            seeds_used: how many environment seeds were used.
            generators: by policy id.
        """
        worker = self.prepare().local_worker()
        worker.seeds.num_calls = seeds_used
        for policy_id, rng in generators.items():
            generator = worker.policy_map.get_handle(policy_id).driver.generator
            if generator is not None:
                generator.bit_generator.state = rng.bit_generator.state

    def _make_config(self) -> AlgorithmConfig:
        """Returns the config of the evaluation workers, with environments for their share.

        A `custom_evaluation_function` gets the configured number of environments.
        """
        config = self.config.get_evaluation_config_object()
        if self._workers_explore is not None:
            config.exploration(explore=self._workers_explore)
        if config.custom_evaluation_function is not None:
            return config.rollouts(num_rollout_workers=0)
        duration, workers = config.evaluation_duration, max(1, config.evaluation_num_workers)
        envs = 1
        if duration != "auto":
            by_episodes = config.evaluation_duration_unit == "episodes"
            envs = duration // ((1 if by_episodes else _STEPS_PER_ENV) * workers)
        envs = max(1, min(envs, _MAX_ENVS))
        processes = min(envs, config.env_processes)
        return config.rollouts(
            num_envs_per_worker=envs, env_processes=processes, num_rollout_workers=0
        )

    def play(
        self, remaining: Remaining | None = None, episodes: int | None = None
    ) -> EvaluationResult:
        """Plays `evaluation_duration` episodes or steps with the current policies.

        Args:
            remaining: overrides the duration.
            episodes: overrides the duration with a number of episodes.
        """
        self.prepare().copy_weights_from(self._training_worker)
        if episodes is not None:
            return self._play(lambda done: episodes - done, by_episodes=True)
        return self._play(self._get_remaining if remaining is None else remaining)

    def start(self) -> RunningEvaluation:
        """Starts to play with the current policies in remote workers, and returns at once."""
        workers = self.prepare()
        workers.copy_weights_from(self._training_worker)
        training_done = threading.Event()
        duration = self.config.evaluation_duration

        def remaining_while_training(done: int) -> int:
            return (
                0
                if training_done.is_set() and done
                else max(1, workers.num_healthy_remote_workers())
            )

        executor = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        remaining = remaining_while_training if duration == "auto" else self._get_remaining
        future = executor.submit(self._play, remaining)
        executor.shutdown(wait=False)
        return RunningEvaluation(future, training_done)

    def _get_remaining(self, done: int) -> int:
        return int(self.config.evaluation_duration) - done

    def _play(self, remaining: Remaining, *, by_episodes: bool | None = None) -> EvaluationResult:
        workers = self.prepare()
        if by_episodes is None:
            by_episodes = self.config.evaluation_duration_unit == "episodes"
        total = EvaluationResult([], 0)
        while (amount := remaining(total.get_amount(by_episodes=by_episodes))) > 0:
            share = workers.play(amount, by_episodes=by_episodes)
            total = total if share is None else total.merge(share)
            if share is None or share.timed_out:
                self._warn_evaluation_cut(total.get_amount(by_episodes=by_episodes))
                break
        return total

    def make_empty_metrics(self) -> dict[str, Any]:
        """Returns the metrics reported before the first evaluation: means are NaN."""
        metrics = make_metrics(EvaluationResult([], 0), self.prepare())
        del metrics["hist_stats"]
        return metrics

    def _warn_evaluation_cut(self, done: int) -> None:
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
        if self.workers is not None:
            self.workers.stop()
            self.workers = None


def compute_std(returns: Sequence[float]) -> float:
    """Returns the population standard deviation of returns; NaN where there are none.

    >>> compute_std([1.0, 3.0]), compute_std([])
    (1.0, nan)
    """
    return float(np.std(returns)) if returns else math.nan


def make_metrics(result: EvaluationResult, workers: WorkerSet) -> dict[str, Any]:
    summary = summarize_episodes(result.episodes)
    steps = result.get_amount(by_episodes=False)
    summary["episode_reward_std"] = compute_std(summary["hist_stats"]["episode_reward"])
    return {
        **summary,
        "sampler_results": summary,
        "num_env_steps_sampled_this_iter": steps,
        "num_agent_steps_sampled_this_iter": result.agent_steps,
        "timesteps_this_iter": steps,
        "num_healthy_workers": workers.num_healthy_remote_workers(),
        "num_remote_worker_restarts": workers.num_remote_worker_restarts(),
        "num_in_flight_async_reqs": workers.num_in_flight_async_reqs(),
    }
