"""What a training command was asked for, as text that a run folder can keep."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfpolicies.config.dialect import ALIASES
from tfpolicies.errors import (
    CheckpointError,
    ConfigError,
    UnknownSettingError,
    UsageError,
    near_matches,
)

if TYPE_CHECKING:
    from tfpolicies.algorithms.run_records import Goals
    from tfpolicies.config.algorithm_config import AlgorithmConfig

ALGORITHMS = ("PPO", "PG", "DQN")
_ENVS = 8  # stepped together where neither the command nor the table of tuned settings says more
IMPORTED = ("callbacks", "model", "policy_mapping")  # settings that say what is imported
_WORDS = {"true": True, "false": False, "none": None}  # as a shell user may write them


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The settings of one training run; `run.json` holds them.

    Attributes:
        env: a registered name or `"module:Class"`.
        algo: one of `ALGORITHMS`.
        seed: of everything.
        num_envs: environments stepped together; None: the tuned number, or 8.
        lr: step size; None: the tuned or the algorithm's own.
        set: further settings as `"name=value"`, the last one wins.
        from_file: settings of a file; all others override them.
        callbacks: `"module:Class"` of the callbacks; None: none.
        model: `"module:factory"` of the model; None: one of the package's.
        policy_mapping: `"module:function"` that says who acts; None: the default.
        steps: environment steps at which training ends.
        until: mean return of the last 100 training episodes at which training ends; None: none.
        eval_every: iterations between evaluations; None: no evaluations.
        eval_episodes: greedy episodes of an evaluation.
        keep_best: whether the best checkpoint is kept apart.
        checkpoint_every: iterations between checkpoints.
        export: whether the trained policy is exported.
        play: episodes played with the exported policy; 0: none.
        allow_other_spaces: whether a resumed run takes an environment that has changed; see
            `Algorithm.from_checkpoint`.
    """

    env: str
    algo: str = "PPO"
    seed: int = 0
    num_envs: int | None = None
    lr: float | None = None
    set: tuple[str, ...] = ()
    from_file: Mapping[str, Any] = field(default_factory=dict)
    callbacks: str | None = None
    model: str | None = None
    policy_mapping: str | None = None
    steps: int = 100_000
    until: float | None = None
    eval_every: int | None = None
    eval_episodes: int = 10
    keep_best: bool = False
    checkpoint_every: int = 20
    export: bool = False
    play: int = 0
    allow_other_spaces: bool = False

    @property
    def title(self) -> str:
        """What is trained, for people.

        >>> TrainSettings(env="CartPole-v1").title
        'PPO on CartPole-v1'
        """
        return f"{self.algo} on {self.env}"

    @property
    def goals(self) -> Goals:
        """What is trained for."""
        from tfpolicies.algorithms.run_records import Goals

        return Goals(
            steps=self.steps,
            until=self.until,
            checkpoint_every=self.checkpoint_every,
            keep_best=self.keep_best,
            title=self.title,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as JSON can hold them."""
        from tfpolicies.storage.json_values import encode_value

        from_file = encode_value(dict(self.from_file))
        return {**dataclasses.asdict(self), "set": list(self.set), "from_file": from_file}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> TrainSettings:
        """Returns what `as_json` gave.

        Args:
            content: the settings.
            where: the run, for the message.

        Raises:
            CheckpointError: if these are no settings of a training run.
        """
        from tfpolicies.storage.json_values import decode_value, find_missing

        try:
            if content["algo"] not in ALGORITHMS:
                raise KeyError(f"algo {content['algo']!r}")
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
        """Returns the config of the run: tuned settings, overridden by what was asked for.

        Raises:
            ConfigError: for an unknown or invalid setting.
        """
        import tfpolicies
        from tfpolicies.algorithms.tuned import tuned_settings

        config: AlgorithmConfig = getattr(tfpolicies, f"{self.algo}Config")()
        config.environment(self.env).rollouts(num_envs_per_worker=_ENVS)
        config.evaluation(
            evaluation_duration=self.eval_episodes, evaluation_config={"explore": False}
        )
        config.update_from_dict(tuned_settings(self.algo, self.env))
        _apply_file(config, self.from_file)
        if self.num_envs is not None:
            config.rollouts(num_envs_per_worker=self.num_envs)
        if self.lr is not None:
            config.training(lr=self.lr)
        config.debugging(seed=self.seed)
        if self.eval_every is not None:
            config.evaluation(
                evaluation_interval=self.eval_every, evaluation_duration=self.eval_episodes
            )
        apply_settings(config, self.set)
        config.update_from_dict(self.imported())
        return config

    def imported(self) -> dict[str, Any]:
        """Returns the objects that the settings name, by the names of the config's settings.

        Raises:
            UsageError: if one of them cannot be imported.
        """
        found = {name: getattr(self, name) for name in IMPORTED}
        made = {name: imported(name, text) for name, text in found.items() if text is not None}
        given = {name: made[name] for name in ("callbacks",) if name in made}
        if "model" in made:
            given["model"] = {"custom_model": made["model"]}
        if "policy_mapping" in made:
            given["policy_mapping_fn"] = made["policy_mapping"]
        return given


def imported(name: str, path: str) -> Any:
    """Returns what an option names, which is the user's own word.

    Args:
        name: of the option, for messages.
        path: `"package.module:name"`; modules are found as Python finds them.

    Raises:
        UsageError: if it cannot be imported, or nothing that can be called is there.
    """
    option = f"--{name.replace('_', '-')}"
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute) if attribute else None
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{option}: {path!r} could not be imported: {error}.") from error
    if not callable(found):
        raise UsageError(
            f"{option} takes module:name of a class or function, such as my_module:Mine, got "
            f"{path!r}."
        )
    return found


def _apply_file(config: AlgorithmConfig, settings: Mapping[str, Any]) -> None:
    try:
        config.update_from_dict(dict(settings))
    except UnknownSettingError as error:
        raise ConfigError(f"--config: {error}") from error


_OPTIONS = {
    "lr": "lr",
    "seed": "seed",
    "num_envs": "num_envs_per_worker",
    "eval_every": "evaluation_interval",
    "eval_episodes": "evaluation_duration",
    "env": "env",
}
"""Words of the command that are settings, too: the word's name, and the setting's."""


def require_one_value_each(given: Mapping[str, Any]) -> None:
    """Checks that no setting is given by a word of its own and by `--set`, too.

    Args:
        given: the words of the command that were given, by name.

    Raises:
        UsageError: naming the setting and both words.

    >>> require_one_value_each({"lr": 1e-4, "set": ["gamma=0.9"]})
    >>> require_one_value_each({"lr": 1e-4, "set": ["lr=1e-3"]})
    Traceback (most recent call last):
    ...
    tfpolicies.errors.UsageError: --lr and --set lr=1e-3 both set lr. Leave one of them out.
    """
    for text in given.get("set", ()):
        name = text.partition("=")[0].strip()
        for word, setting in _OPTIONS.items():
            if word in given and ALIASES.get(name, name) == setting:
                shown = "ENV" if word == "env" else f"--{word.replace('_', '-')}"
                raise UsageError(
                    f"{shown} and --set {text} both set {setting}. Leave one of them out."
                )


def apply_settings(config: AlgorithmConfig, given: Sequence[str]) -> None:
    """Changes a config by `"name=value"` texts.

    A value is a Python literal, `inf`, or else a text. `model.fcnet_hiddens=[64,64]` changes one
    key of a dict.

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
        return f"--set: {name!r} is no setting.{near_matches(f'model.{name}', inside)}"
    if near_matches(name, [*config.keys()]):
        return f"--set: {error}"
    return (
        f"--set: {error} What the environment takes is set by env_config.{name}=... . Settings are "
        f"{', '.join(sorted(config.keys()))}."
    )


def parse_value(text: str) -> Any:
    """Returns the value that a text on the command line stands for.

    It may be written in Python or in JSON; what is neither is a string.

    >>> parse_value("[64, 64]"), parse_value("inf"), parse_value("true"), parse_value("adam")
    ([64, 64], inf, True, 'adam')
    >>> parse_value("{'use_lstm': True}"), parse_value('{"use_lstm": true}')
    ({'use_lstm': True}, {'use_lstm': True})
    """
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for parse in (ast.literal_eval, json.loads, float):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            continue
    return text
