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
from typing import TYPE_CHECKING, Any, NamedTuple

from tfpolicies.algorithms.registry import algorithm_names, find_algorithm
from tfpolicies.algorithms.tuned import find_tuned, nearest_tuned, tuned_settings
from tfpolicies.cli.values import count, not_among, positive
from tfpolicies.config.dialect import ALIASES
from tfpolicies.errors import (
    CheckpointError,
    ConfigError,
    UnknownSettingError,
    UsageError,
    near_matches,
)
from tfpolicies.type_aliases import Setting

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm import Algorithm
    from tfpolicies.algorithms.run_records import Goals
    from tfpolicies.config.algorithm_config import AlgorithmConfig

_ENVS = 8  # num_envs_per_worker, unless the command or tuned settings set it
_TRUTHS = {"true": True, "false": False, "none": None}  # accepted in any case

WHAT = "algorithm and environment"
CODE = "your own code, imported as `python -m` finds it"
END, WAY, AFTER, RUN = "stopping", "during training", "after training", "the run folder"


_N: dict[str, Any] = {"type": positive, "metavar": "N"}


class Word(NamedTuple):
    """A setting of a run as a command-line option."""

    group: str  # the group in `--help`
    help: str
    how: Mapping[str, Any]  # further keyword arguments of argparse
    setting: str | None  # the config's name for it
    goal: bool  # whether it may change when a run is resumed

    def argument(self) -> dict[str, Any]:
        """Returns the keyword arguments for argparse; calls a metavar that is a function."""
        metavar = self.how.get("metavar")
        return {**self.how, "metavar": metavar()} if callable(metavar) else dict(self.how)


def _word(
    group: str,
    help: str,
    default: Setting = None,
    *,
    setting: str | None = None,
    goal: bool = False,
    **how: object,
) -> Any:
    """Returns a dataclass field for a setting that is also a command-line option; see `Word`."""
    if default is False:
        how["action"] = "store_true"
    return field(default=default, metadata={"word": Word(group, help, how, setting, goal)})


_goal = functools.partial(_word, goal=True)
_optional_number = functools.partial(_goal, default=0, type=count, metavar="N")


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        from tfpolicies.config.idioms import rate_hint

        raise argparse.ArgumentTypeError(
            f"must be a number{rate_hint(text)}, got {text!r:.200}"
        ) from None


def is_own(algo: str) -> bool:
    """Whether this names a class of the user."""
    return ":" in algo


def algorithm_word(text: str) -> str:
    """Parses the argument of `--algo`: the name of an algorithm, or `module:Class`.

    >>> algorithm_word("sac")
    'SAC'
    """
    names = {name.lower(): name for name in algorithm_names()}
    name = text if text in names.values() else names.get(text.lower(), text)
    if _is_algorithm(name):
        return name
    raise argparse.ArgumentTypeError(
        f"{not_among(text, algorithm_names())} Or name your own class, as module:Class"
    )


def _is_algorithm(text: str) -> bool:
    return is_own(text) or text in algorithm_names()


def _algorithm_words() -> str:
    return f"{{{','.join(algorithm_names())},MODULE:CLASS}}"


