"""Converts the config of an RLlib checkpoint, and lists the settings without a counterpart."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tfpolicies.algorithms.algorithm import AlgorithmConfig
from tfpolicies.algorithms.algorithm_registry import find_algorithm
from tfpolicies.compat.pickle_process import ObjectRecord
from tfpolicies.compat.rllib_names import REPLACEMENTS
from tfpolicies.config.rllib_settings import ALIASES, FIXED_SETTINGS
from tfpolicies.errors import CheckpointError, ModelSettingError
from tfpolicies.models.defaults import MODEL_DEFAULTS, MODEL_SETTINGS

_ALGORITHMS = ("PPO", "PG", "A2C", "DQN", "SAC")
"""The algorithms whose networks can be converted."""

_NETWORKS = ("model", "policy_model_config", "q_model_config")
"""Settings of networks, which are converted separately."""

_UNSET_VALUES: tuple[Any, ...] = (None, False, -1, {}, [], ())
"""Values that disable a setting; RLlib uses -1 for deprecated ones."""

_RUN_NAMES = "policies policy_mapping_fn policies_to_train worker_index __policy_id in_evaluation"
_RUN_SETTINGS = frozenset(_RUN_NAMES.split())
"""Settings that do not belong to a policy."""

_IGNORED_SETTINGS: Mapping[str, Any] = {
    "torch_compile_learner_what_to_compile": ...,
    "torch_compile_learner_dynamo_backend": ...,
    "torch_compile_worker_dynamo_backend": ...,
    "add_default_connectors_to_env_to_module_pipeline": True,
    "add_default_connectors_to_module_to_env_pipeline": True,
    "add_default_connectors_to_learner_pipeline": True,
    "episode_lookback_horizon": 1,
    "sync_filters_on_rollout_workers_timeout_s": 60.0,
    "sample_collector": ...,
    "categorical_distribution_temperature": 1.0,
}
"""Settings that only RLlib has, and their values without effect; `...` for all."""


_IGNORED_BUFFER_KEYS: Mapping[str, tuple[Any, ...]] = {
    "_enable_replay_buffer_api": (True,),
    "prioritized_replay": (True, False, -1),
    "replay_sequence_length": (1,),
    "worker_side_prioritization": (False,),
}
"""Keys of `replay_buffer_config` that only RLlib has, and their values without effect."""


class CheckpointSettings(NamedTuple):
    """A policy's settings in a checkpoint.

    Attributes:
        algorithm: the name of its algorithm.
        policy_class: the class in this package.
        config: its settings in this package, except those of networks.
        stored: its settings in RLlib.
        not_imported: the settings that are not imported, with the reasons.
    """

    algorithm: str
    policy_class: Any
    config: AlgorithmConfig
    stored: Mapping[str, Any]
    not_imported: list[str]


def convert_policy_spec(spec: Any) -> CheckpointSettings:
    if not isinstance(spec, Mapping) or "config" not in spec:
        raise CheckpointError(
            "The checkpoint has no policy_spec with a config. It is from another version than "
            "RLlib 2.0 to 2.10, or from the new API stack; restore it there, and save a Policy "
            "checkpoint."
        )
    stored = _read_config(spec["config"])
    models = {name: get_dict(stored, name) for name in _NETWORKS if stored.get(name) is not None}
    algorithm = _find_algorithm(spec.get("policy_class"))
    framework = stored.get("framework")
    if framework not in ("tf", "tf2"):
        raise CheckpointError(
            f"The checkpoint's framework must be 'tf' or 'tf2', got {framework!r:.80}. The weights "
            "of torch networks are not converted."
        )
    config = algorithm.get_default_config()
    not_imported: list[str] = []
    skipped = {*_NETWORKS, *_RUN_SETTINGS, *["eager_tracing"] * (framework == "tf")}
    for name in stored.keys() - skipped:
        value = stored[name]
        not_imported += _apply_setting(
            config, name, _convert_buffer_config(value) if name == "replay_buffer_config" else value
        )
    policy_class = find_policy_class(algorithm, framework)
    not_imported = [
        *sorted(not_imported),
        *(x for name, model in models.items() for x in _list_unused_model_settings(name, model)),
    ]
    return CheckpointSettings(algorithm.__name__, policy_class, config, stored, not_imported)


def get_dict(stored: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = stored.get(name)
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"`{name}` in the checkpoint's config must be a dict, got {value!r:.80}."
        )
    return value


def find_policy_class(algorithm: Any, framework: str) -> Any:
    """Returns the class of an algorithm's policies for a framework."""
    name = f"{algorithm.__name__}{'TF2' if framework == 'tf2' else 'TF1'}Policy"
    return getattr(importlib.import_module(algorithm.__module__), name)


def _read_config(stored: Any) -> Mapping[str, Any]:
    """Returns a config as a dict; it was saved as a dict, or as an object with attributes."""
    if isinstance(stored, ObjectRecord) and isinstance(stored.state, Mapping):
        attributes = stored.state.items()
        stored = {x if x in _NETWORKS else ALIASES.get(x, x): value for x, value in attributes}
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"The checkpoint's config must be a dict, got {stored!r:.80}.")
    return {str(name): value for name, value in stored.items()}


