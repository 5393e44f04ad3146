"""Complete configs of policies, and the seeds derived from them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from tfpolicies.base.type_aliases import Setting
from tfpolicies.base.validators import is_one_of
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.errors import ConfigError
from tfpolicies.policy.hooks import TFPolicyHooks

AUTO_SETTINGS = ("inference", "jit_compile")
"""The settings whose "auto" each policy resolves separately."""


def complete_config(
    policy_class: type[TFPolicyHooks], config: Mapping[str, Setting] | AlgorithmConfig | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the complete flat config of a policy, and the settings that identify the policy."""
    identity: dict[str, Any] = {
        "__policy_id": DEFAULT_POLICY_ID,
        "worker_index": 0,
        "__session_creator": None,
    }
    config_class, named_framework = policy_class.config_class, None
    if type(config) is config_class:
        settings = config.copy_for_policy()
    elif isinstance(config, AlgorithmConfig):
        settings = config_class().update_from_dict(config.settings_for(config_class))
    else:
        settings, config_dict = config_class(), dict(config or {})
        identity.update({key: config_dict.pop(key) for key in identity if key in config_dict})
        session_creator = identity["__session_creator"]
        if session_creator is not None and not callable(session_creator):
            raise ConfigError(
                f"A session_creator must be a function () -> session, got {session_creator!r}."
            )
        named_framework = config_dict.get("framework")
        is_complete = config_dict.keys() >= settings.settings_for(config_class).keys()
        if is_complete and is_one_of(named_framework, "tf", "tf2"):
            named_framework = None
        settings.update_from_dict(config_dict)
    complete = settings.to_dict()
    _require_listed_settings(policy_class, complete)
    if isinstance(config, AlgorithmConfig):  # another policy resolved its "auto" settings
        complete |= {name: "auto" for name in AUTO_SETTINGS if name in config.get_auto_settings()}
    return _apply_runtime(policy_class, complete, named_framework), identity


def _require_listed_settings(policy_class: type[TFPolicyHooks], complete: dict[str, Any]) -> None:
    for attribute in ("hyperparameters", "static_keys"):
        missing = [name for name in getattr(policy_class, attribute) if name not in complete]
        if missing:
            name, config = policy_class.__name__, policy_class.config_class.__name__
            raise ConfigError(
                f"{name}.{attribute} lists {missing[0]!r}, which is not a setting of "
                f"{name}.config_class, {config}. Set `config_class` to a subclass of {config} "
                "whose training section has it."
            )


def _apply_runtime(
    policy_class: type[TFPolicyHooks], complete: dict[str, Any], named_framework: Setting
) -> dict[str, Any]:
    """Adds the settings that follow from the class's runtime to a config."""
    in_graph = policy_class.runtime == "session"
    framework = "tf" if in_graph else "tf2"
    if named_framework not in (None, framework):
        raise ConfigError(
            f"framework={named_framework!r} contradicts {policy_class.__name__}, whose framework "
            f"is {framework!r}. Leave the framework out, or name another class."
        )
    complete["framework"] = framework
    if in_graph:
        if not complete["eager_tracing"]:
            raise ConfigError(
                f"eager_tracing=False contradicts {policy_class.__name__}: graph mode never runs "
                "eagerly. Use a TF2 class for stepping through with a debugger."
            )
        # XLA would compile again in every policy's session, for seconds each.
        resolved = {"inference": "tf", "jit_compile": False}
        complete.update({k: v for k, v in resolved.items() if complete[k] == "auto"})
    return complete


def derive_seed(seed: int | None, *parts: int | str | None) -> int:
    """Returns a stable hash of all parts as a seed; a random one if `seed` is None."""
    if seed is None:
        return secrets.randbits(63)
    text = "/".join(map(str, (seed, *parts))).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
