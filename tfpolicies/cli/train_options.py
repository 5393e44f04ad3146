"""The settings of a training command, as text that a run folder can store."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tfpolicies.algorithms.algorithm_registry import find_algorithm, get_algorithm_names
from tfpolicies.algorithms.tuned_hyperparameters import (
    find_tuned,
    get_tuned_settings,
    suggest_tuned,
)
from tfpolicies.base.type_aliases import Setting
from tfpolicies.cli.arg_types import (
    describe_invalid_choice,
    non_negative_int,
    parse_columns,
    positive_float,
    positive_int,
)
from tfpolicies.cli.space_text import parse_space
from tfpolicies.config.rllib_settings import ALIASES
from tfpolicies.errors import (
    CheckpointError,
    ConfigError,
    UnknownSettingError,
    UsageError,
    suggest_similar_names,
)

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm import Algorithm
    from tfpolicies.algorithms.run_logger import TrainingOptions
    from tfpolicies.config.algorithm_config import AlgorithmConfig
    from tfpolicies.config.callbacks import DefaultCallbacks

_DATA_SETTINGS = {name: {"lr": 1e-3, "sgd_minibatch_size": 128} for name in ("BC", "MARWIL")}
"""Settings with which algorithms start on recorded experience, where none are tuned."""

_DEFAULT_NUM_ENVS = 8  # num_envs_per_worker, unless the command or tuned settings set it
_SPACES = ("observation_space", "action_space")
_CONSTANTS = {"true": True, "false": False, "none": None}  # accepted in any case

_LOGGERS = {
    "mlflow": "tfpolicies.loggers.mlflow_logger:MLflowLogger",
    "wandb": "tfpolicies.loggers.wandb_logger:WandbLogger",
}

MODEL_GROUP = "algorithm and environment"
DATA_GROUP = "recorded experience"
CODE_GROUP = "your own code, imported as `python -m` finds it"
END_GROUP, DURING_GROUP, AFTER_GROUP, RUN_GROUP = (
    "stopping",
    "during training",
    "after training",
    "the run folder",
)


_NUMBER_KWARGS: dict[str, Any] = {"type": positive_int, "metavar": "N"}


class Option(NamedTuple):
    """A setting of a run as a command-line option."""

    group: str  # the group in `--help`
    help: str
    argparse_kwargs: Mapping[str, Any]  # further keyword arguments of argparse
    setting: str | None  # the config's name for it
    may_change_on_resume: bool  # whether it may change when a run is resumed

    def make_argparse_kwargs(self) -> dict[str, Any]:
        """Returns the keyword arguments for argparse; calls a metavar that is a function."""
        metavar = self.argparse_kwargs.get("metavar")
        return (
            {**self.argparse_kwargs, "metavar": metavar()}
            if callable(metavar)
            else dict(self.argparse_kwargs)
        )


def _option(
    group: str,
    help: str,
    default: Setting = None,
    *,
    setting: str | None = None,
    may_change_on_resume: bool = False,
    **argparse_kwargs: object,
) -> Any:
    """Returns a dataclass field for a setting that is also a command-line option; see `Option`."""
    if default is False:
        argparse_kwargs["action"] = "store_true"
    return field(
        default=default,
        metadata={"word": Option(group, help, argparse_kwargs, setting, may_change_on_resume)},
    )


_resumable_option = functools.partial(_option, may_change_on_resume=True)
_optional_number = functools.partial(
    _resumable_option, default=0, type=non_negative_int, metavar="N"
)


def _parse_learning_rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        from tfpolicies.config.migration_hints import suggest_learning_rate

        raise argparse.ArgumentTypeError(
            f"must be a number{suggest_learning_rate(text)}, got {text!r:.200}"
        ) from None


def _parse_logger(text: str) -> str:
    if ":" in text or text in _LOGGERS:
        return text
    choices = describe_invalid_choice(text, [*_LOGGERS])
    raise argparse.ArgumentTypeError(f"{choices} Or name your own logger, as module:Class")


def make_loggers(names: Sequence[str]) -> list[DefaultCallbacks]:
    """Returns the loggers that `--logger` names.

    Args:
        names: of built-in loggers, or `"module:name"` of callables, given by the user and not by a
            file.

    Raises:
        UsageError: if one cannot be imported, or does not make `DefaultCallbacks`.
    """
    from tfpolicies.config.callbacks import DefaultCallbacks

    loggers = []
    for name in names:
        logger = import_option("logger", _LOGGERS.get(name, name))()
        if not isinstance(logger, DefaultCallbacks):
            raise UsageError(
                f"--logger: {name!r} must make a logger, such as MLflowLogger or a subclass of "
                f"DefaultCallbacks, got {logger!r:.100}."
            )
        loggers.append(logger)
    return loggers


def is_custom_algorithm(algo: str) -> bool:
    return ":" in algo


def parse_algorithm(text: str) -> str:
    """Parses the argument of `--algo`: the name of an algorithm, or `module:Class`.

    >>> parse_algorithm("sac")
    'SAC'
    """
    names = {name.lower(): name for name in get_algorithm_names()}
    name = text if text in names.values() else names.get(text.lower(), text)
    if _is_algorithm_name(name):
        return name
    raise argparse.ArgumentTypeError(
        f"{describe_invalid_choice(text, get_algorithm_names())} Or name your own class, as "
        "module:Class"
    )


def _is_algorithm_name(text: str) -> bool:
    return is_custom_algorithm(text) or text in get_algorithm_names()


def _make_algorithm_metavar() -> str:
    return f"{{{','.join(get_algorithm_names())},MODULE:CLASS}}"


def get_algorithm_class(algo: str) -> type[Algorithm]:
    """Returns the class of an algorithm.

    Args:
        algo: its name, or `"module:Class"`, given by the user and not by a file.

    Raises:
        ConfigError: for an unknown name.
        UsageError: if the class cannot be imported, or is not an algorithm.
    """
    if not is_custom_algorithm(algo):
        return find_algorithm(algo)
    from tfpolicies.algorithms.algorithm import Algorithm

    algorithm_class = import_option("algo", algo)
    if not (isinstance(algorithm_class, type) and issubclass(algorithm_class, Algorithm)):
        raise UsageError(
            f"--algo: {algo!r} must be a subclass of Algorithm, got {algorithm_class!r}."
        )
    return algorithm_class


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The settings of one training run, as `run.json` stores them; None is not set.

    Attributes:
        env: a registered name or `"module:Class"`; None with data only.
        from_file: settings of a file; all others override them.
        data_rows: rows of the recorded experience; None without.
    """

    env: str | None = None
    data_rows: int | None = None
    algo: str = _option(
        MODEL_GROUP,
        "algorithm (default PPO, with --data BC), or your own class",
        "PPO",
        type=parse_algorithm,
        metavar=_make_algorithm_metavar,
    )
    seed: int = _option(
        MODEL_GROUP,
        "seed of everything (default: random, and recorded)",
        0,
        setting="seed",
        type=non_negative_int,
    )
    num_envs: int | None = _option(
        MODEL_GROUP,
        f"environments stepped together (default: the tuned number, or {_DEFAULT_NUM_ENVS}, "
        "or 1 with a replay buffer)",
        setting="num_envs_per_worker",
        type=positive_int,
    )
    lr: float | None = _option(
        MODEL_GROUP, "learning rate", setting="lr", type=_parse_learning_rate
    )
    set: tuple[str, ...] = _option(
        MODEL_GROUP,
        "any other setting, such as clip_param=0.1 or model.fcnet_hiddens=[64,64]; repeatable",
        (),
        action="append",
        metavar="NAME=VALUE",
    )
    from_file: Mapping[str, Any] = field(default_factory=dict)
    no_tuned: bool = _option(
        MODEL_GROUP,
        "start with the algorithm's defaults (RLlib's), not with settings tuned for ENV "
        "(tfpolicies list tuned)",
        False,
    )
    data: tuple[str, ...] = _resumable_option(
        DATA_GROUP,
        "learn from recorded steps: Parquet files, JSON lines, folders of them or patterns; ENV is "
        "then only for evaluations, and is written before --data",
        (),
        action="extend",
        nargs="+",
        metavar="PATH",
    )
    columns: Mapping[str, Any] | None = _option(
        DATA_GROUP,
        'a JSON object, or a file with one: which columns of the data are used, such as {"obs": '
        '["temperature", "load"], "actions": "setpoint", "eps_id": "day"}',
        type=parse_columns,
        metavar="FILE_OR_JSON",
    )
    trusted_data: bool = _resumable_option(
        DATA_GROUP,
        "parse the files in this process (default: in a child process with limits of memory and "
        "time); give it again with --resume",
        False,
    )
    epochs: float | None = _resumable_option(
        DATA_GROUP,
        "stop after reading the data N times (default: 10 times, but at least 100,000 rows)",
        type=positive_float,
        metavar="N",
    )
    callbacks: str | None = _option(
        CODE_GROUP, "a subclass of DefaultCallbacks", metavar="MODULE:CLASS"
    )
    model: str | None = _option(
        CODE_GROUP, "f(observation_space, num_outputs) -> keras.Model", metavar="MODULE:FACTORY"
    )
    policy_mapping: str | None = _option(
        CODE_GROUP,
        "f(agent_id, episode, worker, **kwargs) -> the id of the policy that acts; list the "
        'policies in --config: {"policies": ["left", "right"]}',
        metavar="MODULE:FUNCTION",
    )
    steps: int = _resumable_option(
        END_GROUP,
        "stop after the iteration that reaches this number of environment steps (default 100,000, "
        "with --until 1,000,000), or of rows of --data",
        100_000,
        type=positive_int,
    )
    until: float | None = _resumable_option(
        END_GROUP,
        "stop when the mean return of recent training episodes reaches this (with --data: of an "
        "evaluation); recent: of the last 10,000 steps or of the iteration, at least 5",
        type=float,
        metavar="RETURN",
    )
    eval_every: int | None = _option(
        DURING_GROUP,
        "play greedy episodes every N iterations, and after the last step (default: never; with "
        "ENV and --data: 10 times)",
        setting="evaluation_interval",
        **_NUMBER_KWARGS,
    )
    eval_episodes: int = _option(
        DURING_GROUP,
        "episodes per evaluation (default 10)",
        10,
        setting="evaluation_duration",
        **_NUMBER_KWARGS,
    )
    keep_best: bool = _resumable_option(
        DURING_GROUP,
        "also keep a checkpoint of the weights with the best evaluation (or of those that sampled "
        "the iteration with the best mean of recent returns)",
        False,
    )
    checkpoint_every: int = _resumable_option(
        DURING_GROUP, "iterations between checkpoints (default 20)", 20, **_NUMBER_KWARGS
    )
    keep_checkpoints: int = _resumable_option(
        DURING_GROUP,
        "keep the newest N checkpoints (default 1: only the newest)",
        1,
        **_NUMBER_KWARGS,
    )
    record_every: int = _optional_number(
        DURING_GROUP, "record a video of an episode every N iterations (default: never)"
    )
    logger: tuple[str, ...] = _resumable_option(
        DURING_GROUP,
        "also log the run to mlflow or wandb, set up by their environment variables, or to your "
        "own logger, a class or function without arguments; repeatable",
        (),
        action="append",
        type=_parse_logger,
        metavar="{mlflow,wandb,MODULE:NAME}",
    )
    export: bool = _resumable_option(
        AFTER_GROUP, "write SavedModel and ONNX, and verify them", False
    )
    play: int = _optional_number(
        AFTER_GROUP, "play N episodes with the exported ONNX file in a separate process"
    )
    allow_other_spaces: bool = _resumable_option(
        RUN_GROUP, "resume even if the environment's dtypes or action bounds have changed", False
    )

    @property
    def algo_name(self) -> str:
        """The algorithm's name without its module."""
        return self.algo.rpartition(":")[2]

    @property
    def _algorithm_name(self) -> str:
        """The name of the algorithm in the table of tuned settings.

        A user's class with the name of a built-in algorithm does not get that algorithm's settings.
        """
        shadows_builtin = is_custom_algorithm(self.algo) and self.algo_name in get_algorithm_names()
        return self.algo if shadows_builtin else self.algo_name

    @property
    def title(self) -> str:
        """Algorithm and environment, for display.

        >>> TrainSettings(env="CartPole-v1", algo="mine.learning:Best").title
        'Best on CartPole-v1'
        >>> TrainSettings(algo="BC", data=("logs/a.parquet", "logs/b.parquet")).title
        'BC on a.parquet and 1 more'
        """
        parts = [self.env] if self.env is not None else []
        if self.data:
            more = f" and {len(self.data) - 1} more" if len(self.data) > 1 else ""
            parts.append(f"{Path(self.data[0]).name}{more}")
        return f"{self.algo_name} on {' from '.join(parts)}"

    @property
    def run_name(self) -> str:
        """The name of the run's folder, without date."""
        source = self.env or Path(self.data[0]).stem
        return f"{self.algo_name.lower()}-{source}"

    @property
    def goals(self) -> TrainingOptions:
        """The stopping criteria and checkpoint intervals."""
        from tfpolicies.algorithms.run_logger import TrainingOptions

        return TrainingOptions(
            **{
                goal_field.name: getattr(self, goal_field.name)
                for goal_field in fields(TrainingOptions)
            }
        )

    def as_json(self) -> dict[str, Any]:
        from tfpolicies.storage.json_values import encode_value

        from_file = encode_value(dict(self.from_file))
        lists = {name: list(getattr(self, name)) for name in ("set", "data", "logger")}
        return {**dataclasses.asdict(self), **lists, "from_file": from_file}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> TrainSettings:
        """Restores the settings from the result of `as_json`.

        Args:
            content: the settings.
            where: the run, for the message.
        """
        from tfpolicies.storage.json_values import decode_value, find_unresolved
        from tfpolicies.storage.migrations import migrate_assignment, migrate_settings

        try:
            if not (isinstance(content["algo"], str) and _is_algorithm_name(content["algo"])):
                raise KeyError(f"algo {content['algo']!r:.60}")
            from_file = decode_value(migrate_settings(content.get("from_file", {})))
            if not isinstance(from_file, dict) or find_unresolved(from_file):
                raise TypeError(f"from_file {from_file!r:.60}")
            for name in IMPORT_OPTIONS:
                if not isinstance(content.get(name), str | None):
                    raise TypeError(f"{name} {content[name]!r:.60}")
            return cls(
                **{
                    **content,
                    "set": tuple(map(migrate_assignment, content["set"])),
                    "data": tuple(map(str, content.get("data", ()))),
                    "logger": tuple(map(str, content.get("logger", ()))),
                    "from_file": from_file,
                }
            )
        except (TypeError, KeyError) as error:
            raise CheckpointError(
                f"The settings in {where!r} are not those of `tfpolicies train` ({error}). "
                "Start a new run."
            ) from error

    def make_config(self) -> AlgorithmConfig:
        """Returns the config of the run: tuned settings, overridden by the user's.

        Raises:
            ConfigError: for an unknown or invalid setting.
        """
        config: AlgorithmConfig = get_algorithm_class(self.algo).get_default_config()
        if self.env is not None:
            config.environment(self.env)
        if "replay_buffer_config" not in config:  # an update follows each step of all environments
            config.rollouts(num_envs_per_worker=_DEFAULT_NUM_ENVS)
        config.evaluation(
            evaluation_duration=self.eval_episodes, evaluation_config={"explore": False}
        )
        if not self.no_tuned:
            config.update_from_dict(self._get_start_settings())
        if self.data:
            config.rollouts(num_envs_per_worker=1)  # ENV is only asked for its spaces
            config.offline_data(**self.data_settings)
        _apply_file(config, self.from_file)
        option_values = {
            word.setting: getattr(self, name) for name, word in OPTIONS.items() if word.setting
        }
        if self.eval_every is None:
            del option_values["evaluation_duration"]  # keeps the value of the file
        config.update_from_dict({name: x for name, x in option_values.items() if x is not None})
        apply_settings(config, self.set)
        config.update_from_dict(self.import_objects())
        default_size = _DATA_SETTINGS.get(self.algo, {}).get("sgd_minibatch_size")
        if (
            self.data
            and default_size is not None
            and config.get("sgd_minibatch_size") == default_size
        ):
            size = min(config.sgd_minibatch_size, config.train_batch_size)
            config.update_from_dict({"sgd_minibatch_size": size})
        return config

    @property
    def data_settings(self) -> dict[str, Any]:
        """The settings of a config that name the recorded experience."""
        input_config: dict[str, Any] = {"trusted": self.trusted_data}
        if self.columns is not None:
            input_config["columns"] = dict(self.columns)
        return {"input_": [*self.data], "input_config": input_config}

    def _get_start_settings(self) -> dict[str, Any]:
        if self.data and find_tuned(self._algorithm_name, self.env or "") is None:
            return dict(_DATA_SETTINGS.get(self.algo, {}))
        return get_tuned_settings(self._algorithm_name, self.env or "")

    def describe_tuned(self) -> str:
        """Returns a line about the settings that the run starts with."""
        entry = find_tuned(self._algorithm_name, self.env or "")
        defaults = (
            "the algorithm's defaults" if is_custom_algorithm(self.algo) else "RLlib's defaults"
        )
        count = len(self.from_file)
        file = f"{count} setting{'s' * (count > 1)} of --config, the rest: " if count else ""
        if self.no_tuned:
            return f"Settings: {file}{defaults}."
        if entry is None and self.algo in _DATA_SETTINGS and self.data:
            texts = [f"{name}={value:g}" for name, value in _DATA_SETTINGS[self.algo].items()]
            return (
                f"Settings: {file}{defaults}, except {', '.join(texts)}. Use --no-tuned to start "
                f"with {defaults}."
            )
        if entry is None and self.env is None:
            return f"Settings: {file}{defaults}."
        if entry is None:
            nearest = suggest_tuned(self._algorithm_name, self.env or "")
            hint = f" (nearest: {nearest})" if nearest else ""
            return f"Settings: {file}{defaults}; none are tuned for {self.title}{hint}."
        return (
            f"Settings: {file}tuned for {self.title} by {entry.source}, for {entry.steps:,} steps; "
            f"this run has {self.steps:,}. Use --no-tuned to start with {defaults}."
        )

    def import_objects(self) -> dict[str, Any]:
        """Imports the objects that the settings name; returns them by the config's setting names.

        Raises:
            UsageError: if one of them cannot be imported.
        """
        paths = {name: getattr(self, name) for name in IMPORT_OPTIONS}
        objects = {
            name: import_option(name, path) for name, path in paths.items() if path is not None
        }
        if "model" in objects:
            objects["model"] = {"custom_model": objects["model"]}
        if "policy_mapping" in objects:
            objects["policy_mapping_fn"] = objects.pop("policy_mapping")
        return objects


