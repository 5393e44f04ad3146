"""Fluent configuration: `PPOConfig().environment("CartPole-v1").training(lr=3e-4)`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from gymnasium.vector import VectorEnv

from tfpolicies.base.type_aliases import Setting
from tfpolicies.config import run_sections, sections
from tfpolicies.config.base_config import BaseConfig
from tfpolicies.config.multi_agent import MultiAgentSettings, as_predicate, make_policy_specs
from tfpolicies.config.multi_agent_setup import (
    SpaceResolver,
    Spaces,
    make_policy_config,
    require_policy_settings,
)
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID, PolicySpec
from tfpolicies.config.rllib_settings import ALIASES, ALSO_ACCEPTED_BY, FIXED_SETTINGS
from tfpolicies.envs.env_factory import (
    check_instance_suffices,
    check_process_count,
    is_env_instance,
)
from tfpolicies.envs.multi_agent_env import MultiAgentEnv
from tfpolicies.envs.vector_adapters import CustomVectorEnv
from tfpolicies.errors import ConfigError, UnknownSettingError, show_value, suggest_similar_names
from tfpolicies.models.spaces import MASK

logger = logging.getLogger("tfpolicies")

EnvArgument = Setting | MultiAgentEnv | CustomVectorEnv | VectorEnv[Any, Any, Any]
"""An argument of `environment`: a name, a class, a creator or an environment."""


class _NotProvided:
    """Default of arguments that are not given; None is an ordinary value."""

    def __repr__(self) -> str:
        return "<not provided>"


_NOT_PROVIDED: Any = _NotProvided()


class AlgorithmConfig(BaseConfig):
    """All settings of an algorithm, in frozen sections, changed by fluent methods.

    Every method takes keywords, changes only those given, checks them at once and returns the same
    object. Settings are read as attributes or as items: `config.lr`, `config["lr"]`.

    Args:
        algo_class: the `Algorithm` that `build` makes.

    >>> config = AlgorithmConfig().training(lr=3e-4).debugging(seed=1)
    >>> config.lr, config["seed"]
    (0.0003, 1)
    >>> config.training(learning_rat=1)
    Traceback (most recent call last):
    ...
    TypeError: training() got an unexpected keyword 'learning_rat'. ...
    """

    training_section: type = sections.TrainingSettings

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(
            {
                "environment": sections.EnvironmentSettings,
                "rollouts": sections.RolloutSettings,
                "training": self.training_section,
                "multi_agent": MultiAgentSettings,
                "framework": sections.FrameworkSettings,
                "resources": run_sections.ResourceSettings,
                "exploration": sections.ExplorationSettings,
                "evaluation": run_sections.EvaluationSettings,
                "debugging": run_sections.DebuggingSettings,
                "reporting": run_sections.ReportingSettings,
                "checkpointing": run_sections.CheckpointingSettings,
                "callbacks": run_sections.CallbackSettings,
                "fault_tolerance": run_sections.FaultToleranceSettings,
                "offline_data": run_sections.OfflineDataSettings,
                "python_environment": run_sections.PythonEnvironmentSettings,
                "experimental": run_sections.ExperimentalSettings,
            }
        )
        if algo_class is not None:
            object.__setattr__(self, "algo_class", algo_class)

    # -- fluent methods -----------------------------------------------------------------------

    def environment(self, env: EnvArgument = _NOT_PROVIDED, **settings: Setting) -> AlgorithmConfig:
        """Sets the environment; see `sections.EnvironmentSettings` for the settings.

        `render_env`, `is_atari` and `auto_wrap_old_gym_envs` are accepted at their defaults, like
        all `FIXED_SETTINGS` of `dialect.py`.
        """
        return self._change("environment", _add_if_provided("env", env, settings))

    def rollouts(self, **settings: Setting) -> AlgorithmConfig:
        """Sets how experience is collected; see `sections.RolloutSettings`.

        Settings of `fault_tolerance` are accepted with a warning.
        """
        moved_names = [
            name for name in settings if ALIASES.get(name, name) in ALSO_ACCEPTED_BY["rollouts"]
        ]
        if moved_names:
            logger.warning("%s: now a setting of `fault_tolerance()`.", ", ".join(moved_names))
        return self._change("rollouts", settings)

    def env_runners(self, **settings: Setting) -> AlgorithmConfig:
        """Same as `rollouts`, under RLlib's newer name; also accepts `num_env_runners` and similar.

        It also accepts settings of `exploration` and `resources`: `explore`, `exploration_config`,
        `num_cpus_per_env_runner` and others.
        """
        return self._change("env_runners", settings, "rollouts")

    def training(self, **settings: Setting) -> AlgorithmConfig:
        """Sets how policies learn; see the algorithm's training section.

        `model` may be a dict of model settings, a `keras.Model`, or a factory of one.
        """
        return self._change("training", settings)

    def framework(
        self, framework: str | None = _NOT_PROVIDED, **settings: Setting
    ) -> AlgorithmConfig:
        """Sets how policies run; see `sections.FrameworkSettings`. None is the default, "tf2"."""
        return self._change("framework", _add_if_provided("framework", framework, settings))

    def resources(self, **settings: Setting) -> AlgorithmConfig:
        """Sets the hardware resources; see `run_sections.ResourceSettings`."""
        return self._change("resources", settings)

    def fault_tolerance(self, **settings: Setting) -> AlgorithmConfig:
        """Sets how failures are handled; see `run_sections.FaultToleranceSettings`."""
        return self._change("fault_tolerance", settings)

    def exploration(self, **settings: Setting) -> AlgorithmConfig:
        """Sets whether policies explore; see `sections.Exploration`."""
        return self._change("exploration", settings)

    def evaluation(self, **settings: Setting) -> AlgorithmConfig:
        """Sets how policies are evaluated; see `run_sections.EvaluationSettings`."""
        return self._change("evaluation", settings)

    def debugging(self, **settings: Setting) -> AlgorithmConfig:
        """Sets seed, log level and NaN handling; see `run_sections.DebuggingSettings`."""
        return self._change("debugging", settings)

    def reporting(self, **settings: Setting) -> AlgorithmConfig:
        """Sets the length of an iteration and its metrics; see `run_sections.ReportingSettings`."""
        return self._change("reporting", settings)

    def checkpointing(self, **settings: Setting) -> AlgorithmConfig:
        """Sets the content of checkpoints; see `run_sections.CheckpointingSettings`."""
        return self._change("checkpointing", settings)

    def python_environment(self, **settings: Setting) -> AlgorithmConfig:
        """Sets environment variables of remote workers; see `PythonEnvironmentSettings`."""
        return self._change("python_environment", settings)

    def offline_data(self, **settings: Setting) -> AlgorithmConfig:
        """Sets where batches come from and where they are recorded; see `OfflineDataSettings`.

        `input_` may be a Parquet file or JSON lines, an array, a data frame, or a mixture.
        """
        return self._change("offline_data", settings)

    def api_stack(self, **settings: Setting) -> AlgorithmConfig:
        """Accepts the switches for RLlib's new API stack, if they are off."""
        return self._change("api_stack", settings)

    def rl_module(self, **settings: Setting) -> AlgorithmConfig:
        """Accepts the settings that enable RLlib's new API stack, if off; see `api_stack`."""
        return self._change("rl_module", settings)

    def experimental(self, **settings: Setting) -> AlgorithmConfig:
        """Sets experimental settings; see `run_sections.ExperimentalSettings`."""
        return self._change("experimental", settings)

    def callbacks(self, callbacks_class: Callable[[], Any] | None) -> AlgorithmConfig:
        """Sets the `DefaultCallbacks` subclass whose methods are called; None for none."""
        return self._change("callbacks", {"callbacks": callbacks_class})

    def multi_agent(
        self,
        *,
        policies: Mapping[str, Any] | Collection[str] = _NOT_PROVIDED,
        policy_map_capacity: int = _NOT_PROVIDED,
        policy_mapping_fn: Callable[..., str] | None = _NOT_PROVIDED,
        policies_to_train: Collection[str] | Callable[..., bool] | None = _NOT_PROVIDED,
        policy_states_are_swappable: bool = _NOT_PROVIDED,
        observation_fn: Callable[..., Mapping[Any, Any]] | None = _NOT_PROVIDED,
        count_steps_by: str = _NOT_PROVIDED,
        algorithm_config_overrides_per_module: int = -1,
        replay_mode: int = -1,
        policy_map_cache: int = -1,
        **unknown: Setting,
    ) -> AlgorithmConfig:
        """Sets the policies, which agents they act for, and which of them are trained.

        All arguments are checked before anything is changed, and converted at once:
        `config.policies` is a dict of `PolicySpec` by id, whatever form was given.

        Args:
            policies: replaces all previous policies. A dict by policy id of `PolicySpec` or
                4-tuples `(policy_class, observation_space, action_space, config)`; or a list, set
                or tuple of ids. Fields that are None, or missing with ids, are filled in when
                policies are created (`get_multi_agent_setup`): the algorithm's class, the spaces of
                the agents, this config. `config` is a dict of overrides, or an `AlgorithmConfig`,
                whose settings are then all used; settings of the whole run that differ from this
                config are rejected by `validate`. Ids are strings that are valid file names.
            policy_map_capacity: how many policies keep their variables in memory; those of the
                least recently used others are on disk. At least 1; by default 100.
            policy_mapping_fn: `f(agent_id, episode, worker, **kwargs) -> policy_id`, called when an
                agent appears in an episode; its result is used for that episode. To infer spaces it
                may be called with None for episode and worker. By default, and for None: every
                agent has the policy `DEFAULT_POLICY_ID`.
            policies_to_train: the policies to update. None: all; a list, set or tuple of ids, empty
                to train nothing; or `f(policy_id, batch=None) -> bool`, called with the current
                batch, or None if there is none yet.
            policy_states_are_swappable: declares that all policies have variables of the same
                shapes; it has no effect here, since swapping costs the same either way.
            observation_fn: `f(agent_obs, worker, base_env, policies, episode)`, called with
                keywords, that returns the observations by agent id that policies get instead.
            count_steps_by: the unit in which batches are measured. "env_steps": each step of an
                environment, however many agents act in it; "agent_steps": each agent's.
            algorithm_config_overrides_per_module: deprecated; only -1.
            replay_mode: deprecated; only -1.
            policy_map_cache: deprecated; only -1.
            unknown: any other keyword is rejected, with near matches.

        Returns:
            This config.

        Raises:
            ConfigError: for an invalid value, or a deprecated argument with another value than -1;
                the message names the replacement.
            TypeError: for an unknown argument.
            UsageError: if `policies_to_train` has another type; also an AssertionError.

        >>> config = AlgorithmConfig().multi_agent(policies={"a", "b"}, policies_to_train=["a"])
        >>> config.policies["b"]
        PolicySpec(policy_class=None, observation_space=None, action_space=None, config=None)
        """
        arguments = {name: x for name, x in locals().items() if name not in ("self", "unknown")}
        settings = {name: x for name, x in arguments.items() if x is not _NOT_PROVIDED}
        self._change("multi_agent", settings | unknown)
        trained_ids = settings.get("policies_to_train")
        if isinstance(trained_ids, Collection) and not trained_ids:
            logger.warning("policies_to_train is empty: no policy will be trained.")
        return self

    # -- several policies ---------------------------------------------------------------------

    def is_multi_agent(self) -> bool:
        """Returns False if `DEFAULT_POLICY_ID` is the only policy, else True."""
        return set(self._policies) != {DEFAULT_POLICY_ID}

    @property
    def _policies(self) -> Mapping[str, PolicySpec]:
        policies: Mapping[str, PolicySpec] = vars(self._sections["multi_agent"])["policies"]
        return policies

    def get_multi_agent_setup(
        self,
        *,
        policies: Mapping[str, Any] | Collection[str] | None = None,
        env: EnvArgument = None,
        spaces: Mapping[str, Spaces] | None = None,
        default_policy_class: type | None = None,
        policy_mapping_fn: Callable[..., str] | None = None,
    ) -> tuple[dict[str, PolicySpec], Callable[..., bool] | None]:
        """Returns the policies as complete specs, and the predicate of trained policies.

        A space that a spec does not name is taken from `spaces[policy_id]`, else from the
        environment (its `single_observation_space`, or `observation_space`; without an environment
        `spaces["__env__"]`), else from this config. If a space of the environment is a Dict by
        agent id, a policy gets the space that its agents share, or None if
        `policy_mapping_fn(agent_id, None, worker=None)` maps no agent to it.

        Args:
            policies: as in `multi_agent`; by default those of this config.
            env: an environment that provides spaces.
            spaces: `{policy_id: (observation_space, action_space)}`.
            default_policy_class: the class of policies without an explicit one.
            policy_mapping_fn: the mapping of agents; by default that of this config.

        Returns:
            The specs by id, and `f(policy_id, batch=None) -> bool`, or None if all policies are
            trained. Each `config` is a complete `AlgorithmConfig`: a copy of this one, without its
            multi-agent settings, with the spec's overrides, or one of the `config_class` of the
            policy's class.

        Raises:
            ConfigError: for a space that is not given anywhere, a policy whose agents have
                different spaces, or an invalid override.
        """
        mapping_fn = policy_mapping_fn or self.policy_mapping_fn
        sources = SpaceResolver(self, env, spaces or {}, mapping_fn)
        specs = {}
        for policy_id, spec in (
            self.policies if policies is None else make_policy_specs(policies)
        ).items():
            policy_class = spec.policy_class or default_policy_class
            spec_spaces = spec.observation_space, spec.action_space
            policy_spaces = [
                sources.get_space(policy_id, i) if spec_spaces[i] is None else spec_spaces[i]
                for i in (0, 1)
            ]
            config = make_policy_config(self, policy_id, policy_class, spec.config or {})
            specs[policy_id] = PolicySpec(policy_class, policy_spaces[0], policy_spaces[1], config)
        return specs, as_predicate(self.policies_to_train)

    def settings_for(self, config_class: type[AlgorithmConfig]) -> dict[str, Any]:
        """Returns the settings of this config that apply to a policy with another config class.

        These are all settings if this config is of that class. Otherwise they are those that were
        changed here and that the class has; others keep the defaults of the class. Multi-agent
        settings do not apply to a single policy.
        """
        is_same_class = isinstance(self, config_class)
        settings = (
            self._as_dict("multi_agent")
            if is_same_class
            else self._get_changed_settings("multi_agent")
        )
        readable = config_class()._layout.readable
        return {key: value for key, value in settings.items() if key in readable}

    def copy_for_policy(self) -> AlgorithmConfig:
        """Returns an unfrozen copy with default multi-agent and data settings."""
        config = self.copy(copy_frozen=False)
        config._sections["multi_agent"] = MultiAgentSettings()
        config._sections["offline_data"] = run_sections.OfflineDataSettings()
        return config

    def add_custom_settings(self, settings: Mapping[str, Any]) -> None:
        """Adds settings with custom names, for a custom policy class."""
        self._check_not_frozen(", ".join(settings))
        self._custom_settings.update(settings)

    def _check_sections(self, parts: Mapping[str, Any]) -> None:
        """Checks the overrides of policies whose classes are known."""
        if "multi_agent" not in parts:
            return
        default = self._get_default_policy_class()
        for policy_id, spec in parts["multi_agent"].policies.items():
            if spec.config:
                make_policy_config(self, policy_id, spec.policy_class or default, spec.config)

    def _get_default_policy_class(self) -> type:
        """Returns the algorithm's policy class, or `object`, which accepts any override."""
        find = getattr(self.algo_class, "get_default_policy_class", None)
        try:
            return object if find is None else find(self)
        except ConfigError:
            return object

    def _multi_agent_settings(self, multiagent: object) -> dict[str, Any]:
        if not isinstance(multiagent, Mapping):
            raise ConfigError(f"multiagent must be a dict of settings, got {multiagent!r}.")
        allowed = [
            name for name, section in self._section_by_setting.items() if section == "multi_agent"
        ]
        for name in multiagent:
            if (
                name not in allowed
                and getattr(FIXED_SETTINGS.get(name), "method", "") != "multi_agent"
            ):
                raise UnknownSettingError(
                    f"multiagent has no key {name!r}.{suggest_similar_names(str(name), allowed)} "
                    f"It takes {', '.join(allowed)}."
                )
        return dict(multiagent)

    # -- complete configs ---------------------------------------------------------------------

    def validate(self) -> None:
        """Checks settings against each other.

        Raises:
            ConfigError: if settings contradict each other.
            EnvError: if the environment is an object, and more than one is needed.
        """
        self.require_values()
        self._validate_policies()
        self._validate_mask()
        if is_env_instance(self.env):
            has_evaluation_env = (self.evaluation_config or {}).get("env") is not None
            evaluates = self.evaluation_interval is not None and not has_evaluation_env
            envs, workers = self.num_envs_per_worker, self.num_rollout_workers
            processes = self.env_processes
            check_instance_suffices(
                self.env, envs, workers, evaluates=evaluates, num_processes=processes
            )
        check_process_count(self.num_envs_per_worker, self.env_processes)
        if self.evaluation_config is not None:
            self.copy(copy_frozen=False).update_from_dict(self.evaluation_config)
        self._validate_connectors()
        self._validate_evaluation()

    def _validate_mask(self) -> None:
        policies = self._policies.values()
        models = [self.model, *[(spec.config or {}).get("model") or {} for spec in policies]]
        has_custom = any(isinstance(x, Mapping) and x.get("custom_model") for x in models)
        if self.action_mask_key != MASK and not has_custom:
            raise ConfigError(
                f"action_mask_key must be {MASK!r} unless a custom model masks its "
                f"outputs itself, got {show_value(self.action_mask_key)}. Give that model, or let "
                "a wrapper return observations {'observations': ..., 'action_mask': ...}, whose "
                "mask policies apply."
            )

    def _validate_connectors(self) -> None:
        if self.enable_connectors:
            return
        policies = self._policies
        overrides_by_policy = {
            f" of policies[{pid!r}]": spec.config or {} for pid, spec in policies.items()
        }
        for suffix, settings in {"": self, **overrides_by_policy}.items():
            for name in sections.CONNECTORS:
                connectors = settings.get(name)
                if connectors:
                    raise ConfigError(
                        f"{name}{suffix} has {len(connectors)} connectors, but "
                        f"enable_connectors=False; leave it out, or set {name}=[]."
                    )

    def _validate_evaluation(self) -> None:
        parallel, workers = self.evaluation_parallel_to_training, self.evaluation_num_workers
        if parallel and not workers:
            raise ConfigError(
                "evaluation_parallel_to_training=True needs evaluation workers: set "
                "evaluation_num_workers to 1 or more, or leave it out."
            )
        if self.evaluation_duration == "auto" and not parallel:
            raise ConfigError(
                "evaluation_duration='auto' evaluates while training runs, so it needs "
                "evaluation_parallel_to_training=True; or set it to a number."
            )
        if workers and self.evaluation_interval is None:
            logger.warning(
                "evaluation_num_workers=%s, but evaluation_interval is None: only `evaluate()` "
                "uses them.",
                workers,
            )

    def _validate_policies(self) -> None:
        policies_to_train, policies = self.policies_to_train, self._policies
        unknown = (
            [x for x in policies_to_train if x not in policies]
            if isinstance(policies_to_train, Collection)
            else []
        )
        if unknown:
            raise ConfigError(
                f"policies_to_train has {unknown}, not defined in policies={sorted(policies)}."
                f"{suggest_similar_names(unknown[0], policies)} Add them by "
                "multi_agent(policies=...)."
            )
        default_class = self._get_default_policy_class()
        for policy_id, spec in policies.items():
            require_policy_settings(self, policy_id, spec, default_class)

    def get_fragment_length(self, num_envs: int | None = None, worker_index: int = 0) -> int:
        """Returns the rows of each environment per `sample()`, with "auto" resolved.

        "auto" is `train_batch_size / (environments of all workers)`, rounded up; of several
        workers, the first ones take the remaining rows.

        Args:
            num_envs: environments of one worker, if a vector environment decides their number;
                `num_envs_per_worker` by default.
            worker_index: of the worker, from 1; 0 for the largest length of any worker.

        >>> config = AlgorithmConfig().training(train_batch_size=4000)
        >>> config = config.rollouts(num_rollout_workers=3, rollout_fragment_length="auto")
        >>> config.get_fragment_length(worker_index=1), config.get_fragment_length(worker_index=2)
        (1334, 1333)
        """
        if self.rollout_fragment_length != "auto":
            return int(self.rollout_fragment_length)
        envs = num_envs or self.num_envs_per_worker
        all_envs = envs * max(1, self.num_rollout_workers)
        share, remainder = divmod(self.train_batch_size, all_envs)
        return int(share + (max(0, worker_index - 1) * envs < remainder))

    def get_evaluation_config_object(self) -> AlgorithmConfig:
        """Returns the config of evaluation workers: a copy with `evaluation_config` applied.

        They sample complete episodes one by one. If `evaluation_duration_unit` is "timesteps", they
        sample fragments that share the duration among the workers (10 steps if it is "auto").

        Raises:
            ConfigError: for an override that is unknown or invalid.
        """
        config = self.copy(copy_frozen=False).update_from_dict(self.evaluation_config or {})
        config.evaluation(evaluation_config=None, in_evaluation=True)
        config.offline_data(input_="sampler", output=None)
        if config.evaluation_duration_unit == "episodes":
            return config.rollouts(batch_mode="complete_episodes", rollout_fragment_length=1)
        duration, workers = config.evaluation_duration, max(1, config.evaluation_num_workers)
        length = 10 if duration == "auto" else -(-duration // workers)
        return config.rollouts(batch_mode="truncate_episodes", rollout_fragment_length=length)

    def build(
        self, env: EnvArgument = None, logger_creator: None = None, use_copy: bool = True
    ) -> Any:
        """Builds the algorithm.

        Args:
            env: sets the environment first, if given.
            logger_creator: accepted for ported code; must be None.
            use_copy: whether to build from a copy, so that this object is not frozen.

        Raises:
            ConfigError: if settings contradict each other, or this config has no algorithm.
        """
        if logger_creator is not None:
            raise ConfigError("logger_creator must be None; log the results of `train()` instead.")
        algorithm_class = self._require_algorithm()
        config = self.copy(copy_frozen=False) if use_copy else self
        if env is not None:
            config.environment(env)
        return algorithm_class(config)

    @classmethod
    def from_tuned(cls, env: str) -> AlgorithmConfig:
        """Returns a config with settings that are known to learn well in an environment.

        `tfpolicies list tuned` lists them with their sources; see also `docs/tables/tuned.md`.

        Args:
            env: the environment's registered name; the config's `env` is set to it.

        Raises:
            ConfigError: if there are none for this algorithm and environment (the message names the
                nearest ones), or if this class has no algorithm.

        >>> from tfpolicies import SACConfig
        >>> SACConfig.from_tuned("Pendulum-v1").training(gamma=0.98).lr
        0.001
        """
        config = cls()
        settings = config._require_algorithm().get_tuned_settings(env)
        return config.environment(env).update_from_dict(settings)

    def _require_algorithm(self) -> Any:
        if self.algo_class is None:
            raise ConfigError(
                f"{type(self).__name__} has no algorithm; build one of its subclasses (PPOConfig, "
                "PGConfig), or give AlgorithmConfig(algo_class=...)."
            )
        return self.algo_class


def _add_if_provided(name: str, value: EnvArgument, settings: dict[str, Any]) -> dict[str, Any]:
    return settings if value is _NOT_PROVIDED else {name: value, **settings}
