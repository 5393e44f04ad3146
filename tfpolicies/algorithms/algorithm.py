"""The training loop that algorithms share: sample, learn, report, evaluate, save."""

from __future__ import annotations

import copy
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.algorithms import algorithm_checkpoints
from tfpolicies.algorithms.algorithm_card import make_algorithm_card
from tfpolicies.algorithms.algorithm_checkpoints import SaveResult, StoredAlgorithm, save
from tfpolicies.algorithms.algorithm_evaluation import AlgorithmEvaluation
from tfpolicies.algorithms.algorithm_policies import AlgorithmPolicies
from tfpolicies.algorithms.algorithm_state import build_from_state, make_state, restore_state
from tfpolicies.algorithms.config_completion import (
    EnvSource,
    complete_config,
    record_resolved_settings,
)
from tfpolicies.algorithms.evaluator import Evaluator
from tfpolicies.algorithms.health_checks import HealthChecks
from tfpolicies.algorithms.learn import Callback, LearnResult, learn
from tfpolicies.algorithms.run_description import describe_algorithm
from tfpolicies.algorithms.run_logger import TrainingOptions
from tfpolicies.algorithms.train_batch_sampler import TrainBatchSampler
from tfpolicies.algorithms.training_checks import LearnerResultCheck, TrainableCheck
from tfpolicies.algorithms.training_metrics import TrainingMetrics
from tfpolicies.algorithms.tuned_hyperparameters import require_tuned
from tfpolicies.base.allowlist import allow_in_checkpoint
from tfpolicies.base.extensions import Extensible, ExtensibleMeta
from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import DefaultCallbacks, warn_of_unknown_methods
from tfpolicies.config.migration_hints import (
    EVALUATE_ARGUMENTS,
    LEARN_ARGUMENTS,
    describe_missing_attribute,
    find_setting_equivalent,
    suggest_for_unknown_keywords,
)
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.distributed.tune import make_default_config, make_resource_request
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.envs.env_registry import get_env_name
from tfpolicies.errors import ConfigError, NonFiniteError, UsageError
from tfpolicies.export.model_card import export_facts
from tfpolicies.models.work import limit_work
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.policy_checkpoints import get_path
from tfpolicies.policy.policy_summary import format_policies
from tfpolicies.rollout.curriculum import set_tasks
from tfpolicies.rollout.policy_changes import MappingAndTrainable, PolicyAddition
from tfpolicies.rollout.rollout_worker import RolloutWorker
from tfpolicies.rollout.worker_environments import check_environment
from tfpolicies.system.paths import resolve_path

logger = logging.getLogger("tfpolicies")

_MAX_IDS_SHOWN = 10  # policy ids in a message


def _setting_hint(algorithm: Algorithm, name: str) -> str:
    return find_setting_equivalent(name, algorithm.get_default_config()._section_by_setting)


