"""The training loop that algorithms share: sample, learn, report, evaluate, save."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from tfpolicies.algorithms import checkpoints
from tfpolicies.algorithms.checkpoints import SavedCheckpoint, SaveResult
from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.errors import CheckpointError, ConfigError, UnknownPolicyError, UsageError
from tfpolicies.policy.checkpoints import path_of
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.evaluation import play_episodes
from tfpolicies.rollout.metrics import summarize_episodes
from tfpolicies.rollout.rollout_worker import RolloutWorker

logger = logging.getLogger("tfpolicies")

_EVALUATION_ENVS = 32  # at most so many environments play the episodes of one evaluation
_STEPS_PER_EVALUATION_ENV = 1000  # each ends the episode it began, so few steps need few of them


class Algorithm:
    """A config, built: environments, a policy, and the loop that trains it.

    A subclass says which policy class it trains (`default_policy_class`) and what one training step
    does (`training_step`); the one here does a single update on a batch of fresh experience.

    Args:
        config: an `AlgorithmConfig` or a dict of settings; frozen from here on.

    Raises:
        ConfigError: if settings contradict each other.
        EnvError: if the environment is unknown or unusable.
    """

    config_class: type[AlgorithmConfig] = AlgorithmConfig

    def __init__(self, config: AlgorithmConfig | Mapping[str, Any]) -> None:
        if not isinstance(config, AlgorithmConfig):
            config = self.config_class().update_from_dict(config)
        config.validate()
        if config.env is None:
            raise ConfigError(
                "An algorithm needs an environment: config.environment('CartPole-v1'), or a class "
                "of your own."
            )
        self.config = config
        logger.setLevel(config.log_level if config.log_level != "WARN" else logging.WARNING)
        made = config["callbacks"]
        self.callbacks: DefaultCallbacks = DefaultCallbacks() if made is None else made()
        self.worker = self._local_worker(config)
        self.worker.flushes_filters = False
        self.evaluation_worker: RolloutWorker | None = None
        self.iteration = 0
        self.counters = {
            "num_env_steps_sampled": 0,
            "num_env_steps_trained": 0,
            "num_agent_steps_sampled": 0,
            "num_agent_steps_trained": 0,
        }
        self._episodes: deque[RolloutMetrics] = deque(
            maxlen=config.metrics_num_episodes_for_smoothing
        )
        self._episodes_total = 0
        self._time_total = 0.0
        self._timers: dict[str, float] = {}
        self._stopped = False
        self._last_result: dict[str, Any] = {}
        self.setup()
        self.warm_up()
        self._record_resolved()
        self._announce()
        self.callbacks.on_algorithm_init(algorithm=self)

    def _local_worker(self, config: AlgorithmConfig) -> RolloutWorker:
        """Returns a worker in this process; its sessions may have settings of their own."""
        default_class, given = self.default_policy_class(config), config
        if config.local_tf_session_args:
            given = config.copy(copy_frozen=False)
            given.framework(tf_session_args=config.local_tf_session_args)
            config.freeze()
        return RolloutWorker(config=given, default_policy_class=default_class)

    # -- what subclasses say ------------------------------------------------------------------

    @classmethod
    def default_policy_class(cls, config: AlgorithmConfig) -> type[Policy]:
        """Returns the class of policies that name none.

        Raises:
            ConfigError: if the algorithm has none.
        """
        raise ConfigError(
            f"{cls.__name__} has no policy class; override `default_policy_class(config)`."
        )

    def setup(self) -> None:
        """Makes what a subclass keeps beside policies; called once, when those are made."""

    def training_step(self) -> dict[str, Any]:
        """Does one step of training and returns the learner's results by policy id."""
        return {
            policy_id: self.get_policy(policy_id).learn_on_batch(batch)
            for policy_id, batch in self.sample_train_batch().items()
        }

    def warm_up(self) -> None:
        """Traces and compiles what training will need, so that no iteration waits for it."""
        policy = self.get_policy()
        rows = self.expected_train_batch_rows()
        if isinstance(policy, TFPolicy):
            policy.warm_up(rows, 1, rows)

    # -- parts of a training step -------------------------------------------------------------

    def sample_train_batch(self) -> dict[str, SampleBatch]:
        """Samples at least `train_batch_size` rows; returns them by policy id."""
        return self.sample_rows(self.config.train_batch_size)

    def sample_rows(self, least: int) -> dict[str, SampleBatch]:
        """Samples whole fragments until there are at least `least` rows, by policy id."""
        started = time.perf_counter()
        batches: list[SampleBatch] = []
        rows = 0
        while rows < least:
            batches.append(self.worker.sample().decompress_if_needed())
            rows += batches[-1].env_steps()
        batch = cast(SampleBatch, concat_samples(batches))
        self.counters["num_env_steps_sampled"] += batch.env_steps()
        self.counters["num_agent_steps_sampled"] += batch.agent_steps()
        self._time("sample", started)
        return {DEFAULT_POLICY_ID: batch}

    def expected_train_batch_rows(self) -> int:
        """Returns the rows that `sample_train_batch` gives when episodes do not decide."""
        rows = self.expected_rows_per_sample()
        return -(-self.config.train_batch_size // rows) * rows

    def expected_rows_per_sample(self) -> int:
        """Returns the rows of one fragment of each environment."""
        envs = self._num_envs()
        return self.config.fragment_length(envs) * envs

    def _num_envs(self) -> int:
        """Returns how many environments are stepped; a vector environment decides it itself."""
        made = self.worker.environments
        return self.config.num_envs_per_worker if made is None else made.num_envs

    def _time(self, name: str, started: float) -> None:
        self._timers[name] = self._timers.get(name, 0.0) + time.perf_counter() - started

    # -- training -----------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Does one iteration (one or more training steps) and returns its result.

        The result has `episode_reward_mean` and the like over the last
        `metrics_num_episodes_for_smoothing` episodes (NaN before the first one ended),
        `timesteps_total`, `training_iteration`, `info` with the learner's statistics by policy,
        counters, timers in ms and, when due, `evaluation`.
        """
        self._require_running()
        started = time.perf_counter()
        before = dict(self.counters)
        self._timers = {}
        learner: dict[str, Any] = {}
        while True:
            learner = self._learn_and_sync() or learner
            sampled = self.counters["num_env_steps_sampled"] - before["num_env_steps_sampled"]
            seconds = time.perf_counter() - started
            if sampled >= self.config.min_sample_timesteps_per_iteration and seconds >= (
                self.config.min_time_s_per_iteration or 0.0
            ):
                break
        self.iteration += 1
        result = self._result(learner, before, started)
        interval = self.config.evaluation_interval
        if interval is not None and self.iteration % interval == 0:
            result.update(self.evaluate())
        self.callbacks.on_train_result(algorithm=self, result=result)
        self._last_result = result
        return result

    def _require_running(self) -> None:
        if self._stopped:
            raise UsageError("This algorithm was stopped; build a new one or restore a checkpoint.")

    def _learn_and_sync(self) -> dict[str, Any]:
        started = time.perf_counter()
        sampled_before = self._timers.get("sample", 0.0)
        learner = self.training_step()
        sampling = self._timers.get("sample", 0.0) - sampled_before
        learning = time.perf_counter() - started - sampling
        self._timers["learn"] = self._timers.get("learn", 0.0) + learning
        trained = sum(result.get("num_agent_steps_trained", 0) for result in learner.values())
        self.counters["num_env_steps_trained"] += trained
        self.counters["num_agent_steps_trained"] += trained
        updates = {pid: policy.num_grad_updates for pid, policy in self.worker.policy_map.items()}
        self.worker.set_global_vars(
            {
                "timestep": self.counters["num_env_steps_sampled"],
                "num_grad_updates_per_policy": updates,
            }
        )
        self.worker.flush_filters()
        return learner

    def _result(
        self, learner: dict[str, Any], before: Mapping[str, int], started: float
    ) -> dict[str, Any]:
        fresh = self.worker.get_metrics()
        self._episodes.extend(fresh)
        self._episodes_total += len(fresh)
        window = [*self._episodes] if len(fresh) < len(self._episodes) else fresh
        summary = summarize_episodes(window, len(fresh))
        seconds = time.perf_counter() - started
        self._time_total += seconds
        counters = self.counters
        sampled = counters["num_env_steps_sampled"] - before["num_env_steps_sampled"]
        trained = counters["num_env_steps_trained"] - before["num_env_steps_trained"]
        now = datetime.datetime.now()
        return {
            **summary,
            "sampler_results": summary,
            "info": {"learner": learner, **counters},
            **counters,
            "counters": dict(counters),
            "num_env_steps_sampled_this_iter": sampled,
            "num_env_steps_trained_this_iter": trained,
            "num_env_steps_sampled_throughput_per_sec": sampled / seconds,
            "num_env_steps_trained_throughput_per_sec": trained / seconds,
            "num_steps_trained_this_iter": trained,
            "timesteps_total": counters["num_env_steps_sampled"],
            "agent_timesteps_total": counters["num_agent_steps_sampled"],
            "timers": {
                "training_iteration_time_ms": 1e3 * seconds,
                "sample_time_ms": 1e3 * self._timers.get("sample", 0.0),
                "learn_time_ms": 1e3 * self._timers.get("learn", 0.0),
            },
            "training_iteration": self.iteration,
            "episodes_total": self._episodes_total,
            "time_this_iter_s": seconds,
            "time_total_s": self._time_total,
            "date": now.strftime("%Y-%m-%d_%H-%M-%S"),
            "timestamp": int(now.timestamp()),
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "done": False,
            "config": self.config.to_dict(),
        }

    # -- evaluation ---------------------------------------------------------------------------

    def evaluate(
        self, duration_fn: Callable[[int], int] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Plays `evaluation_duration` whole episodes with the present weights.

        It has environments, a policy object and random numbers of its own, so that evaluating
        changes nothing about training.

        Args:
            duration_fn: given the episodes or steps done so far, returns how many remain; overrides
                `evaluation_duration`.

        Returns:
            `{"evaluation": {...}}` with the summary of the episodes.
        """
        self._require_running()
        self.callbacks.on_evaluate_start(algorithm=self)
        worker = self._evaluation()
        for policy_id, policy in self.worker.policy_map.items():
            worker.get_policy(policy_id).act_like(policy)
        by_episodes = self.config.evaluation_duration_unit == "episodes"
        played: list[RolloutMetrics] = []
        remaining = self.config.evaluation_duration if duration_fn is None else duration_fn(0)
        while remaining > 0:
            played += self._play(worker, remaining, by_episodes=by_episodes)
            done = len(played) if by_episodes else sum(e.episode_length for e in played)
            remaining = 0 if duration_fn is None else duration_fn(done)
        summary = summarize_episodes(played)
        steps = sum(episode.episode_length for episode in played)
        metrics = {
            **summary,
            "sampler_results": summary,
            "num_env_steps_sampled_this_iter": steps,
            "num_agent_steps_sampled_this_iter": steps,
            "timesteps_this_iter": steps,
        }
        self.callbacks.on_evaluate_end(algorithm=self, evaluation_metrics=metrics)
        return {"evaluation": metrics}

    def _play(
        self, worker: RolloutWorker, amount: int, *, by_episodes: bool
    ) -> list[RolloutMetrics]:
        if worker.environments is None:
            raise UsageError("The evaluation worker was stopped.")
        return play_episodes(
            worker.get_policy(),
            worker.environments,
            seeds=worker.next_seeds(evaluation=True),
            episodes=amount if by_episodes else None,
            timesteps=None if by_episodes else amount,
        )

    def _evaluation(self) -> RolloutWorker:
        if self.evaluation_worker is None:
            config = self.config.copy(copy_frozen=False)
            config.update_from_dict(self.config.evaluation_config or {})
            by_episodes = config.evaluation_duration_unit == "episodes"
            envs = config.evaluation_duration // (1 if by_episodes else _STEPS_PER_EVALUATION_ENV)
            config.rollouts(num_envs_per_worker=max(1, min(envs, _EVALUATION_ENVS)))
            self.evaluation_worker = self._local_worker(config)
        return self.evaluation_worker

    # -- policies and actions -----------------------------------------------------------------

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Any:
        """Returns the policy of that id, or None."""
        return self.worker.get_policy(policy_id)

    def get_weights(self, policies: Any = None) -> dict[str, Any]:
        """Returns copies of the weights by policy id."""
        return self.worker.get_weights(policies)

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Sets weights by policy id."""
        self.worker.set_weights(weights)

    def compute_single_action(
        self,
        observation: Any = None,
        state: Any = None,
        *,
        prev_action: Any = None,
        prev_reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        input_dict: Mapping[str, Any] | None = None,
        policy_id: str = DEFAULT_POLICY_ID,
        full_fetch: bool = False,
        explore: bool | None = None,
        timestep: int | None = None,
        episode: Any = None,
        unsquash_action: bool | None = None,
        clip_action: bool | None = None,
    ) -> Any:
        """Returns the action for one observation, ready for the environment.

        Args:
            observation: one observation; or
            input_dict: a dict with `obs` and what else the policy reads.
            state: the memory of a recurrent policy.
            prev_action: the last action, for models that read it.
            prev_reward: the last reward, likewise.
            info: accepted and unused.
            policy_id: which policy acts.
            full_fetch: whether to return `(action, state, extras)`.
            explore: sample or be greedy; None takes the config's.
            timestep: for schedules of exploration.
            episode: accepted and unused.
            unsquash_action: map from [-1, 1] to the Box's bounds; None takes `normalize_actions`.
            clip_action: clip to the Box's bounds; None takes `clip_actions`.

        Raises:
            UnknownPolicyError: if there is no such policy.
            UsageError: if both or neither of `observation` and `input_dict` are given.
        """
        policy = self._known_policy(policy_id)
        if (observation is None) == (input_dict is None):
            raise UsageError("Give either observation or input_dict to compute_single_action.")
        action, states, extras = policy.compute_single_action(
            observation,
            state,
            prev_action=prev_action,
            prev_reward=prev_reward,
            info=info,
            input_dict=input_dict,
            episode=episode,
            explore=explore,
            timestep=timestep,
        )
        action = policy.env_action(action, unsquash=unsquash_action, clip=clip_action)
        return (action, states, extras) if full_fetch or states else action

    def _known_policy(self, policy_id: str) -> Any:
        policy = self.get_policy(policy_id)
        if policy is None:
            raise UnknownPolicyError(
                f"No policy {policy_id!r}; there are {sorted(self.worker.policy_map)}."
            )
        return policy

    def export_policy_model(
        self,
        export_dir: str | os.PathLike[str],
        policy_id: str = DEFAULT_POLICY_ID,
        onnx: int | bool | None = None,
    ) -> Any:
        """Writes a policy for serving; see `TFPolicy.export_model`.

        Args:
            export_dir: the folder; made if missing.
            policy_id: which policy.
            onnx: None for a SavedModel, True for ONNX, a number for ONNX of that opset.

        Raises:
            UnknownPolicyError: if there is no such policy.
            ExportError: if the policy cannot be exported; the folder is then as it was.
        """
        return self._known_policy(policy_id).export_model(export_dir, onnx)

    # -- checkpoints --------------------------------------------------------------------------

    def save(self, checkpoint_dir: str | os.PathLike[str] | None = None) -> SaveResult:
        """Writes a checkpoint of everything into a folder; no pickle.

        A run restored from it goes on exactly as this one, bit for bit, if the environments offer
        `get_state` and `set_state`, or if both start new episodes at the checkpoint
        (`checkpointing(new_episodes_at_checkpoint=True)`); otherwise it goes on with new episodes.

        Args:
            checkpoint_dir: the folder, made if missing; a checkpoint there is replaced as a whole,
                whatever interrupts it. None makes `checkpoint_<iteration>` in the working folder.

        Returns:
            A record with `checkpoint.path` and the `metrics` of the last iteration.

        Raises:
            CheckpointError: if it cannot be written.
        """
        folder = Path(checkpoint_dir or f"checkpoint_{self.iteration:06d}")
        checkpoints.write_algorithm(self, folder)
        if self.config.new_episodes_at_checkpoint:
            self.worker.reset_episodes()
        return SaveResult(SavedCheckpoint(str(folder)), self._last_result)

    def restore(self, checkpoint: Any) -> None:
        """Puts this algorithm into the state of a checkpoint.

        Args:
            checkpoint: the folder, or what `save` returned.

        Raises:
            CheckpointError: if it is missing, damaged, foreign or does not fit; nothing is changed
                then. The message names the file and the reason.
        """
        folder = path_of(checkpoint)
        found = checkpoints.read_algorithm(folder)
        checkpoints.restore_algorithm(self, found, repr(str(folder)))
        self.callbacks.on_checkpoint_loaded(algorithm=self)

    @classmethod
    def from_checkpoint(cls, path: Any, *, config: Mapping[str, Any] | None = None) -> Algorithm:
        """Builds the algorithm of a checkpoint and restores it.

        Args:
            path: the folder, or what `save` returned.
            config: settings that replace stored ones, and those that a file cannot hold (an
                environment class or a model of your own).

        Raises:
            CheckpointError: if the checkpoint is missing, damaged or foreign.
        """
        folder = path_of(path)
        source = repr(str(folder))
        found = checkpoints.read_algorithm(folder)
        kind: Any = checkpoints.algorithm_class_of(found, source, cls)
        if not issubclass(kind, Algorithm):
            raise CheckpointError(f"{source}: {kind.__name__} is no algorithm.")
        algorithm = kind(checkpoints.config_of(found, source, kind.config_class, config))
        checkpoints.restore_algorithm(algorithm, found, source)
        algorithm.callbacks.on_checkpoint_loaded(algorithm=algorithm)
        return algorithm

    def progress(self) -> dict[str, Any]:
        """Returns the counters of the run, for a checkpoint."""
        return {
            "iteration": self.iteration,
            "counters": dict(self.counters),
            "episodes": [(e.episode_length, e.episode_reward) for e in self._episodes],
            "episodes_total": self._episodes_total,
            "time_total_s": self._time_total,
        }

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """Restores what `progress` returned."""
        self.iteration = progress["iteration"]
        self.counters.update(progress["counters"])
        self._episodes.clear()
        self._episodes.extend(RolloutMetrics(*pair) for pair in progress["episodes"])
        self._episodes_total = progress["episodes_total"]
        self._time_total = progress["time_total_s"]

    def get_extra_state(self) -> dict[str, Any]:
        """Returns what a subclass adds to checkpoints: JSON values and arrays, nested in dicts."""
        return {}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_extra_state` returned.

        Raises:
            CheckpointError: if it does not fit; nothing is changed then.
        """

    def restore_evaluation(self, seeds_used: int, rng: np.random.Generator) -> None:
        """Lets evaluations continue with the seeds and noise of a checkpoint."""
        worker = self._evaluation()
        worker.seeds_used = seeds_used
        worker.get_policy().generator.bit_generator.state = rng.bit_generator.state

    def stop(self) -> None:
        """Closes the environments; may be called again."""
        self.worker.stop()
        if self.evaluation_worker is not None:
            self.evaluation_worker.stop()
        self._stopped = True

    def _record_resolved(self) -> None:
        """Keeps in the config what every "auto" became."""
        policy = self.get_policy()
        length = self.config.fragment_length(self._num_envs())
        self.config.record_resolved(rollout_fragment_length=length)
        if isinstance(policy, TFPolicy):
            resolved = policy.config
            self.config.record_resolved(
                inference=policy.inference, jit_compile=resolved["jit_compile"]
            )

    def _announce(self) -> None:
        """Says in one line what every "auto" became."""
        policy = self.get_policy()
        if self.config.log_level == "ERROR" or not isinstance(policy, TFPolicy):
            return
        learning = "XLA" if policy.config["jit_compile"] else "tf.function"
        envs = self._num_envs()
        length = self.config.fragment_length(envs)
        print(
            f"{type(self).__name__}: acting through {policy.inference}, learning through "
            f"{learning}, {envs} environments x {length} steps per sample."
        )