def _find_algorithm(policy_class: Any) -> Any:
    text = _get_class_name(policy_class)
    algorithm_name = (
        text.removesuffix("Policy").removesuffix("TF1").removesuffix("TF2").removesuffix("TF")
    )
    if algorithm_name not in _ALGORITHMS:
        raise CheckpointError(
            f"The checkpoint's policy class must be one of {', '.join(_ALGORITHMS)}, got "
            f"{text!r:.80}, whose networks are not converted. Make the policy here, build the "
            "network in Keras, and give its weights to `policy.import_model_from_h5`."
        )
    return find_algorithm(algorithm_name)


def _get_class_name(policy_class: Any) -> str:
    """Returns the name of a policy class, without the suffixes of eager classes."""
    text = (
        _get_record_name(policy_class).rpartition(":")[2]
        if isinstance(policy_class, ObjectRecord)
        else str(policy_class)
    )
    return text.removesuffix("_traced").removesuffix("_eager")


def _get_record_name(record: ObjectRecord) -> str:
    """Returns the name of a class or function; a class of a script is pickled as its parts."""
    is_script_class = record.name.endswith(":_make_skeleton_class") and isinstance(
        record.args, tuple
    )
    return str(record.args[1]) if is_script_class and len(record.args) > 1 else record.name


def _convert_buffer_config(stored: Any) -> Any:
    """Converts RLlib's `replay_buffer_config`.

    RLlib 2.10 does not read `prioritized_replay`, which is False for SAC: the type decides.
    """
    if not isinstance(stored, Mapping):
        return stored
    result = {
        name: value
        for name, value in stored.items()
        if not any(_is_same(value, ignored) for ignored in _IGNORED_BUFFER_KEYS.get(name, ()))
    }
    kind = result.get("type")
    if isinstance(kind, ObjectRecord) and kind.name.startswith("ray.rllib."):
        result["type"] = kind.name.rpartition(":")[2]
    return result


def _apply_setting(config: AlgorithmConfig, name: str, value: Any) -> Iterator[str]:
    """Sets a setting in a config, or yields the reason why it cannot be set."""
    new_value, reason = _resolve_value(value), ""
    if not _has_object_record(new_value):
        try:
            config.update_from_dict({name: new_value})
            return
        except (TypeError, ValueError) as error:  # a ConfigError is a ValueError
            reason = f" ({str(error).partition('. ')[0].removesuffix('.')})"
    ignored = _IGNORED_SETTINGS.get(name)
    if ignored is ... or _is_same(value, ignored) or is_unset(value):
        return
    new_name = ALIASES.get(name, name)
    if reason and new_name in FIXED_SETTINGS:
        reason = f" ({FIXED_SETTINGS[new_name].reason})"
    yield f"{name}={_describe_value(value)}{reason}"


def _has_object_record(value: Any) -> bool:
    """Returns whether a value contains a record of an unknown object."""
    if isinstance(value, Mapping):
        return any(map(_has_object_record, value.values()))
    if isinstance(value, list | tuple) and not isinstance(value, ObjectRecord):
        return any(map(_has_object_record, value))
    return isinstance(value, ObjectRecord)


def is_unset(value: Any) -> bool:
    """Returns whether a value means that a feature is not used."""
    return any(_is_same(value, unset_value) for unset_value in _UNSET_VALUES)


def _is_same(value: Any, other: Any) -> bool:
    """Returns whether plain values are equal; arrays never are."""
    return type(value) is type(other) and bool(value == other)


def _resolve_value(value: Any) -> Any:
    """Returns the replacement for a name of RLlib; other values are returned unchanged."""
    if not isinstance(value, ObjectRecord) or value.args is not None:
        return value
    module, _, name = value.name.partition(":")
    if (module, name) not in REPLACEMENTS:
        return value
    new_module, new_name = REPLACEMENTS[module, name]
    return getattr(importlib.import_module(new_module), new_name)


def _describe_value(value: Any) -> str:
    if isinstance(value, ObjectRecord):
        return f"<{_get_record_name(value):.60}>"
    return "<with custom objects>" if _has_object_record(value) else f"{value!r:.60}"


# -- the model ------------------------------------------------------------------------------------

_OTHER_MODEL_SETTINGS = frozenset(
    {"_disable_preprocessor_api", "_disable_action_flattening", "vf_share_layers", "custom_model"}
)


def _list_unused_model_settings(config: str, model: Mapping[str, Any]) -> Iterator[str]:
    for name, value in model.items():
        if name not in MODEL_DEFAULTS and name not in _OTHER_MODEL_SETTINGS and not is_unset(value):
            yield f"{config}[{name!r}]={_describe_value(value)}"


def require_valid_values(model: Mapping[str, Any]) -> None:
    """Validates the settings of a `model` config that this package has."""
    for name, (_, rule) in MODEL_SETTINGS.items():
        if name in model and not rule.is_valid(model[name]):
            raise ModelSettingError(
                f"model[{name!r}] of the checkpoint must be {rule.description}, got "
                f"{model[name]!r:.80}."
            )


def convert_model_settings(model: Mapping[str, Any], network: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `model` config of this package, from RLlib's and its network's settings."""
    unreadable = [name for name in MODEL_DEFAULTS if _has_object_record(model.get(name))]
    if unreadable:
        raise ModelSettingError(
            f"model[{unreadable[0]!r}] of the checkpoint must be a plain value, got "
            f"{_describe_value(model[unreadable[0]])}. Objects that a checkpoint names are not "
            "imported."
        )
    result = {name: model[name] for name in MODEL_DEFAULTS if name in model}
    return {**result, **network}
