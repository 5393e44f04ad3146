"""The fluent door to the config: `PPOConfig().environment("CartPole-v1").training(lr=3e-4)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from tfpolicies.config import sections
from tfpolicies.config.read_only import copied, handed_out, merged
from tfpolicies.errors import (
    ConfigError,
    FrozenConfigError,
    UnknownSettingError,
    near_matches,
)

# A given dict is merged over the present one, if True also the dicts in it.
_MERGED = {
    "env_config": True,
    "model": False,
    "optimizer": False,
    "evaluation_config": False,
    "tf_session_args": False,
    "local_tf_session_args": False,
    "exploration_config": False,
    "replay_buffer_config": False,
}

_TYPED = ("exploration_config", "replay_buffer_config")  # another "type" drops the other keys

_ALIASES = {
    "lambda": "lambda_",
    "num_workers": "num_rollout_workers",
    "num_env_runners": "num_rollout_workers",
    "num_envs_per_env_runner": "num_envs_per_worker",
    "framework_str": "framework",
    "num_epochs": "num_sgd_iter",
    "minibatch_size": "sgd_minibatch_size",
}

_DICT_NAMES = {"lambda_": "lambda", "num_rollout_workers": "num_workers"}  # names in `to_dict()`

_MISSING: Any = object()


class AlgorithmConfig:
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

    algo_class: type | None = None
    training_section: type = sections.Training

    _sections: dict[str, Any]  # by name, which is also the name of the method that changes it
    _homes: dict[str, str]  # the section of each setting
    _frozen: bool

    def __init__(self, algo_class: type | None = None) -> None:
        set_ = object.__setattr__
        set_(self, "_frozen", False)
        if algo_class is not None:
            set_(self, "algo_class", algo_class)
        parts = (
            sections.Environment(),
            sections.Rollouts(),
            self.training_section(),
            sections.Framework(),
            sections.Resources(),
            sections.Exploration(),
            sections.Evaluation(),
            sections.Debugging(),
            sections.Reporting(),
            sections.Checkpointing(),
            sections.Callbacks(),
            sections.Experimental(),
        )
        set_(self, "_sections", {_section_name(part): part for part in parts})
        set_(
            self,
            "_homes",
            {
                field.name: name
                for name, part in self._sections.items()
                for field in dataclasses.fields(part)
            },
        )

    # -- the fluent methods -------------------------------------------------------------------

    def environment(self, env: Any = _MISSING, **settings: Any) -> AlgorithmConfig:
        """Sets what is acted in; see `sections.Environment` for the settings."""
        return self._change("environment", _with("env", env, settings))

    def rollouts(self, **settings: Any) -> AlgorithmConfig:
        """Sets how experience is collected; see `sections.Rollouts`."""
        return self._change("rollouts", settings)

    def env_runners(self, **settings: Any) -> AlgorithmConfig:
        """Is `rollouts` under its later name; takes `num_env_runners` and the like too."""
        return self._change("rollouts", settings, called="env_runners")

    def training(self, **settings: Any) -> AlgorithmConfig:
        """Sets how policies learn; see the algorithm's training section.

        `model` may be a dict of model settings, a `keras.Model`, or a factory of one.
        """
        model = settings.get("model")
        if model is not None and not isinstance(model, Mapping) and callable(model):
            settings = {**settings, "model": {"custom_model": model}}
        return self._change("training", settings)

    def framework(self, framework: Any = _MISSING, **settings: Any) -> AlgorithmConfig:
        """Sets how policies run; see `sections.Framework`."""
        return self._change("framework", _with("framework", framework, settings))

    def resources(self, **settings: Any) -> AlgorithmConfig:
        """Sets what hardware is used; see `sections.Resources`."""
        return self._change("resources", settings)

    def exploration(self, **settings: Any) -> AlgorithmConfig:
        """Sets whether policies explore; see `sections.Exploration`."""
        return self._change("exploration", settings)

    def evaluation(self, **settings: Any) -> AlgorithmConfig:
        """Sets how policies are evaluated; see `sections.Evaluation`."""
        return self._change("evaluation", settings)

    def debugging(self, **settings: Any) -> AlgorithmConfig:
        """Sets seed and log level; see `sections.Debugging`."""
        return self._change("debugging", settings)

    def reporting(self, **settings: Any) -> AlgorithmConfig:
        """Sets what an iteration is; see `sections.Reporting`."""
        return self._change("reporting", settings)

    def checkpointing(self, **settings: Any) -> AlgorithmConfig:
        """Sets what happens at checkpoints; see `sections.Checkpointing`."""
        return self._change("checkpointing", settings)

    def experimental(self, **settings: Any) -> AlgorithmConfig:
        """Sets what few policy classes need; see `sections.Experimental`."""
        return self._change("experimental", settings)

    def callbacks(self, callbacks_class: Callable[[], Any] | None) -> AlgorithmConfig:
        """Sets the `DefaultCallbacks` subclass whose methods are called; None for none."""
        return self._change("callbacks", {"callbacks": callbacks_class})

    def _change(
        self, section: str, settings: Mapping[str, Any], *, called: str | None = None
    ) -> AlgorithmConfig:
        part = self._sections[section]
        names = [field.name for field in dataclasses.fields(part)]
        given: dict[str, Any] = {}
        for name, value in settings.items():
            known = name if name in names else _ALIASES.get(name, name)
            if known not in names:
                hint = near_matches(name, [*names, *_ALIASES]) or self._elsewhere(name)
                raise TypeError(
                    f"{called or section}() got an unexpected keyword {name!r}.{hint} "
                    f"It takes {', '.join(names)}."
                )
            if known in given:
                raise TypeError(f"{called or section}() got {known!r} under two names.")
            if known == "evaluation_config" and isinstance(value, AlgorithmConfig):
                value = value._changed()
            if known in _MERGED and isinstance(value, Mapping):
                present = getattr(part, known) or {}
                kind = present.get("type")
                if known in _TYPED and value.get("type", kind) != kind:
                    present = {}  # its settings are of another type
                value = merged(present, value, deep=_MERGED[known])
            given[known] = copied(value)
        if given:
            self._check_not_frozen(", ".join(given))
            self._sections[section] = dataclasses.replace(part, **given)
        return self

    def _elsewhere(self, name: str) -> str:
        home = self._homes.get(_ALIASES.get(name, name))
        return f" It is a setting of `{home}()`." if home else ""

    def _check_not_frozen(self, what: str) -> None:
        if self._frozen:
            raise FrozenConfigError(
                f"{what} cannot be set: this {type(self).__name__} is already frozen, because a "
                "worker or an algorithm uses it. Change a copy: `config.copy(copy_frozen=False)`."
            )

    # -- as attributes and items --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_sections", "_homes", "_frozen"):
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.update_from_dict({name: value})

    def __delattr__(self, name: str) -> None:
        raise FrozenConfigError(f"{name} cannot be deleted: a config keeps all of its settings.")

    def __getitem__(self, key: str) -> Any:
        name = self._name_of(key)
        home = self._homes[name]
        return handed_out(getattr(self._sections[home], name), f"{home}({name}={{...}})")

    def __setitem__(self, key: str, value: Any) -> None:
        self.update_from_dict({key: value})

    def _name_of(self, key: str) -> str:
        name = _ALIASES.get(key, key)
        if name not in self._homes:
            raise UnknownSettingError(
                f"Invalid property name {key!r}: {type(self).__name__} has no such setting."
                f"{near_matches(str(key), [*self._homes, *_ALIASES])}"
            )
        return name

    def __contains__(self, key: object) -> bool:
        return _ALIASES.get(str(key), key) in self._homes

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a setting, or `default` where there is none of that name."""
        return self[key] if key in self else default  # noqa: SIM401

    def keys(self) -> KeysView[str]:
        """The names of all settings, as in `to_dict()`."""
        return self.to_dict().keys()

    def values(self) -> ValuesView[Any]:
        """The values of all settings."""
        return self.to_dict().values()

    def items(self) -> ItemsView[str, Any]:
        """All settings with their values."""
        return self.to_dict().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AlgorithmConfig):
            return NotImplemented
        return type(self) is type(other) and self._sections == other._sections

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed = [f"{name}={value!r}" for name, value in self._changed().items()]
        return f"{type(self).__name__}({', '.join(changed)})"

    def _changed(self) -> dict[str, Any]:
        """Returns the settings that are not those of a new config of this class."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}

    # -- whole configs ------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings as a plain dict with copies of the containers in it.

        `lambda_` is called `lambda` there, and `num_rollout_workers` `num_workers`.
        """
        return {
            _DICT_NAMES.get(name, name): copied(getattr(self._sections[home], name))
            for name, home in self._homes.items()
        }

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AlgorithmConfig:
        """Returns a new config with the given settings; see `update_from_dict`."""
        return cls().update_from_dict(config_dict)

    def update_from_dict(self, config_dict: Mapping[str, Any]) -> AlgorithmConfig:
        """Changes the given settings, under their own names or those of `to_dict()`.

        Raises:
            ConfigError: for an unknown name; nothing is changed then.
        """
        by_section: dict[str, dict[str, Any]] = {}
        for key, value in config_dict.items():
            name = self._name_of(key)
            by_section.setdefault(self._homes[name], {})[name] = value
        before = dict(self._sections)
        try:
            for home, settings in by_section.items():
                if home == "training":
                    self.training(**settings)
                else:
                    self._change(home, settings)
        except Exception:
            self._sections.update(before)
            raise
        return self

    @classmethod
    def overrides(cls, **settings: Any) -> dict[str, Any]:
        """Returns the settings as a plain dict, after checking their names.

        >>> AlgorithmConfig.overrides(gamma=0.95)
        {'gamma': 0.95}

        Raises:
            KeyError: for a name that is no setting of this config class.
        """
        config = cls()
        return {config._name_of(name): value for name, value in settings.items()}

    def settings_for(self, config_class: type[AlgorithmConfig]) -> dict[str, Any]:
        """Returns the settings that a policy with another config class takes from this config.

        These are all of them if this config is of that class, and otherwise those that were changed
        here and that the class knows: the rest has the class's own defaults.
        """
        if isinstance(self, config_class):
            known = config_class()
            return {key: value for key, value in self.to_dict().items() if key in known}
        known = config_class()
        return {key: value for key, value in self._changed().items() if key in known}

    def copy(self, copy_frozen: bool | None = None) -> AlgorithmConfig:
        """Returns a copy, as frozen as this one, or as `copy_frozen` says."""
        twin = type(self)()
        twin._sections.update(self._sections)
        object.__setattr__(twin, "algo_class", self.algo_class)
        frozen = self._frozen if copy_frozen is None else copy_frozen
        object.__setattr__(twin, "_frozen", frozen)
        return twin

    def record_resolved(self, **values: Any) -> None:
        """Puts what an "auto" became in its place, even in a frozen config."""
        for name, value in values.items():
            if self[name] == "auto":
                home = self._homes[name]
                part = self._sections[home]
                self._sections[home] = dataclasses.replace(part, **{name: value})

    def freeze(self) -> None:
        """Refuses all changes from here on."""
        object.__setattr__(self, "_frozen", True)

    @property
    def is_frozen(self) -> bool:
        """Whether changes are refused."""
        return self._frozen

    def validate(self) -> None:
        """Checks settings against each other.

        Raises:
            ConfigError: naming the contradiction.
        """
        if self.evaluation_config is not None:
            self.copy(copy_frozen=False).update_from_dict(self.evaluation_config)
        if self.num_rollout_workers:
            raise ConfigError(
                f"num_rollout_workers={self.num_rollout_workers}: sampling runs in this process; "
                "use num_rollout_workers=0 and num_envs_per_worker for more environments."
            )

    def fragment_length(self, num_envs: int | None = None) -> int:
        """Returns the rows that each environment yields per `sample()`, with "auto" resolved.

        "auto" is `train_batch_size / (environments of all workers)`, rounded up.

        Args:
            num_envs: environments of one worker, where a vector environment decides their number;
                `num_envs_per_worker` by default.
        """
        if self.rollout_fragment_length != "auto":
            return int(self.rollout_fragment_length)
        envs = (num_envs or self.num_envs_per_worker) * max(1, self.num_rollout_workers)
        return -(-self.train_batch_size // envs)

    def build(self, env: Any = None, logger_creator: Any = None, use_copy: bool = True) -> Any:
        """Builds the algorithm.

        Args:
            env: sets the environment first, if given.
            logger_creator: accepted for ported code; None is the only value.
            use_copy: build on a copy, so that this object stays changeable.

        Raises:
            ConfigError: if settings contradict each other, or this config has no algorithm.
        """
        if logger_creator is not None:
            raise ConfigError("logger_creator must be None; log the results of `train()` instead.")
        algorithm_class = self.algo_class
        if algorithm_class is None:
            raise ConfigError(
                f"{type(self).__name__} has no algorithm; build one of its subclasses (PPOConfig, "
                "PGConfig), or give AlgorithmConfig(algo_class=...)."
            )
        config = self.copy(copy_frozen=False) if use_copy else self
        if env is not None:
            config.environment(env)
        return algorithm_class(config)


def _section_name(part: Any) -> str:
    for kind in type(part).__mro__:
        if kind.__module__ == sections.__name__:
            return kind.__name__.lower()
    raise ConfigError(f"{type(part).__name__} is no section of a config.")


def _with(name: str, value: Any, settings: dict[str, Any]) -> dict[str, Any]:
    return settings if value is _MISSING else {name: value, **settings}