OPTIONS: dict[str, Option] = {
    each.name: each.metadata["word"] for each in fields(TrainSettings) if each.metadata
}
IMPORT_OPTIONS = tuple(name for name, word in OPTIONS.items() if word.group == CODE_GROUP)
"""Options that name code to import."""


def get_flag(name: str) -> str:
    """Returns the command-line spelling of an option.

    >>> get_flag("num_envs"), get_flag("env")
    ('--num-envs', 'ENV')
    """
    return "ENV" if name == "env" else f"--{name.replace('_', '-')}"


_FLAGS_BY_SETTING = {
    **{name: f"--{name}" for name in ("algo", "env", "callbacks", "model", "web")},
    "policy_mapping_fn": "--policy-mapping",
    "policies": "--policy-class",
}
"""Options by setting, for settings that `--set` does not set."""


def has_option(setting: str) -> bool:
    """Whether an option other than `--set` gives a setting."""
    return setting in _FLAGS_BY_SETTING


def to_arguments(settings: Mapping[str, str]) -> str:
    """Returns settings as command-line arguments.

    >>> to_arguments({"env": "my:Env", "policy_mapping_fn": "my:mapping"})
    '--env my:Env --policy-mapping my:mapping'
    >>> to_arguments({"web": "True", "model.fcnet_hiddens": "[8, 8]"})
    "--web --set 'model.fcnet_hiddens=[8, 8]'"
    >>> to_arguments({"policies": "my:Fixed,my:Random"})
    '--policy-class my:Fixed --policy-class my:Random'
    """
    arguments: list[str] = []
    for name, value in settings.items():
        if not has_option(name):
            arguments += ["--set", f"{name}={value}"]
        elif name == "policies":
            arguments += [word for x in value.split(",") for word in (_FLAGS_BY_SETTING[name], x)]
        else:
            arguments += [_FLAGS_BY_SETTING[name], *([] if value == "True" else [value])]
    return shlex.join(arguments)


