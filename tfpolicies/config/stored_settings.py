"""Allow-list of settings in files that may name objects; all others must be plain values.

`docs/decisions/003-import-paths-in-checkpoints.md` has the reasons, and the same table with the
tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tfpolicies.config.dialect import ALIASES
from tfpolicies.envs.envpool import is_envpool_name
from tfpolicies.envs.making import is_import_path
from tfpolicies.envs.pettingzoo import is_pettingzoo_name
from tfpolicies.envs.registry import ENVIRONMENTS
from tfpolicies.rules import is_one_of
from tfpolicies.storage.import_paths import Missing, class_of_name
from tfpolicies.storage.json_values import decode_value
from tfpolicies.storage.places import Place, Places, admitted
from tfpolicies.type_aliases import Json, Setting

_FORWARDING = re.compile(r"GymV\d+Environment")  # Gymnasium's: creates the env in `env_config`
_MODULE = re.compile(r"[A-Za-z]\w*_v\d+")  # of an environment, in packages like PettingZoo's


def environment_of_file(source: Setting) -> Any:
    """Returns an environment named in a file, or a `Missing` if creating it would import code.

    Names registered here, with Gymnasium, EnvPool or PettingZoo are returned, since the file only
    chooses among existing environments. Import paths ("package.module:Class",
    "package.module.Class" and Gymnasium's "module:EnvId") give a `Missing`.

    Args:
        source: the value in the file; returned unchanged if it is not a str.

    >>> environment_of_file("CartPole-v1"), environment_of_file("pettingzoo:classic/tictactoe_v3")
    ('CartPole-v1', 'pettingzoo:classic/tictactoe_v3')
    >>> environment_of_file("antigravity:CartPole-v1")
    Missing(name='antigravity:CartPole-v1', importable=True)
    """
    if not isinstance(source, str) or ENVIRONMENTS.find(source) is not None:
        return source
    if _FORWARDING.match(source):
        return Missing(source)
    if not is_import_path(source) or is_envpool_name(source) or _is_of_pettingzoo(source):
        return source
    return Missing(source, importable=True)


def _is_of_pettingzoo(name: str) -> bool:
    """Returns whether a name is PettingZoo's; in other packages it must be an env's module."""
    package, _, rest = name.partition(":")
    return is_pettingzoo_name(name) and (
        package == "pettingzoo" or _MODULE.fullmatch(rest) is not None
    )


def _strategy_of_file(kind: Setting) -> Any:
    """Returns an exploration type, or a `Missing` for an import path."""
    if isinstance(kind, str) and ("." in kind or ":" in kind):
        return class_of_name(kind, "exploration")
    return kind


def _part_of_optimizer(value: Setting) -> Any:
    """Returns a setting of an optimizer, or a `Missing` for an object that Keras would create."""
    if isinstance(value, Mapping):
        return Missing(f"{value.get('class_name', 'a dict')}")
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else Missing(f"{value!r:.80} for an optimizer")


def _type_of_optimizer(value: Setting) -> Any:
    """Returns the name of a built-in or registered Keras optimizer, else a `Missing`."""
    from tfpolicies.models.keras_names import is_optimizer  # needs Keras, unlike this module

    return value if is_optimizer(value) else Missing(f"{value}")


def _rate(value: Setting) -> Any:
    """Returns a learning rate, or a `Missing` for a dict that is not a built-in Keras schedule."""
    if not isinstance(value, Mapping):
        return value
    from tfpolicies.models.learning_rates import SCHEDULES  # needs Keras, unlike this module

    kind = value.get("type")
    return value if is_one_of(kind, *SCHEDULES) else Missing(f"{kind}")


def _variables(value: Mapping[str, str]) -> Any:
    """Returns a `Missing` for environment variables, which can change what processes load."""
    return Missing(f"the variables {', '.join(map(str, value))}") if value else value


def _numbers(value: Setting) -> Any:
    """Returns settings of TensorFlow sessions, or a `Missing` for strings, such as addresses."""
    if isinstance(value, Mapping):
        return {name: _numbers(each) for name, each in value.items()}
    plain = isinstance(value, bool | None) or (
        isinstance(value, int | float) and abs(value) <= _MOST
    )
    return value if plain else Missing(f"{value!r:.80} for TensorFlow sessions")


_MOST = 1024  # threads, for example


def _at_most(limit: int) -> Callable[[Any], Any]:
    """Returns a function that converts numbers above a limit to `Missing`."""

    def checked(value: Setting) -> Any:
        if isinstance(value, int | float) and value > limit:
            return Missing(f"{value}, more than the {limit} that a file may choose")
        return value

    return checked


_LARGEST = {
    "num_envs_per_worker": 1 << 14,
    "env_processes": 1 << 8,
    "num_rollout_workers": 1 << 10,
    "evaluation_num_workers": 1 << 10,
    "train_batch_size": 1 << 27,
    "rollout_fragment_length": 1 << 27,
    "sgd_minibatch_size": 1 << 27,
    "metrics_num_episodes_for_smoothing": 1 << 27,
}
"""The largest numbers accepted from a file, for settings that cost memory."""


def _numbers_of(largest: Mapping[str, int]) -> dict[str, Place]:
    """Returns the places of limited numbers, under all of their names."""
    named = {**largest, **{x: largest[name] for x, name in ALIASES.items() if name in largest}}
    return {name: Place("number", plain=_at_most(limit)) for name, limit in named.items()}


POLICY_CLASS = Place("policy_class")

_STRATEGY: dict[str, Places] = {"type": Place("exploration", plain=_strategy_of_file)}
_STRATEGY["*"] = _STRATEGY  # nested strategies


_ROSTER = ("policy_mapping_fn", "policies_to_train")
_FUNCTIONS = (
    *_ROSTER,
    "observation_filter",
    "observation_fn",
    "env_task_fn",
    "custom_eval_function",
    "before_learn_on_batch",
)


def _settings(env: Place, **more: Place) -> dict[str, Places]:
    found: dict[str, Places] = {
        "env": env,
        "callbacks": Place("callbacks"),
        "lr": Place("lr", functions=True, plain=_rate),
        "model": {
            "custom_model": Place("custom_model", functions=True),
            "custom_action_dist": Place("custom_action_dist"),
            **_numbers_of({"max_seq_len": 1 << 16}),
        },
        "q_model_config": {"custom_model": Place("custom_model", functions=True)},
        "exploration_config": _STRATEGY,
        "tf_session_args": Place("sessions", plain=_numbers),
        "local_tf_session_args": Place("sessions", plain=_numbers),
        "optimizer": {
            "type": Place("optimizer", plain=_type_of_optimizer),
            "*": Place("optimizer", plain=_part_of_optimizer),
        },
        **{name: Place(name, functions=True) for name in _FUNCTIONS},
        "replay_buffer_config": _numbers_of({"capacity": 1 << 30}),
        **_numbers_of(_LARGEST),
        **more,
    }
    found["evaluation_config"] = found
    found["multiagent"] = found  # of old dict configs
    return found


POLICY_SETTINGS = _settings(Place("env", functions=True))
"""Settings of one policy. It creates no environment, so any environment name is accepted."""

ALGORITHM_SETTINGS = _settings(
    Place("env", functions=True, plain=environment_of_file),
    extra_python_environs_for_worker=Place("environment variables", plain=_variables),
)
"""Settings of an algorithm, which creates environments and starts workers."""

for _found in (POLICY_SETTINGS, ALGORITHM_SETTINGS):
    _found["policies"] = {"*": {0: POLICY_CLASS, 3: POLICY_SETTINGS}}

ROSTER = {name: POLICY_SETTINGS[name] for name in _ROSTER}
"""Places of the mapping function and the trained policies."""


def decode_settings(
    record: Json, places: Places = POLICY_SETTINGS, *, known: Mapping[str, Any] | None = None
) -> Any:
    """Decodes settings of `encode_value`, with a `Missing` for each object that is not allowed.

    These are the objects that `admitted` rejects, and strings or dicts that would create, import or
    open something: exploration strategies and environments by path, parts of an optimizer,
    environment variables, and non-numeric settings of TensorFlow sessions.

    Args:
        record: JSON values.
        places: where settings may name objects.
        objects: names in the record -> objects that the caller provides for them.

    Raises:
        CheckpointError: if they are malformed.

    >>> decode_settings({"lr": 0.1, "exploration_config": {"type": "antigravity.Strategy"}})
    {'lr': 0.1, 'exploration_config': {'type': Missing(name='antigravity.Strategy', \
importable=True)}}
    """
    return admitted(decode_value(record), places, known=known)