@allow_in_checkpoint("algorithm_class")
class Algorithm(Extensible, metaclass=ExtensibleMeta):
    """A training algorithm: environments, policies, and the loop that trains them.

    A subclass sets the policy classes it trains, by framework (`policy_classes`), and overrides
    `training_step`. The default training step does one update on a batch of fresh experience.

    Args:
        config: an `AlgorithmConfig` or a dict of settings; the algorithm freezes it.
        env: the environment, if the config names none.

    Raises:
        ConfigError: if settings contradict each other, or `env` those of the config.
        EnvError: if the environment is unknown or unusable.
    """

    _describe_missing = staticmethod(describe_missing_attribute)
    config_class: type[AlgorithmConfig] = AlgorithmConfig
    policy_classes: Mapping[str, type[Policy]] = {}  # by framework: "tf2", and "tf" for graph mode
    samples_while_learning = False  # whether remote workers sample while this process learns
    _replays = False  # whether the training step learns from a replay buffer

    @suggest_for_unknown_keywords(
        _setting_hint, " Write {0}Config().environment(env).training(...).build()."
    )
    def __init__(
        self, config: AlgorithmConfig | Mapping[str, Any] | None = None, env: EnvSource = None
    ) -> None:
        config = complete_config(type(self), config, env)
        check = TrainableCheck(type(self))
        check.check_config(config)
        self.config = config
        logger.setLevel(config.log_level if config.log_level != "WARN" else logging.WARNING)
        make_callbacks = config["callbacks"] or DefaultCallbacks
        self.callbacks: DefaultCallbacks = make_callbacks()
        warn_of_unknown_methods(self.callbacks)
        self.workers = self._make_workers(config)
        self._check_environment()
        self.worker.flushes_filters = False
        self._evaluator = Evaluator(config, self._make_workers, self.worker)
        self._evaluation = AlgorithmEvaluation(self, self._evaluator)
        self.policies = AlgorithmPolicies(self.workers, self._evaluator, check)
        self.iteration = 0
        self._metrics = TrainingMetrics(config)
        self.counters = self._metrics.counters
        self._train_batch_sampler = TrainBatchSampler(self.workers, self._metrics, check)
        name, policies = type(self).__name__, self.worker.policy_map
        self._learner_check = LearnerResultCheck(name, config, policies)
        self._health_checks = HealthChecks()
        self._is_stopped = False
        self.run_dir: Path | None = None  # of the last `learn` that had one
        # By the first `save`; commands log their own message
        self.warns_about_unserializable = True
        # The folder of the newest finite checkpoint
        self._last_finite_checkpoint: str | None = None
        self._has_warned_of_false = False  # returned by a callback
        self._last_result: dict[str, Any] = {}
        self.setup(config)
        self.warm_up()
        record_resolved_settings(self)
        if config.evaluation_interval is not None or config.evaluation_num_workers:
            self._evaluator.prepare()
        self.callbacks.on_algorithm_init(algorithm=self)

    def __repr__(self) -> str:
        """Returns class, environment and iteration: `PPO(env='CartPole-v1', iteration=3)`."""
        parts = []
        if "config" in vars(self):  # the constructor may have failed before
            parts.append(f"env={get_env_name(self.config.env)!r}")
            if self.config.is_multi_agent():
                parts.append(f"policies={sorted(self.config.policies)!r:.80}")
        parts.append(f"iteration={vars(self).get('iteration', 0)}")
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def training_iteration(self) -> int:
        """The number of completed iterations, including those before a restore; `iteration`."""
        return self.iteration

    def _make_workers(self, config: AlgorithmConfig, count: int | None = None) -> WorkerSet:
        is_complete = all(spec.policy_class is not None for spec in config.policies.values())
        default_class = None if is_complete else self.get_default_policy_class(config)
        workers = WorkerSet(config=config, default_policy_class=default_class, num_workers=count)
        workers.on_recreated = functools.partial(self._notify_recreated, workers)
        return workers

    def _check_environment(self) -> None:
        """Plays a few steps of an environment in the process of the first sampling worker.

        Raises:
            EnvError: if the environment fails the check.
        """
        try:
            self.workers.foreach_worker(check_environment, remote_worker_ids=[1])
        except BaseException:
            self.workers.stop()
            raise

    def _notify_recreated(self, workers: WorkerSet, worker_ids: list[int]) -> None:
        self.callbacks.on_workers_recreated(
            algorithm=self,
            worker_set=workers,
            worker_ids=worker_ids,
            is_evaluation=workers is not self.workers,
        )

    @property
    def worker(self) -> RolloutWorker:
        """The worker of this process. Its policies are trained."""
        return self.workers.local_worker()

    @property
    def evaluation_workers(self) -> WorkerSet | None:
        """The evaluation workers; None if neither an interval nor their number is set.

        They are created when the algorithm is built, or else by the first `evaluate()`.
        """
        return self._evaluator.workers

    @property
    def evaluation_worker(self) -> RolloutWorker | None:
        """The evaluation worker of this process; see `evaluation_workers`."""
        workers = self.evaluation_workers
        return None if workers is None else workers.local_worker()

    # -- overridden by subclasses -------------------------------------------------------------

    @classmethod
    def get_default_config(cls) -> Any:
        """Returns a new config of this algorithm, with its defaults."""
        config = cls.config_class()
        config.algo_class = cls  # a subclass may share the config of its base
        return config

    @classmethod
    def get_tuned_settings(cls, env: str) -> dict[str, Any]:
        """Returns a copy of the settings that learn well in an environment.

        Raises:
            ConfigError: if there are none for this algorithm and environment; the message names the
                nearest ones.
        """
        return copy.deepcopy(dict(require_tuned(cls.__name__, env).settings))

    @classmethod
    def get_default_policy_class(cls, config: AlgorithmConfig) -> type[Policy]:
        """Returns the class of policies without an explicit one; by default from `policy_classes`.

        Raises:
            ConfigError: if the algorithm has none for the framework.
        """
        policy_class = cls.policy_classes.get(config.framework_str)
        if policy_class is None:
            raise ConfigError(
                f"{cls.__name__} has no policy class for framework {config.framework_str!r}; set "
                "`policy_classes`, or override `get_default_policy_class(config)`."
            )
        return policy_class

    @classmethod
    def default_resource_request(cls, config: AlgorithmConfig | Mapping[str, Any]) -> Any:
        """Returns the `PlacementGroupFactory` that Ray Tune reserves for a run; may be overridden.

        A bundle of `num_cpus_for_local_worker` CPUs and `num_gpus` GPUs, and one per remote worker.

        Args:
            config: a config, or a dict of settings; unknown settings are ignored.

        Raises:
            ConfigError: if Ray Tune is not installed, or for wrong settings.
        """
        if not isinstance(config, AlgorithmConfig):
            default = make_default_config(cls)
            settings = {name: value for name, value in config.items() if name in default}
            config = default.update_from_dict(settings)
        return make_resource_request(config)

    def setup(self, config: AlgorithmConfig) -> None:
        """Sets up the attributes of a subclass; called once, after the policies are created."""

    def training_step(self) -> dict[str, Any]:
        """Does one step of training and returns the learner's results by policy id."""
        return {
            policy_id: self.get_policy(policy_id).learn_on_batch(batch)
            for policy_id, batch in self.sample_train_batch().items()
        }

    def warm_up(self) -> None:
        """Traces and compiles the functions used in training, so that no iteration waits for it."""
        rows = self._count_expected_train_batch_rows()
        self._warm_up_policies(rows, lambda _: (1, rows))

    def _warm_up_policies(
        self, rows: int, get_sizes: Callable[[str], tuple[int, int | None]]
    ) -> None:
        """Traces and compiles the functions of one policy of each Program.

        Args:
            rows: of a train batch. With several agents, the share of each policy is not known in
                advance, so updates are not compiled.
            get_sizes: returns the epochs of an update of a policy, by its id, and the rows of a
                minibatch: None for one update on all rows that reports statistics of each row.
        """
        programs = set()
        for policy_id, policy in self.worker.policy_map.items():
            program, learning = policy.driver.program, policy.driver.learning
            if program in programs:
                continue
            programs.add(program)
            if not self.worker.policies.is_trained(policy_id):
                _ = policy.driver.acting.inference
            elif self.workers.is_multi_agent():
                learning.resolve_auto_settings()
            else:
                learning.warm_up(rows, *get_sizes(policy_id))

    def _get_update_setting(self, policy_id: str, name: str) -> Any:
        """Returns a setting of a policy's updates; the algorithm's if the policy has none."""
        policy_config: Mapping[str, Any] = getattr(self.get_policy(policy_id), "config", {})
        return policy_config.get(name, self.config[name])

    # -- parts of a training step -------------------------------------------------------------

    def sample_train_batch(self, min_steps: int | None = None) -> dict[str, SampleBatch]:
        """Samples whole fragments until there are enough steps.

        Args:
            min_steps: the number of steps, as `count_steps_by` counts them; None for
                `train_batch_size`.

        Returns:
            The rows of each trained policy, by policy id.
        """
        min_steps = self.config.train_batch_size if min_steps is None else min_steps
        return self._train_batch_sampler.sample(
            min_steps, while_learning=self.samples_while_learning
        )

    def _count_expected_train_batch_rows(self) -> int:
        """Returns the rows per `sample_train_batch`, unless fragments end with episodes."""
        rows = self.workers.rows_per_sample()
        return -(-self.config.train_batch_size // rows) * rows

    # -- training -----------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Does one iteration (one or more training steps) and returns its result.

        The result has `episode_reward_mean` and similar statistics over the last
        `metrics_num_episodes_for_smoothing` episodes (NaN before the first one ended),
        `recent_returns` with mean, std, min and max of the newest ones of these (those of the last
        10,000 environment steps or of the iteration, whichever is longer, but at least 5 episodes;
        early in a run, those of its last fifth), `timesteps_total`, `training_iteration`, `info`
        with the learner's statistics by policy, `policy_metrics` with further figures by policy
        (see `RowMeter` and `ActionFacts.describe_entropy`; `updates` is the number of its gradient
        updates), counters, timers in ms and, when due, `evaluation`.
        `load_time_ms` is the time to convert batches to the learner's columns; copying them to a
        device is part of `learn_time_ms`. `perf` has the CPU and memory load, on Linux and unless
        `log_sys_usage=False`. `trial_id` is "default"; Ray Tune fills in its own.

        Raises:
            NonFiniteError: if a policy's update gives NaN or infinity; it names the iteration and
                the last good checkpoint. That update is discarded; earlier updates of other
                policies and the sampled steps are kept. `debugging(on_nan="warn")` continues
                training.
        """
        self._require_running()
        self._metrics.begin_iteration()
        self._train_batch_sampler.row_meter.begin_iteration()
        learner: dict[str, Any] = {}
        evaluation = self._evaluation.start()
        while True:
            learner = self._learn_and_sync() or learner
            if self._metrics.is_iteration_complete():
                break
        self.iteration += 1
        result = self._metrics.make_result(self.iteration, learner, self.workers)
        self._health_checks.check_iteration(self, result, self._train_batch_sampler.row_meter)
        self._evaluation.add_to(result, evaluation)
        self._report(result)
        self._last_result = result
        return result

    def _report(self, result: dict[str, Any]) -> None:
        on_train_result: Callable[..., Any] = self.callbacks.on_train_result
        if (
            on_train_result(algorithm=self, result=result) is False
            and not self._has_warned_of_false
        ):
            self._has_warned_of_false = True
            logger.warning(
                "%s.on_train_result returned False, which does not stop the training. A function "
                "f(algorithm, result) does, in learn(..., callbacks=[f]).",
                type(self.callbacks).__name__,
            )
        if self.config.env_task_fn is not None:
            update_tasks = functools.partial(
                set_tasks, env_task_fn=self.config.env_task_fn, result=result
            )
            self.workers.foreach_worker(update_tasks)

    @suggest_for_unknown_keywords(lambda _, name: LEARN_ARGUMENTS.get(name, ""))
    def learn(
        self,
        total_timesteps: float,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        progress: bool = True,
        callbacks: Callback | Sequence[Callback] = (),
        until: float | None = None,
        checkpoint_every: int = 20,
        keep_checkpoints: int = 1,
        keep_best: bool = False,
        record_every: int = 0,
    ) -> LearnResult:
        """Trains until `total_timesteps`, shows the progress and saves the results.

        `tfpolicies train` calls this. The run folder contains `progress.csv`, TensorBoard events,
        `learning_curve.png` and checkpoints; the commands `tfpolicies evaluate` and `tfpolicies
        export` accept it. A script that is interrupted and started again resumes: a new algorithm
        whose `run_dir` holds a run with the same settings is restored from that run's newest
        checkpoint. An algorithm that has trained already resumes its own run, or starts a new one.

        Ctrl-C ends training after the running iteration; a second one ends it at once. If training
        ends early (except by a non-finite update), the last complete iteration is saved first.

        Args:
            total_timesteps: environment steps at which training ends, including earlier ones. It
                ends after the training step that reaches them, so the last iteration may be
                shorter.
            run_dir: the run folder, created if missing; None: nothing is written.
            progress: whether to show a progress bar, or a line per 10 seconds without a terminal.
            callbacks: functions `f(algorithm, result)`, called after each iteration, which end
                training by returning False; Keras callbacks, for which an iteration is an epoch
                (see `KerasCallbacks`); loggers such as `MLflowLogger`; and `DefaultCallbacks`,
                instances or classes, with training and evaluation methods.
            until: ends training early when the mean return of recent training episodes,
                `result["recent_returns"]["mean"]`, reaches it; at least 5 episodes are needed.
            checkpoint_every: iterations between checkpoints.
            keep_checkpoints: how many of the newest checkpoints are kept: with 3, the folders
                `checkpoints/iteration-000020` and so on of the last three, next to `latest`.
            keep_best: whether to keep the checkpoint with the best evaluation separately. Without
                evaluations, it has the weights that sampled the iteration with the best mean of
                recent returns, the number that `until` is compared with.
            record_every: iterations between videos of an episode, in `videos/` of the run folder;
                0 for none. See `record_video`.

        Returns:
            The last result, the reason why training ended ("steps", "target", "callback"), and the
            run folder.

        Raises:
            UsageError: if an argument is wrong, or the folder holds another run or anything else;
                nothing is changed then.
            EnvError: if videos are to be recorded, but the environment does not render.
            MissingPackageError: if they need a package that is not installed.
            FolderInUseError: if another process trains in the folder; nothing is changed then.
            CheckpointError: if the run's checkpoint is damaged or does not fit; nothing is changed
                then.
            NonFiniteError: see `train`.
            KeyboardInterrupt: after Ctrl-C.
        """
        self._require_running()
        options = TrainingOptions(
            steps=total_timesteps,
            until=until,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            keep_best=keep_best,
            record_every=record_every,
        )
        return learn(self, options, run_dir=run_dir, progress=progress, callbacks=callbacks)

    def _require_running(self) -> None:
        if self._is_stopped:
            raise UsageError("This algorithm was stopped; build a new one or restore a checkpoint.")

    def _learn_and_sync(self) -> dict[str, Any]:
        started_at, seconds = time.perf_counter(), self._metrics.seconds
        seconds_sampled_before = seconds["sample"]
        learner = self._train_once()
        sampling_seconds = seconds["sample"] - seconds_sampled_before
        learning_seconds = time.perf_counter() - started_at - sampling_seconds
        policies = self.worker.policy_map
        loading_seconds = sum(
            policies.get_handle(pid).driver.learning.pop_loading_seconds() for pid in learner
        )
        loading_seconds = min(
            loading_seconds, learning_seconds
        )  # it may include loading of earlier batches
        seconds["load"] += loading_seconds
        seconds["learn"] += learning_seconds - loading_seconds
        trained_steps = sum(result.get("num_agent_steps_trained", 0) for result in learner.values())
        self.counters["num_env_steps_trained"] += round(
            trained_steps * self._train_batch_sampler.env_steps_per_row
        )
        self.counters["num_agent_steps_trained"] += trained_steps
        updates = {pid: policies.get_handle(pid).num_grad_updates for pid in learner}
        steps = self.counters[f"num_{self._metrics.unit}_sampled"]
        global_vars = {"timestep": steps, "num_grad_updates_per_policy": updates}
        learned_at = time.perf_counter()
        self.workers.sync_weights(None, global_vars)
        self.workers.sync_filters()
        self._metrics.add_time("sync", learned_at)
        return learner

    def _train_once(self) -> dict[str, Any]:
        """Runs a training step; adds iteration and last checkpoint to a `NonFiniteError`."""
        try:
            learner = self.training_step()
            self._learner_check.check(learner)
        except NonFiniteError as error:
            error.iteration, error.checkpoint = self.iteration + 1, self._last_finite_checkpoint
            checkpoint_text = "there is no good checkpoint yet"
            if self._last_finite_checkpoint is not None:
                checkpoint_text = f"the last good checkpoint is {self._last_finite_checkpoint!r}"
            error.add(f"It happened in iteration {error.iteration}; {checkpoint_text}.")
            raise
        return learner

    # -- evaluation ---------------------------------------------------------------------------

    @suggest_for_unknown_keywords(lambda _, name: EVALUATE_ARGUMENTS.get(name, ""))
    def evaluate(
        self,
        duration_fn: Callable[[int], int] | None = None,
        *,
        episodes: int | None = None,
        explore: bool | None = None,
        env: EnvSource = None,
        seed: int | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Plays `evaluation_duration` complete episodes with the current weights.

        Evaluation has its own environments, policies and random generators, so it does not affect
        training. If an argument is None, the config decides; without
        `evaluation(evaluation_config={"explore": False})` policies sample actions, as in RLlib,
        except within `learn`.

        Args:
            duration_fn: given the episodes or steps done so far, returns how many remain; overrides
                `evaluation_duration`.
            episodes: the number of episodes; overrides `evaluation_duration`.
            explore: whether policies sample actions; False: greedy. A policy whose own config sets
                `explore` keeps that.
            env: the environment, as `config.environment` takes it, with the `env_config` of
                training.
            seed: of environments and exploration; the same seed and weights give the same episodes.

        Returns:
            `{"evaluation": {...}}` with the summary of the episodes: `episode_reward_mean`,
            `episode_reward_std` and each return in `hist_stats["episode_reward"]`; or with the
            metrics that `custom_evaluation_function(algorithm, evaluation_workers)` returns. Its
            workers have `num_envs_per_worker` environments each. One `sample()` of such a worker
            returns complete episodes of at least that many steps: with one environment, one
            episode. (With `evaluation_duration_unit="timesteps"` it returns fragments that share
            the duration.)

        Raises:
            UsageError: if `duration_fn` is not a function, both it and `episodes` are given,
                `custom_evaluation_function` does not return a dict, or the algorithm was stopped.
        """
        self._require_running()
        return self._evaluation.evaluate(duration_fn, episodes, explore, env=env, seed=seed)

    # -- policies and actions -----------------------------------------------------------------

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Any:
        """Returns the policy with that id; None if there is none, and the log names the ids."""
        policy = self.worker.get_policy(policy_id)
        if policy is None:
            policy_ids = sorted(self.worker.policy_map)[:_MAX_IDS_SHOWN]
            logger.warning(
                "get_policy(%r) returns None; there are policies %s.", policy_id, policy_ids
            )
        return policy

    def summary(self, print_fn: Callable[[str], object] = print) -> None:
        """Prints the environment, the workers and all policies; see `TFPolicy.summary`.

        Policies with the same networks are described once, by the first of them.

        Args:
            print_fn: called with each line.
        """
        policy_map = self.worker.policy_map
        policies = {pid: policy_map.get_handle(pid) for pid in sorted(policy_map)}
        for line in [*describe_algorithm(self), *format_policies(policies)]:
            print_fn(line)

    def add_policy(
        self,
        policy_id: str,
        policy_cls: type[Policy] | None = None,
        policy: Policy | None = None,
        *,
        observation_space: gym.Space | None = None,
        action_space: gym.Space | None = None,
        config: Mapping[str, Any] | AlgorithmConfig | None = None,
        policy_state: Mapping[str, Any] | None = None,
        policy_mapping_fn: Callable[..., str] | None = None,
        policies_to_train: Collection[str] | Callable[..., bool] | None = None,
        evaluation_workers: bool = True,
        module_spec: None = None,
    ) -> Policy:
        """Adds a policy to all workers, or to none; see `RolloutWorker.add_policy`.

        Args:
            policy_id: its id.
            policy_cls: the class to create it from; or
            policy: the policy itself.
            observation_space: the space of the environment's observations for the policy, before
                connectors; None for that of the environment or config.
            action_space: the space of the environment's actions; None for that of the environment
                or config.
            config: its overrides of the algorithm's config.
            policy_state: its state, as `get_state` returned it.
            policy_mapping_fn: the new mapping from agents to policies; None keeps the current one.
            policies_to_train: ids of the policies to train, or `f(policy_id, batch=None)`.
            evaluation_workers: whether evaluation workers also get it, with the settings of
                `evaluation_config` that the policy does not override.
            module_spec: must be None.

        Returns:
            The policy of this process.

        Raises:
            ConfigError: for an invalid id or setting, or if the policy is to be trained from rows
                that the training step does not provide.
            PolicyExistsError: if there is a policy with this id; also a KeyError.
            UsageError: unless exactly one of `policy_cls` and `policy` is given; also a ValueError.
        """
        addition = PolicyAddition.from_arguments(
            self.worker.policy_map,
            policy_id,
            policy_cls,
            policy,
            observation_space=observation_space,
            action_space=action_space,
            config=config,
            policy_state=policy_state,
            policy_mapping_fn=policy_mapping_fn,
            policies_to_train=policies_to_train,
            module_spec=module_spec,
        )
        return self.policies.add(addition, evaluation_workers=evaluation_workers)

    def remove_policy(
        self,
        policy_id: str = DEFAULT_POLICY_ID,
        *,
        policy_mapping_fn: Callable[..., str] | None = None,
        policies_to_train: Collection[str] | Callable[..., bool] | None = None,
        evaluation_workers: bool = True,
    ) -> None:
        """Removes a policy from all workers; see `RolloutWorker.remove_policy`.

        Args:
            policy_id: its id.
            policy_mapping_fn: the new mapping from agents to policies; None keeps the current one.
            policies_to_train: ids of the policies to train, or `f(policy_id, batch=None)`.
            evaluation_workers: whether to remove it from evaluation workers as well.

        Raises:
            UnknownPolicyError: if there is no policy with this id; also a ValueError and a
                KeyError.
            UsageError: if the mapping function returns it for an agent; nothing is changed then.
        """
        mapping_and_trainable = MappingAndTrainable(policy_mapping_fn, policies_to_train)
        self.policies.remove(
            policy_id, mapping_and_trainable, evaluation_workers=evaluation_workers
        )

    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, Any]:
        """Returns copies of the weights by policy id, of all policies or of the given ids."""
        return self.worker.get_weights(policies)

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Sets weights by policy id, in all workers.

        Raises:
            UnknownPolicyError: if an id is unknown; nothing is changed then.
        """
        self.worker.set_weights(weights)
        self.workers.sync_weights([*weights])

    def compute_actions(
        self,
        observations: Mapping[Any, Any],
        state: Mapping[Any, Any] | None = None,
        *,
        prev_action: Mapping[Any, Any] | None = None,
        prev_reward: Mapping[Any, float] | None = None,
        info: Mapping[Any, Any] | None = None,
        policy_id: str = DEFAULT_POLICY_ID,
        full_fetch: bool = False,
        explore: bool | None = None,
        timestep: int | None = None,
        episodes: object = None,
        unsquash_actions: bool | None = None,
        clip_actions: bool | None = None,
    ) -> Any:
        """Returns the actions of one policy for several agents, ready for the environment.

        Args:
            observations: by agent id, one observation each.
            state: by agent id, the recurrent state.
            prev_action: by agent id, for models that read it.
            prev_reward: by agent id, for models that read it.
            info: accepted and unused.
            policy_id: the policy that acts.
            full_fetch: whether to return `(actions, states, extras)`, dicts by agent id.
            explore: whether to sample or act greedily; None takes the config's.
            timestep: for exploration schedules.
            episodes: accepted and unused.
            unsquash_actions: map from [-1, 1] to the Box's bounds; None takes `normalize_actions`.
            clip_actions: clip to the Box's bounds; None takes `clip_actions`.

        Raises:
            UnknownPolicyError: if the id is unknown.
        """
        del info, episodes
        by_agent: dict[str, Any] = {
            "state": state,
            "prev_action": prev_action,
            "prev_reward": prev_reward,
        }
        results = {
            agent: self.compute_single_action(
                observation,
                **{name: None if x is None else x[agent] for name, x in by_agent.items()},
                policy_id=policy_id,
                full_fetch=True,
                explore=explore,
                timestep=timestep,
                unsquash_action=unsquash_actions,
                clip_action=clip_actions,
            )
            for agent, observation in observations.items()
        }
        actions, states, extras = (
            {agent: result[i] for agent, result in results.items()} for i in range(3)
        )
        return (actions, states, extras) if full_fetch or state else actions

    def compute_single_action(
        self,
        observation: Structure | None = None,
        state: Sequence[np.ndarray] | None = None,
        *,
        prev_action: Structure | None = None,
        prev_reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        input_dict: Mapping[str, Any] | None = None,
        policy_id: str = DEFAULT_POLICY_ID,
        full_fetch: bool = False,
        explore: bool | None = None,
        timestep: int | None = None,
        episode: object = None,
        unsquash_action: bool | None = None,
        clip_action: bool | None = None,
    ) -> Any:
        """Returns the action for one observation, ready for the environment.

        Args:
            observation: one observation, as the environment returns it; or
            input_dict: a dict with it as `obs`, and the other inputs of the policy.
            state: the recurrent state.
            prev_action: the last action, for models that read it.
            prev_reward: the last reward, for models that read it.
            info: accepted and unused.
            policy_id: the policy that acts.
            full_fetch: whether to return `(action, state, extras)`.
            explore: whether to sample or act greedily; None takes the config's.
            timestep: for exploration schedules.
            episode: accepted and unused.
            unsquash_action: map from [-1, 1] to the Box's bounds; None takes `normalize_actions`.
            clip_action: clip to the Box's bounds; None takes `clip_actions`.

        Raises:
            UnknownPolicyError: if the id is unknown.
            UsageError: if both or neither of `observation` and `input_dict` are given, or if a
                connector is stateful within episodes.
        """
        policy = self.policies.get(policy_id)
        if (observation is None) == (input_dict is None):
            raise UsageError("Give either observation or input_dict to compute_single_action.")
        if policy.agent_connectors and input_dict is not None:
            input_dict = {
                **input_dict,
                "obs": policy.agent_connectors.transform_observation(input_dict["obs"]),
            }
        elif policy.agent_connectors:
            observation = policy.agent_connectors.transform_observation(observation)
        action, states, extras = policy.driver.acting.act_single(
            observation,
            state,
            unsquash=unsquash_action,
            clip=clip_action,
            input_dict=input_dict,
            prev_action=prev_action,
            prev_reward=prev_reward,
            info=info,
            episode=episode,
            explore=explore,
            timestep=timestep,
        )
        if policy.action_connectors:
            action = policy.action_connectors.transform_action(action)
        return (action, states, extras) if full_fetch or states else action

    def export_policy_model(
        self,
        export_dir: str | os.PathLike[str],
        policy_id: str = DEFAULT_POLICY_ID,
        onnx: int | bool | None = None,
        **format_options: object,
    ) -> Any:
        """Writes a policy for serving; see `TFPolicy.export_model`.

        Args:
            export_dir: the folder; created if missing.
            policy_id: the policy to export.
            onnx: None for a SavedModel, True for ONNX, a number for ONNX of that opset.
            **format_options: further arguments of `TFPolicy.export_model`, such as `layout`.

        Raises:
            UnknownPolicyError: if the id is unknown.
            ExportError: if the policy cannot be exported; the folder is unchanged then.
        """
        policy = self.policies.get(policy_id)
        with export_facts(make_algorithm_card(self, policy_id)):
            return policy.export_model(export_dir, onnx, **format_options)

    def export_policy_checkpoint(
        self, export_dir: str | os.PathLike[str], policy_id: str = DEFAULT_POLICY_ID
    ) -> None:
        """Writes a checkpoint of one policy; see `Policy.export_checkpoint`.

        Raises:
            UnknownPolicyError: if the id is unknown; also a KeyError.
            CheckpointError: if it cannot be written.
        """
        self.policies.get(policy_id).export_checkpoint(export_dir)

    def import_policy_model_from_h5(
        self, import_file: str | os.PathLike[str], policy_id: str = DEFAULT_POLICY_ID
    ) -> Any:
        """Loads the weights of a Keras file into a policy, in all workers.

        Returns:
            A report that maps each array of the file to a weight; see
            `TFPolicy.import_model_from_h5`.

        Raises:
            UnknownPolicyError: if the id is unknown; also a KeyError.
            ModelImportError: if the file is damaged or does not fit; nothing is changed then.
        """
        report = self.policies.get(policy_id).import_model_from_h5(import_file)
        self.workers.sync_weights([policy_id])
        return report

    # -- checkpoints --------------------------------------------------------------------------

    def save(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        *,
        policy_states: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> SaveResult:
        """Writes a checkpoint of the whole algorithm into a folder, without pickle.

        A restored run continues exactly as this one, bit for bit, if the environments have
        `get_state` and `set_state`, or if both start new episodes at the checkpoint
        (`checkpointing(reset_episodes_at_checkpoint=True)`); otherwise it continues with new
        episodes.

        Classes and functions of other packages (an environment, callbacks, a mapping function) are
        never imported because a file names them. The first `save` logs a warning that names those
        that must be passed to `from_checkpoint`. The returned path carries them within this
        process.

        With `checkpointing(export_native_model_files=True)` a SavedModel of each policy with a
        Keras model is written to `policies/<policy_id>/model`.

        Args:
            checkpoint_dir: the folder, created if missing; a checkpoint there is replaced
                atomically. None creates `checkpoint_<iteration>` in the working folder.
            policy_states: by policy id, states of `get_state` to write instead of the current ones,
                for example the best weights; everything else is written as it is now.

        Returns:
            A record with `checkpoint.path` and the `metrics` of the last iteration.

        Raises:
            CheckpointError: if it cannot be written.
            ExportError: if a SavedModel cannot be written; the checkpoint is complete.
        """
        return SaveResult(save(self, checkpoint_dir, policy_states), self._last_result)

    def restore(
        self,
        checkpoint_path: str | os.PathLike[str] | SaveResult,
        *,
        allow_other_spaces: bool = False,
        allow_non_finite: bool = False,
        model_work_limit: float = 1.0,
    ) -> None:
        """Restores the state of a checkpoint.

        Where this algorithm's config and that of the checkpoint have different hyperparameters or
        schedules, those of this algorithm's config apply, and one log line names them. So a trial
        that Ray Tune perturbs trains with its new values.

        Args:
            checkpoint_path: the folder, or the return value of `save`.
            allow_other_spaces: see `from_checkpoint`.
            allow_non_finite: whether to accept weights with NaN or infinity.
            model_work_limit: see `from_checkpoint`.

        Raises:
            SpaceError: if the policies were trained with other spaces; see `from_checkpoint`.
            CheckpointError: if it is missing, damaged, of another format, not finite or does not
                fit; nothing is changed then. The message names the file and the reason.
        """
        path = get_path(checkpoint_path)
        folder = resolve_path(path)
        stored_algorithm = StoredAlgorithm.read(path)
        stored_algorithm.require_finite(allow=allow_non_finite)
        with limit_work(model_work_limit):
            stored_algorithm.restore(self, allow_other_spaces=allow_other_spaces)
        self._last_finite_checkpoint = None if allow_non_finite else str(folder)
        self.callbacks.on_checkpoint_loaded(algorithm=self)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | os.PathLike[str] | SaveResult,
        policy_ids: Collection[str] | None = None,
        policy_mapping_fn: Callable[..., str] | None = None,
        policies_to_train: Collection[str] | Callable[..., bool] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        allow_other_spaces: bool = False,
        allow_non_finite: bool = False,
        custom_objects: Mapping[str, Any] | None = None,
        model_work_limit: float = 1.0,
    ) -> Algorithm:
        """Builds the algorithm of a checkpoint and restores it.

        The checkpoint must be of this class or a subclass of it.

        Args:
            checkpoint: the folder, or the return value of `save`, which also carries the objects
                that cannot be stored in a file.
            policy_ids: the policies to load; None for all.
            policy_mapping_fn: maps agents to policies; None for the saved function.
            policies_to_train: ids of the policies to train, or `f(policy_id, batch=None)`; None for
                the saved value.
            config: settings that replace stored ones, including hyperparameters and schedules (a
                number also replaces its stored schedule), and those that a file cannot hold (a
                custom environment class or model) or must not choose (imports: an
                environment "my.module:Env", which may be given as this text).
            allow_other_spaces: whether to accept an environment whose spaces have other dtypes, or
                other action bounds, than the policies were trained with; they then use the
                environment's. Properties that weights depend on (shapes, number of actions) cannot
                differ.
            allow_non_finite: whether to accept weights with NaN or infinity.
            custom_objects: custom layers and other classes that stored Keras models may contain:
                name -> class. Those registered by `keras.saving.register_keras_serializable` are
                not needed.
            model_work_limit: how many times the usual work a stored Keras model may need, in calls,
                operations and memory; `math.inf` for no limit. See `docs/decisions/003`.

        Raises:
            CheckpointError: if the checkpoint is missing, damaged, of another format, not finite or
                of another class, if a stored model exceeds the work limit, or if it was saved with
                functions that a file cannot hold and that are not given.
            ConfigError: if `model_work_limit` is not a positive number.
            SpaceError: if the environment has other spaces than the policies were trained with.
                Different observation bounds are only logged, in one line.
            UnknownPolicyError: if one of `policy_ids` is not in it.
        """
        path = get_path(checkpoint)
        folder = resolve_path(path)
        functions = MappingAndTrainable(policy_mapping_fn, policies_to_train)
        overrides = algorithm_checkpoints.resolve_overrides(checkpoint, functions, config)
        algorithm: Algorithm = StoredAlgorithm.read(path, policy_ids, *overrides).build(
            cls,
            allow_other_spaces=allow_other_spaces,
            allow_non_finite=allow_non_finite,
            custom_objects=custom_objects,
            model_work_limit=model_work_limit,
        )
        algorithm._last_finite_checkpoint = None if allow_non_finite else str(folder)
        algorithm.callbacks.on_checkpoint_loaded(algorithm=algorithm)
        return algorithm

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Algorithm:
        """Builds the algorithm of a state that `__getstate__` returned, and restores it.

        Raises:
            UsageError: if the state has no class or no config.
            WeightsError: if the state of a policy does not fit; also see `__setstate__`.
        """
        return build_from_state(state)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the algorithm as a checkpoint; the other process creates new environments.

        Functions and classes that cannot be stored in a checkpoint are pickled by name.

        Raises:
            UnpicklableError: if one of them cannot be imported by name, such as a lambda.
        """
        return algorithm_checkpoints.reduce_algorithm(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for `__setstate__`, under RLlib's names.

        Keys: `algorithm_class`, `config`, `worker` (from `RolloutWorker.get_state`), `counters`,
        `training_iteration`, `extra` (from `get_extra_state`: for DQN, its replay buffer if
        `store_buffer_in_checkpoints`), and `eval_policy_mapping_fn` if there are evaluation
        workers. `save` also stores the running episodes.
        """
        return make_state(self)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `__getstate__`, here and in remote workers.

        Where the configs have different hyperparameters, those of this algorithm apply; see
        `restore`.

        Raises:
            KeyError: if a part is missing; nothing is changed then.
            WeightsError: if the state of a policy does not fit; nothing is changed then.
            CheckpointError: if the subclass's state does not fit; nothing is changed then.
        """
        restore_state(self, state)

    def get_extra_state(self) -> dict[str, Any]:
        """Returns a subclass's additions to checkpoints: nested dicts of JSON values and arrays."""
        return {}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `get_extra_state`.

        Raises:
            CheckpointError: if it does not fit; nothing is changed then.
        """

    def stop(self) -> None:
        """Closes the environments; may be called again."""
        self.workers.stop()
        self._evaluator.stop()
        self._is_stopped = True