def import_option(name: str, path: str) -> Any:
    """Imports the object that an option names, which the user chose and not a file.

    Args:
        name: of the option, for messages.
        path: `"package.module:name"`; modules are found as Python finds them.
    """
    module, _, attribute = path.partition(":")
    try:
        imported_object = getattr(importlib.import_module(module), attribute) if attribute else None
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{get_flag(name)}: {path!r} could not be imported: {error}.") from error
    if not callable(imported_object):
        raise UsageError(
            f"{get_flag(name)} takes module:name of a class or function, such as my_module:Mine, "
            f"got {path!r}."
        )
    return imported_object


def _apply_file(config: AlgorithmConfig, settings: Mapping[str, Any]) -> None:
    try:
        config.update_from_dict(dict(settings))
    except UnknownSettingError as error:
        raise ConfigError(f"--config: {error}") from error


def require_no_duplicate_settings(arguments: Mapping[str, Any]) -> None:
    """Checks that no setting is given both by its option and by `--set`.

    Args:
        arguments: the arguments of the command, by name.

    >>> require_no_duplicate_settings({"lr": 1e-4, "set": ["gamma=0.9"]})
    >>> require_no_duplicate_settings({"lr": 1e-4, "set": ["lr=1e-3"]})
    Traceback (most recent call last):
    ...
    tfpolicies.errors.UsageError: --lr and --set lr=1e-3 both set lr. Leave one of them out.
    """
    settings = {"env": "env", **{name: option.setting for name, option in OPTIONS.items()}}
    for text in arguments.get("set", ()):
        name = text.partition("=")[0].strip()
        for option, setting in settings.items():
            if option in arguments and ALIASES.get(name, name) == setting:
                raise UsageError(
                    f"{get_flag(option)} and --set {text} both set {setting}. Leave one of them "
                    "out."
                )


