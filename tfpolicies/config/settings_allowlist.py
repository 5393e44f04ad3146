"""Allow-list of settings in files that may name objects; all others must be plain values.

`docs/decisions/003-import-paths-in-checkpoints.md` has the reasons, and the same table with the
tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tfpolicies.base.type_aliases import Json, Setting
from tfpolicies.base.validators import is_one_of
from tfpolicies.config.rllib_settings import ALIASES
from tfpolicies.envs.env_factory import is_import_path
from tfpolicies.envs.env_registry import ENVIRONMENTS
from tfpolicies.envs.envpool import is_envpool_name
from tfpolicies.envs.pettingzoo import is_pettingzoo_name
from tfpolicies.offline.input_registry import is_class_path
from tfpolicies.storage.allowed_objects import AllowedObject, AllowedObjects, resolve_allowed
from tfpolicies.storage.import_paths import UnresolvedObject, check_class_name
from tfpolicies.storage.json_values import decode_value
from tfpolicies.storage.migrations import migrate_settings

_FORWARDING_ENV = re.compile(r"GymV\d+Environment")  # Gymnasium's: creates the env in `env_config`
_ENV_MODULE = re.compile(r"[A-Za-z]\w*_v\d+")  # of an environment, in packages like PettingZoo's


def check_environment_name(source: Setting) -> Any:
    """Returns an environment of a file, or an `UnresolvedObject` if creating it imports code.

    Names registered here, with Gymnasium, EnvPool or PettingZoo are returned, since the file only
    chooses among existing environments. Import paths ("package.module:Class",
    "package.module.Class" and Gymnasium's "module:EnvId") give a `UnresolvedObject`.

    Args:
        source: the value in the file; returned unchanged if it is not a str.

    >>> check_environment_name("CartPole-v1")
    'CartPole-v1'
    >>> check_environment_name("antigravity:CartPole-v1")
    UnresolvedObject(name='antigravity:CartPole-v1', importable=True)
    """
    if not isinstance(source, str) or ENVIRONMENTS.find(source) is not None:
        return source
    if _FORWARDING_ENV.match(source):
        return UnresolvedObject(source)
    if not is_import_path(source) or is_envpool_name(source) or _is_pettingzoo_module(source):
        return source
    return UnresolvedObject(source, importable=True)


def _is_pettingzoo_module(name: str) -> bool:
    """Returns whether a name is PettingZoo's; in other packages it must be an env's module."""
    package, _, module = name.partition(":")
    return is_pettingzoo_name(name) and (
        package == "pettingzoo" or _ENV_MODULE.fullmatch(module) is not None
    )


def _check_exploration_type(exploration_type: Setting) -> Any:
    """Returns an exploration type, or a `UnresolvedObject` for an import path."""
    if isinstance(exploration_type, str) and ("." in exploration_type or ":" in exploration_type):
        return check_class_name(exploration_type, "exploration")
    return exploration_type


def _check_optimizer_setting(value: Setting) -> Any:
    """Returns an optimizer's setting, or an `UnresolvedObject` if Keras would create an object."""
    if isinstance(value, Mapping):
        return UnresolvedObject(f"{value.get('class_name', 'a dict')}")
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else UnresolvedObject(f"{value!r:.80} for an optimizer")


def _check_optimizer_type(value: Setting) -> Any:
    """Returns the name of a built-in or registered Keras optimizer, else a `UnresolvedObject`."""
    from tfpolicies.models.keras_allowlist import is_optimizer  # needs Keras, unlike this module

    return value if is_optimizer(value) else UnresolvedObject(f"{value}")


def _check_learning_rate(value: Setting) -> Any:
    """Returns a learning rate, or an `UnresolvedObject` unless it is a built-in Keras schedule."""
    if not isinstance(value, Mapping):
        return value
    from tfpolicies.models.learning_rates import SCHEDULES  # needs Keras, unlike this module

    schedule_type = value.get("type")
    return value if is_one_of(schedule_type, *SCHEDULES) else UnresolvedObject(f"{schedule_type}")


def _check_environment_variables(value: Mapping[str, str]) -> Any:
    """Returns an `UnresolvedObject` for environment variables, which can change imports."""
    return UnresolvedObject(f"the variables {', '.join(map(str, value))}") if value else value


def _check_session_settings(value: Setting) -> Any:
    """Returns settings of TensorFlow sessions, or an `UnresolvedObject` for strings."""
    if isinstance(value, Mapping):
        return {name: _check_session_settings(part) for name, part in value.items()}
    plain = isinstance(value, bool | None) or (
        isinstance(value, int | float) and abs(value) <= _MAX_SESSION_NUMBER
    )
    return value if plain else UnresolvedObject(f"{value!r:.80} for TensorFlow sessions")


_MAX_SESSION_NUMBER = 1024  # threads, for example


def _make_limit_check(limit: int) -> Callable[[Any], Any]:
    """Returns a function that converts numbers above a limit to `UnresolvedObject`."""

    def check_limit(value: Setting) -> Any:
        if isinstance(value, int | float) and value > limit:
            return UnresolvedObject(f"{value}, more than the {limit} that a file may choose")
        return value

    return check_limit


_MAX_VALUES = {
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


def _make_number_places(max_values: Mapping[str, int]) -> dict[str, AllowedObject]:
    """Returns the places of limited numbers, under all of their names."""
    limits = {
        **max_values,
        **{x: max_values[name] for x, name in ALIASES.items() if name in max_values},
    }
    return {
        name: AllowedObject("number", decode_plain=_make_limit_check(limit))
        for name, limit in limits.items()
    }


def _check_input(source: Setting) -> Any:
    """Returns a source of experience in a file, or an `UnresolvedObject` for a class path."""
    return UnresolvedObject(str(source), importable=True) if is_class_path(source) else source


def _check_output(target: Setting) -> Any:
    """Returns None or an `UnresolvedObject`: a file does not choose where to write."""
    return None if target is None else UnresolvedObject(f"{target!r:.80}")


POLICY_CLASS = AllowedObject("policy_class")

_EXPLORATION_PLACES: dict[str, AllowedObjects] = {
    "type": AllowedObject("exploration", decode_plain=_check_exploration_type)
}
_EXPLORATION_PLACES["*"] = _EXPLORATION_PLACES  # nested strategies


_ROSTER_NAMES = ("policy_mapping_fn", "policies_to_train")
_FUNCTION_SETTINGS = (
    *_ROSTER_NAMES,
    "observation_filter",
    "observation_fn",
    "env_task_fn",
    "custom_eval_function",
    "before_learn_on_batch",
)


def _make_places(
    env: AllowedObject, **extra_places: AllowedObject | AllowedObjects
) -> dict[str, AllowedObjects]:
    places: dict[str, AllowedObjects] = {
        "env": env,
        "callbacks": AllowedObject("callbacks"),
        "lr": AllowedObject("lr", allows_functions=True, decode_plain=_check_learning_rate),
        "model": {
            "custom_model": AllowedObject("custom_model", allows_functions=True),
            "custom_action_dist": AllowedObject("custom_action_dist"),
            **_make_number_places({"max_seq_len": 1 << 16}),
        },
        "q_model_config": {"custom_model": AllowedObject("custom_model", allows_functions=True)},
        "exploration_config": _EXPLORATION_PLACES,
        "tf_session_args": AllowedObject("sessions", decode_plain=_check_session_settings),
        "local_tf_session_args": AllowedObject("sessions", decode_plain=_check_session_settings),
        "optimizer": {
            "type": AllowedObject("optimizer", decode_plain=_check_optimizer_type),
            "*": AllowedObject("optimizer", decode_plain=_check_optimizer_setting),
        },
        **{name: AllowedObject(name, allows_functions=True) for name in _FUNCTION_SETTINGS},
        "replay_buffer_config": _make_number_places({"capacity": 1 << 30}),
        **_make_number_places(_MAX_VALUES),
        **extra_places,
    }
    places["evaluation_config"] = places
    places["multiagent"] = places  # of old dict configs
    return places


POLICY_SETTINGS = _make_places(AllowedObject("env", allows_functions=True))
"""Settings of one policy. It creates no environment, so any environment name is accepted."""

ALGORITHM_SETTINGS = _make_places(
    AllowedObject("env", allows_functions=True, decode_plain=check_environment_name),
    input_=AllowedObject("input", decode_plain=_check_input),
    input_config={"trusted": AllowedObject("trust", decode_plain=lambda _: False)},
    output=AllowedObject("output", decode_plain=_check_output),
    extra_python_environs_for_worker=AllowedObject(
        "environment variables", decode_plain=_check_environment_variables
    ),
)
"""Settings of an algorithm, which creates environments and starts workers."""

for _places in (POLICY_SETTINGS, ALGORITHM_SETTINGS):
    _places["policies"] = {"*": {0: POLICY_CLASS, 3: POLICY_SETTINGS}}

ROSTER = {name: POLICY_SETTINGS[name] for name in _ROSTER_NAMES}
"""Places of the mapping function and the trained policies."""


def decode_settings(
    record: Json,
    places: AllowedObjects = POLICY_SETTINGS,
    *,
    objects: Mapping[str, Any] | None = None,
) -> Any:
    """Decodes settings of `encode_value`, with an `UnresolvedObject` for objects not allowed.

    These are the objects that `resolve_allowed` rejects, and strings or dicts that would create,
    import or open something: exploration strategies and environments by path, parts of an
    optimizer, environment variables, and non-numeric settings of TensorFlow sessions.

    Args:
        record: JSON values.
        places: where settings may name objects.
        objects: names in the record -> objects that the caller provides for them.

    Raises:
        CheckpointError: if they are malformed.

    >>> decode_settings({"lr": 0.1, "exploration_config": {"type": "antigravity.Strategy"}})
    {'lr': 0.1, 'exploration_config': {'type': UnresolvedObject(name='antigravity.Strategy', \
importable=True)}}
    """
    return resolve_allowed(decode_value(migrate_settings(record)), places, objects=objects)
