"""Converts the config of an RLlib checkpoint, and lists the settings without a counterpart."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tfpolicies.algorithms.algorithm import AlgorithmConfig
from tfpolicies.algorithms.registry import find_algorithm
from tfpolicies.compat.foreign_pickle import Named
from tfpolicies.compat.rllib_names import PLACES
from tfpolicies.config.dialect import ALIASES, CONSTANTS
from tfpolicies.errors import CheckpointError, ModelSettingError
from tfpolicies.models.defaults import MODEL_DEFAULTS, SETTINGS

_ALGORITHMS = ("PPO", "PG", "A2C", "DQN", "SAC")
"""The algorithms whose networks can be converted."""

_NETWORKS = ("model", "policy_model_config", "q_model_config")
"""Settings of networks, which are converted separately."""

_NOTHING: tuple[Any, ...] = (None, False, -1, {}, [], ())
"""Values that disable a setting; RLlib uses -1 for deprecated ones."""

_RUN = "policies policy_mapping_fn policies_to_train worker_index __policy_id in_evaluation"
_OF_THE_RUN = frozenset(_RUN.split())
"""Settings that do not belong to a policy."""

_OF_RLLIB: Mapping[str, Any] = {
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


_OF_BUFFERS: Mapping[str, tuple[Any, ...]] = {
    "_enable_replay_buffer_api": (True,),
    "prioritized_replay": (True, False, -1),
    "replay_sequence_length": (1,),
    "worker_side_prioritization": (False,),
}
"""Keys of `replay_buffer_config` that only RLlib has, and their values without effect."""


class Settings(NamedTuple):
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
    left: list[str]


def settings_of(spec: Any) -> Settings:
    """Converts a `policy_spec` of RLlib.

    Raises:
        CheckpointError: if it lacks a required entry, or has an unsupported algorithm or framework;
            the message names it.
    """
    if not isinstance(spec, Mapping) or "config" not in spec:
        raise CheckpointError(
            "The checkpoint has no policy_spec with a config. It is from another version than "
            "RLlib 2.0 to 2.10, or from the new API stack; restore it there, and save a Policy "
            "checkpoint."
        )
    stored = _config_in(spec["config"])
    models = {name: dict_in(stored, name) for name in _NETWORKS if stored.get(name) is not None}
    algorithm = _algorithm(spec.get("policy_class"))
    framework = stored.get("framework")
    if framework not in ("tf", "tf2"):
        raise CheckpointError(
            f"The checkpoint's framework must be 'tf' or 'tf2', got {framework!r:.80}. The weights "
            "of torch networks are not converted."
        )
    config = algorithm.get_default_config()
    left: list[str] = []
    unread = {*_NETWORKS, *_OF_THE_RUN, *["eager_tracing"] * (framework == "tf")}
    for name in stored.keys() - unread:
        value = stored[name]
        left += _taken(config, name, _buffer(value) if name == "replay_buffer_config" else value)
    kind = find_class(algorithm, framework)
    left = [*sorted(left), *(x for name, model in models.items() for x in _model_left(name, model))]
    return Settings(algorithm.__name__, kind, config, stored, left)


def dict_in(stored: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a setting that must be a dict.

    Raises:
        CheckpointError: if it is missing, or not a dict.
    """
    found = stored.get(name)
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"`{name}` in the checkpoint's config must be a dict, got {found!r:.80}."
        )
    return found


def find_class(algorithm: Any, framework: str) -> Any:
    """Returns the class of an algorithm's policies for a framework."""
    name = f"{algorithm.__name__}{'TF2' if framework == 'tf2' else 'TF1'}Policy"
    return getattr(importlib.import_module(algorithm.__module__), name)


def _config_in(stored: Any) -> Mapping[str, Any]:
    """Returns a config as a dict; it was saved as a dict, or as an object with attributes."""
    if isinstance(stored, Named) and isinstance(stored.state, Mapping):
        given = stored.state.items()
        stored = {x if x in _NETWORKS else ALIASES.get(x, x): value for x, value in given}
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"The checkpoint's config must be a dict, got {stored!r:.80}.")
    return {str(name): value for name, value in stored.items()}


def _algorithm(name: Any) -> Any:
    text = _class_name(name)
    ours = text.removesuffix("Policy").removesuffix("TF1").removesuffix("TF2").removesuffix("TF")
    if ours not in _ALGORITHMS:
        raise CheckpointError(
            f"The checkpoint's policy class must be one of {', '.join(_ALGORITHMS)}, got "
            f"{text!r:.80}, whose networks are not converted. Make the policy here, build the "
            "network in Keras, and give its weights to `policy.import_model_from_h5`."
        )
    return find_algorithm(ours)