def apply_settings(config: AlgorithmConfig, assignments: Sequence[str]) -> None:
    """Changes a config by `"name=value"` texts.

    A value is a Python literal, `inf`, or otherwise a string. `model.fcnet_hiddens=[64,64]`
    changes one key of a dict.

    >>> from tfpolicies import PPOConfig
    >>> config = PPOConfig()
    >>> apply_settings(config, ["clip_param=0.1", "model.fcnet_hiddens=[32]", "inference=tf"])
    >>> config.clip_param, config.model["fcnet_hiddens"], config.inference
    (0.1, [32], 'tf')
    """
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set takes name=value, such as --set gamma=0.98, got {text!r}.")
        head, _, key = name.strip().partition(".")
        parsed = parse_space(head, value) if head in _SPACES else parse_value(value)
        try:
            config.update_from_dict({head: {key: parsed} if key else parsed})
        except UnknownSettingError as error:
            raise ConfigError(_describe_unknown_setting(config, head, error)) from error


def _describe_unknown_setting(
    config: AlgorithmConfig, name: str, error: UnknownSettingError
) -> str:
    from tfpolicies.models.defaults import MODEL_DEFAULTS

    model_settings = [f"model.{key}" for key in MODEL_DEFAULTS]
    if suggest_similar_names(name, MODEL_DEFAULTS):
        return (
            "--set: there is no setting "
            f"{name!r}.{suggest_similar_names(f'model.{name}', model_settings)}"
        )
    if suggest_similar_names(name, [*config.keys()]):
        return f"--set: {error}"
    return (
        f"--set: {error} For a setting of the environment, use env_config.{name}=... . Settings "
        f"are {', '.join(sorted(config.keys()))}."
    )


def parse_value(text: str) -> Any:
    """Parses a value on the command line, in Python or JSON syntax; anything else is a string.

    >>> parse_value("[64, 64]"), parse_value("inf"), parse_value("true"), parse_value("adam")
    ([64, 64], inf, True, 'adam')
    >>> parse_value("{'use_lstm': True}"), parse_value('{"use_lstm": true}')
    ({'use_lstm': True}, {'use_lstm': True})
    """
    text = text.strip()
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    for parse in (ast.literal_eval, json.loads, float):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            continue
    return text