def algorithm_of(algo: str) -> type[Algorithm]:
    """Returns the class of an algorithm.

    Args:
        algo: its name, or `"module:Class"`, given by the user and not by a file.

    Raises:
        ConfigError: for an unknown name.
        UsageError: if the class cannot be imported, or is not an algorithm.
    """
    if not is_own(algo):
        return find_algorithm(algo)
    from tfpolicies.algorithms.algorithm import Algorithm

    found = imported("algo", algo)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise UsageError(f"--algo: {algo!r} must be a subclass of Algorithm, got {found!r}.")
    return found


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The settings of one training run, as `run.json` stores them; None is not set.

    Attributes:
        env: a registered name or `"module:Class"`.
        from_file: settings of a file; all others override them.
    """

    env: str
    algo: str = _word(
        WHAT,
        "algorithm (default PPO), or your own class",
        "PPO",
        type=algorithm_word,
        metavar=_algorithm_words,
    )
    seed: int = _word(
        WHAT, "seed of everything (default: random, and recorded)", 0, setting="seed", type=count
    )
    num_envs: int | None = _word(
        WHAT, "environments stepped together", setting="num_envs_per_worker", type=positive
    )
    lr: float | None = _word(WHAT, "learning rate", setting="lr", type=_rate)
    set: tuple[str, ...] = _word(
        WHAT,
        "any other setting, such as clip_param=0.1 or model.fcnet_hiddens=[64,64]; repeatable",
        (),
        action="append",
        metavar="NAME=VALUE",
    )
    from_file: Mapping[str, Any] = field(default_factory=dict)
    no_tuned: bool = _word(
        WHAT,
        "start with the algorithm's defaults (RLlib's), not with settings tuned for ENV "
        "(tfpolicies tuned)",
        False,
    )
    callbacks: str | None = _word(CODE, "a subclass of DefaultCallbacks", metavar="MODULE:CLASS")
    model: str | None = _word(
        CODE, "f(observation_space, num_outputs) -> keras.Model", metavar="MODULE:FACTORY"
    )
    policy_mapping: str | None = _word(
        CODE,
        "f(agent_id, episode, worker, **kwargs) -> the id of the policy that acts; list the "
        'policies in --config: {"policies": ["left", "right"]}',
        metavar="MODULE:FUNCTION",
    )
    steps: int = _goal(
        END,
        "stop after the iteration that reaches this number of environment steps (default 100,000, "
        "with --until 1,000,000)",
        100_000,
        type=positive,
    )
    until: float | None = _goal(
        END,
        "stop when the mean return of recent training episodes reaches this; recent: of the last "
        "10,000 steps or of the iteration, at least 5",
        type=float,
        metavar="RETURN",
    )
    eval_every: int | None = _word(
        WAY,
        "play greedy episodes every N iterations (default: never)",
        setting="evaluation_interval",
        **_N,
    )
    eval_episodes: int = _word(
        WAY, "episodes per evaluation (default 10)", 10, setting="evaluation_duration", **_N
    )
    keep_best: bool = _goal(
        WAY,
        "also keep a checkpoint of the weights with the best evaluation (or of those that sampled "
        "the iteration with the best mean of recent returns)",
        False,
    )
    checkpoint_every: int = _goal(WAY, "iterations between checkpoints (default 20)", 20, **_N)
    keep_checkpoints: int = _goal(
        WAY, "keep the newest N checkpoints (default 1: only the newest)", 1, **_N
    )
    record_every: int = _optional_number(
        WAY, "record a video of an episode every N iterations (default: never)"
    )
    export: bool = _goal(AFTER, "write SavedModel and ONNX, and verify them", False)
    play: int = _optional_number(
        AFTER, "play N episodes with the exported ONNX file in a separate process"
    )
    allow_other_spaces: bool = _goal(
        RUN, "resume even if the environment's dtypes or action bounds have changed", False
    )

    @property
    def algo_name(self) -> str:
        """The algorithm's name without its module."""
        return self.algo.rpartition(":")[2]

    @property
    def _tuned_as(self) -> str:
        """The name of the algorithm in the table of tuned settings.

        A user's class with the name of a built-in algorithm does not get that algorithm's settings.
        """
        is_another = is_own(self.algo) and self.algo_name in algorithm_names()
        return self.algo if is_another else self.algo_name

    @property
    def title(self) -> str:
        """Algorithm and environment, for display.

        >>> TrainSettings(env="CartPole-v1", algo="mine.learning:Best").title
        'Best on CartPole-v1'
        """
        return f"{self.algo_name} on {self.env}"

    @property
    def goals(self) -> Goals:
        """The stopping criteria and checkpoint intervals."""
        from tfpolicies.algorithms.run_records import Goals

        return Goals(**{each.name: getattr(self, each.name) for each in fields(Goals)})

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as JSON values."""
        from tfpolicies.storage.json_values import encode_value

        from_file = encode_value(dict(self.from_file))
        return {**dataclasses.asdict(self), "set": list(self.set), "from_file": from_file}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> TrainSettings:
        """Restores the settings from the result of `as_json`.

        Args:
            content: the settings.
            where: the run, for the message.

        Raises:
            CheckpointError: if these are not settings of a training run.
        """
        from tfpolicies.storage.json_values import decode_value, find_missing

        try:
            if not (isinstance(content["algo"], str) and _is_algorithm(content["algo"])):
                raise KeyError(f"algo {content['algo']!r:.60}")
            from_file = decode_value(content.get("from_file", {}))
            if not isinstance(from_file, dict) or find_missing(from_file):
                raise TypeError(f"from_file {from_file!r:.60}")
            for name in IMPORTED:
                if not isinstance(content.get(name), str | None):
                    raise TypeError(f"{name} {content[name]!r:.60}")
            return cls(**{**content, "set": tuple(content["set"]), "from_file": from_file})
        except (TypeError, KeyError) as error:
            raise CheckpointError(
                f"The settings in {where!r} are not those of `tfpolicies train` ({error}). "
                "Start a new run."
            ) from error

    def config(self) -> AlgorithmConfig:
        """Returns the config of the run: tuned settings, overridden by the user's.

        Raises:
            ConfigError: for an unknown or invalid setting.
        """
        config: AlgorithmConfig = algorithm_of(self.algo).get_default_config()
        config.environment(self.env)
        if "replay_buffer_config" not in config:  # an update follows each step of all environments
            config.rollouts(num_envs_per_worker=_ENVS)
        config.evaluation(
            evaluation_duration=self.eval_episodes, evaluation_config={"explore": False}
        )
        if not self.no_tuned:
            config.update_from_dict(tuned_settings(self._tuned_as, self.env))
        _apply_file(config, self.from_file)
        own = {word.setting: getattr(self, name) for name, word in WORDS.items() if word.setting}
        if self.eval_every is None:
            del own["evaluation_duration"]  # keeps the value of the file
        config.update_from_dict({name: x for name, x in own.items() if x is not None})
        apply_settings(config, self.set)
        config.update_from_dict(self.imported())
        return config

    def told_tuned(self) -> str:
        """Returns a line about the settings that the run starts with."""
        entry = find_tuned(self._tuned_as, self.env)
        usual = "the algorithm's defaults" if is_own(self.algo) else "RLlib's defaults"
        if self.no_tuned:
            return f"Settings: {usual}."
        if entry is None:
            near = nearest_tuned(self._tuned_as, self.env)
            told = f"nearest: {near}" if near else "none are near"
            return f"Settings: {usual}; none are tuned for {self.title} ({told})."
        return (
            f"Settings: tuned for {self.title} by {entry.source}, for {entry.steps:,} steps; this "
            f"run has {self.steps:,}. Use --no-tuned to start with {usual}."
        )

    def imported(self) -> dict[str, Any]:
        """Imports the objects that the settings name; returns them by the config's setting names.

        Raises:
            UsageError: if one of them cannot be imported.
        """
        paths = {name: getattr(self, name) for name in IMPORTED}
        objects = {name: imported(name, path) for name, path in paths.items() if path is not None}
        if "model" in objects:
            objects["model"] = {"custom_model": objects["model"]}
        if "policy_mapping" in objects:
            objects["policy_mapping_fn"] = objects.pop("policy_mapping")
        return objects


WORDS: dict[str, Word] = {
    each.name: each.metadata["word"] for each in fields(TrainSettings) if each.metadata
}
IMPORTED = tuple(name for name, word in WORDS.items() if word.group == CODE)
"""Options that name code to import."""


def flag(name: str) -> str:
    """Returns the command-line spelling of an option.

    >>> flag("num_envs"), flag("env")
    ('--num-envs', 'ENV')
    """
    return "ENV" if name == "env" else f"--{name.replace('_', '-')}"


_OPTIONS = {
    **{name: f"--{name}" for name in ("algo", "env", "callbacks", "model", "web")},
    "policy_mapping_fn": "--policy-mapping",
}
"""Options by setting, for settings that `--set` does not set."""


def in_words(settings: Mapping[str, str]) -> str:
    """Returns settings as command-line arguments.

    >>> in_words({"env": "my:Env", "policy_mapping_fn": "my:mapping"})
    '--env my:Env --policy-mapping my:mapping'
    >>> in_words({"web": "True", "model.fcnet_hiddens": "[8, 8]"})
    "--web --set 'model.fcnet_hiddens=[8, 8]'"
    """
    words: list[str] = []
    for name, value in settings.items():
        if name not in _OPTIONS:
            words += ["--set", f"{name}={value}"]
        else:
            words += [_OPTIONS[name], *([] if value == "True" else [value])]
    return shlex.join(words)


def imported(name: str, path: str) -> Any:
    """Imports the object that an option names, which the user chose and not a file.

    Args:
        name: of the option, for messages.
        path: `"package.module:name"`; modules are found as Python finds them.

    Raises:
        UsageError: if it cannot be imported, or is not callable.
    """
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute) if attribute else None
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{flag(name)}: {path!r} could not be imported: {error}.") from error
    if not callable(found):
        raise UsageError(
            f"{flag(name)} takes module:name of a class or function, such as my_module:Mine, got "
            f"{path!r}."
        )
    return found


def _apply_file(config: AlgorithmConfig, settings: Mapping[str, Any]) -> None:
    try:
        config.update_from_dict(dict(settings))
    except UnknownSettingError as error:
        raise ConfigError(f"--config: {error}") from error


def require_one_value_each(given: Mapping[str, Any]) -> None:
    """Checks that no setting is given both by its option and by `--set`.

    Args:
        arguments: the arguments of the command, by name.

    Raises:
        UsageError: naming the setting and both options.

    >>> require_one_value_each({"lr": 1e-4, "set": ["gamma=0.9"]})
    >>> require_one_value_each({"lr": 1e-4, "set": ["lr=1e-3"]})
    Traceback (most recent call last):
    ...
    tfpolicies.errors.UsageError: --lr and --set lr=1e-3 both set lr. Leave one of them out.
    """
    settings = {"env": "env", **{name: word.setting for name, word in WORDS.items()}}
    for text in given.get("set", ()):
        name = text.partition("=")[0].strip()
        for word, setting in settings.items():
            if word in given and ALIASES.get(name, name) == setting:
                raise UsageError(
                    f"{flag(word)} and --set {text} both set {setting}. Leave one of them out."
                )


def apply_settings(config: AlgorithmConfig, given: Sequence[str]) -> None:
    """Changes a config by `"name=value"` texts.

    A value is a Python literal, `inf`, or otherwise a string. `model.fcnet_hiddens=[64,64]`
    changes one key of a dict.

    Raises:
        ConfigError: for a text without `=`, and for an unknown or invalid setting.

    >>> from tfpolicies import PPOConfig
    >>> config = PPOConfig()
    >>> apply_settings(config, ["clip_param=0.1", "model.fcnet_hiddens=[32]", "inference=tf"])
    >>> config.clip_param, config.model["fcnet_hiddens"], config.inference
    (0.1, [32], 'tf')
    """
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set takes name=value, such as --set gamma=0.98, got {text!r}.")
        head, _, key = name.strip().partition(".")
        parsed = parse_value(value)
        try:
            config.update_from_dict({head: {key: parsed} if key else parsed})
        except UnknownSettingError as error:
            raise ConfigError(_unknown(config, head, error)) from error


def _unknown(config: AlgorithmConfig, name: str, error: UnknownSettingError) -> str:
    from tfpolicies.models.defaults import MODEL_DEFAULTS

    inside = [f"model.{key}" for key in MODEL_DEFAULTS]
    if near_matches(name, MODEL_DEFAULTS):
        return f"--set: there is no setting {name!r}.{near_matches(f'model.{name}', inside)}"
    if near_matches(name, [*config.keys()]):
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
    if text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    for parse in (ast.literal_eval, json.loads, float):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            continue
    return text