def _class_name(found: Any) -> str:
    """Returns the name of a policy class, without the suffixes of eager classes."""
    text = _name_of(found).rpartition(":")[2] if isinstance(found, Named) else str(found)
    return text.removesuffix("_traced").removesuffix("_eager")


def _name_of(found: Named) -> str:
    """Returns the name of a class or function; a class of a script is pickled as its parts."""
    is_made = found.name.endswith(":_make_skeleton_class") and isinstance(found.args, tuple)
    return str(found.args[1]) if is_made and len(found.args) > 1 else found.name


def _buffer(stored: Any) -> Any:
    """Converts RLlib's `replay_buffer_config`.

    RLlib 2.10 does not read `prioritized_replay`, which is False for SAC: the type decides.
    """
    if not isinstance(stored, Mapping):
        return stored
    found = {
        name: value
        for name, value in stored.items()
        if not any(_is_same(value, silent) for silent in _OF_BUFFERS.get(name, ()))
    }
    kind = found.get("type")
    if isinstance(kind, Named) and kind.name.startswith("ray.rllib."):
        found["type"] = kind.name.rpartition(":")[2]
    return found


def _taken(config: AlgorithmConfig, name: str, value: Any) -> Iterator[str]:
    """Sets a setting in a config, or yields the reason why it cannot be set."""
    found, why = _known(value), ""
    if not _has_named(found):
        try:
            config.update_from_dict({name: found})
            return
        except (TypeError, ValueError) as error:  # a ConfigError is a ValueError
            why = f" ({str(error).partition('. ')[0].removesuffix('.')})"
    silent = _OF_RLLIB.get(name)
    if silent is ... or _is_same(value, silent) or is_nothing(value):
        return
    known = ALIASES.get(name, name)
    if why and known in CONSTANTS:
        why = f" ({CONSTANTS[known].why})"
    yield f"{name}={_said(value)}{why}"


def _has_named(value: Any) -> bool:
    """Returns whether a value contains a record of an unknown object."""
    if isinstance(value, Mapping):
        return any(map(_has_named, value.values()))
    if isinstance(value, list | tuple) and not isinstance(value, Named):
        return any(map(_has_named, value))
    return isinstance(value, Named)


def is_nothing(value: Any) -> bool:
    """Returns whether a value means that a feature is not used."""
    return any(_is_same(value, each) for each in _NOTHING)


def _is_same(value: Any, other: Any) -> bool:
    """Returns whether plain values are equal; arrays never are."""
    return type(value) is type(other) and bool(value == other)


def _known(value: Any) -> Any:
    """Returns the replacement for a name of RLlib; other values are returned unchanged."""
    if not isinstance(value, Named) or value.args is not None:
        return value
    module, _, name = value.name.partition(":")
    if (module, name) not in PLACES:
        return value
    home, ours = PLACES[module, name]
    return getattr(importlib.import_module(home), ours)


def _said(value: Any) -> str:
    if isinstance(value, Named):
        return f"<{_name_of(value):.60}>"
    return "<with custom objects>" if _has_named(value) else f"{value!r:.60}"


# -- the model ------------------------------------------------------------------------------------

_NOT_OURS = frozenset(
    {"_disable_preprocessor_api", "_disable_action_flattening", "vf_share_layers", "custom_model"}
)


def _model_left(config: str, model: Mapping[str, Any]) -> Iterator[str]:
    for name, value in model.items():
        if name not in MODEL_DEFAULTS and name not in _NOT_OURS and not is_nothing(value):
            yield f"{config}[{name!r}]={_said(value)}"


def require_known_values(model: Mapping[str, Any]) -> None:
    """Validates the settings of a `model` config that this package has.

    Raises:
        ModelSettingError: if one has an invalid value.
    """
    for name, (_, rule) in SETTINGS.items():
        if name in model and not rule.holds(model[name]):
            raise ModelSettingError(
                f"model[{name!r}] of the checkpoint must be {rule.words}, got {model[name]!r:.80}."
            )


def model_settings_of(model: Mapping[str, Any], network: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `model` config of this package, from RLlib's and its network's settings.

    Raises:
        ModelSettingError: if a setting has an invalid value.
    """
    unread = [name for name in MODEL_DEFAULTS if _has_named(model.get(name))]
    if unread:
        raise ModelSettingError(
            f"model[{unread[0]!r}] of the checkpoint must be a plain value, got "
            f"{_said(model[unread[0]])}. Objects that a checkpoint names are not imported."
        )
    kept = {name: model[name] for name in MODEL_DEFAULTS if name in model}
    return {**kept, **network}
