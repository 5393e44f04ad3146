"""Checkpoint folders of policies: writes them, and creates policies from them."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpolicies.base.allowlist import is_allowed
from tfpolicies.base.finite_checks import find_first_non_finite
from tfpolicies.base.type_aliases import Json
from tfpolicies.config.config_serialization import (
    decode_config,
    encode_config,
    from_pickle,
    get_stored_auto,
    to_pickle,
)
from tfpolicies.config.live_dict import is_equal
from tfpolicies.config.policy_spec import PolicySpec
from tfpolicies.config.settings_allowlist import POLICY_CLASS, decode_settings
from tfpolicies.connectors.pipelines import pipelines_from_state
from tfpolicies.errors import CheckpointError, ConfigError
from tfpolicies.exploration.strategies import StochasticSampling
from tfpolicies.models.catalog.recurrent_models import RememberingModel
from tfpolicies.models.size_check import limit_to_stored_weights
from tfpolicies.models.work import limit_work
from tfpolicies.policy.driver import FILTER_ATTRIBUTES
from tfpolicies.program.devices import CPU
from tfpolicies.program.spec import program_fingerprint
from tfpolicies.storage.allowed_objects import resolve_allowed
from tfpolicies.storage.checkpoint import (
    Checkpoint,
    CheckpointData,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from tfpolicies.storage.import_paths import UnresolvedObject, index_by_path
from tfpolicies.storage.json_values import (
    decode_value,
    encode_value,
    find_unresolved,
    warn_unavailable_objects,
)
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST
from tfpolicies.storage.pickling import check_picklable_by_name, restore_checkpoint, serialize_part
from tfpolicies.storage.spaces_json import decode_space, encode_space
from tfpolicies.system.paths import resolve_path

custom_object_scope = keras.saving.custom_object_scope

POLICY_MANIFEST = "policy.json"

logger = logging.getLogger("tfpolicies")

_ARRAY_GROUPS = {
    "weights": "weights",
    "target_weights": "target",
    "filter": "filter",
    "reward_filter": "reward_filter",
    "_optimizer_variables": "optimizer",
}
"""Keys of a state that hold arrays by name, and the groups of array files that store them."""

TRAINING_ONLY_SETTINGS = (
    "callbacks",
    "policy_mapping_fn",
    "policies_to_train",
    "observation_fn",
    "env_task_fn",
    "custom_eval_function",
    "before_learn_on_batch",
    "evaluation_config",
)
"""Settings whose objects only training or the algorithm needs."""


def make_policy_part(policy: Any, state: Mapping[str, Any] | None = None) -> CheckpointData:
    """Returns the manifest and the arrays of a policy's checkpoint.

    Args:
        policy: the policy.
        state: a state from `get_state`, written instead of the current one.
    """
    state = policy.get_state() if state is None else state
    arrays = _group_arrays(state)
    array_keys = {key for key, group in _ARRAY_GROUPS.items() if group in arrays}
    manifest = {
        "type": "Policy",
        "policy_class": encode_value(type(policy)),
        "observation_space": encode_space(policy.observation_space),
        "action_space": encode_space(policy.action_space),
        "config": encode_config(_drop_environment(policy.config), _get_factory_model(policy)),
        "automatic": sorted(policy.driver.auto_settings),
        "policy_id": policy.policy_id,
        "program": get_fingerprint(policy),
        "finite": _find_non_finite(arrays) is None,
        "state": {
            key: encode_value(value)
            for key, value in state.items()
            if key != "policy_spec" and key not in array_keys
        },
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
    }
    if _requests_gpu(policy):
        manifest["device"] = policy.devices[0]
    return CheckpointData(POLICY_MANIFEST, manifest, arrays)


_GROUPS_CHECKED_FINITE = ("weights", "target", "optimizer")
"""The groups that training may fill with NaN; filters check themselves."""


def _find_non_finite(arrays: Mapping[str, Mapping[str, np.ndarray]]) -> tuple[str, float] | None:
    """Returns place and value of the first weight that is not finite, or None."""
    return find_first_non_finite(
        {
            f"{group}[{key!r}]": array
            for group in _GROUPS_CHECKED_FINITE
            for key, array in arrays.get(group, {}).items()
        }
    )


def is_finite_state(state: Mapping[str, Any]) -> bool:
    """Whether the weights in a state from `get_state` have neither NaN nor infinity."""
    return _find_non_finite(_group_arrays(state)) is None


def set_stored_state(policy: Any, state: Mapping[str, Any]) -> None:
    """Sets a stored state. The caller has checked whether it is finite."""
    with policy.driver.allow_non_finite():
        policy.set_state(state)


def check_stored_state(policy: Any, state: Mapping[str, Any]) -> None:
    """Checks a state as `set_stored_state` would, and changes nothing."""
    with policy.driver.allow_non_finite():
        policy.driver.check_state(state)


def _drop_environment(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drops an environment that has no name from a config: no policy needs it."""
    env = config.get("env")
    return {**config, "env": env if isinstance(env, str) else None}


def _group_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a state by group, without empty groups.

    Python numbers, which custom policies may have as weights, become 0-d arrays.
    """
    groups = {group: state.get(key) for key, group in _ARRAY_GROUPS.items()}
    return {
        group: {
            name: np.asarray(x) if isinstance(x, bool | int | float) else x
            for name, x in arrays.items()
        }
        for group, arrays in groups.items()
        if isinstance(arrays, Mapping) and arrays
    }


def _requests_gpu(policy: Any) -> bool:
    return policy.driver.program is not None and bool(policy.config["num_gpus"])


def _warn_of_other_device(stored: str | None, policy: Any) -> None:
    """Logs that a policy which learned without a GPU now learns on one.

    A missing GPU is reported by the code that looks for it.
    """
    if stored == CPU and _requests_gpu(policy) and policy.devices != [CPU]:
        logger.warning(
            "policy %r learned on the CPU; with num_gpus=%s it now learns on the GPU; set "
            "num_gpus=0 to keep it on the CPU",
            *(policy.policy_id, policy.config["num_gpus"]),
        )


def get_fingerprint(policy: Any, saved: Collection[str] | None = None) -> str | None:
    """Returns a hash that tells whether states fit a policy; None for custom policies."""
    program = policy.driver.program
    return program and program_fingerprint(program.spec, program.layout.slots, saved)


def make_policy_record(policy: Any) -> dict[str, Any]:
    """Returns the description of a policy without its variables, as JSON values."""
    part = make_policy_part(policy)
    warn_unavailable_objects(part.manifest)
    filters = {
        key: encode_value(part.arrays[key]) for key in FILTER_ATTRIBUTES if key in part.arrays
    }
    return {**part.manifest, "state": {**part.manifest["state"], **filters}}


def make_policy_from_record(
    record: Mapping[str, Any],
    source: str,
    classes: Sequence[type],
    num_weights: int,
    model_work_limit: float = 1.0,
) -> Any:
    """Returns the policy that `make_policy_record` described; its variables must be set afterwards.

    Args:
        record: the result of `make_policy_record`.
        source: where it is from, for messages.
        classes: policy classes outside this package that it may name.
        num_weights: upper bound for the number of weights.
        model_work_limit: see `limit_work`.

    Raises:
        CheckpointError: if it is damaged, or names an unknown class.
    """
    stored = StoredPolicy(Checkpoint(dict(record), {}, {}), source, classes)
    with limit_to_stored_weights(source, num_weights), limit_work(model_work_limit):
        policy = stored.build()
    policy.set_state({**policy.get_state(), **stored.state})
    return policy


def _get_factory_model(policy: Any) -> keras.Model | None:
    """Returns the model that a factory made for a policy; None without a factory."""
    custom = policy.config.get("model", {}).get("custom_model")
    program = policy.driver.program
    if custom is None or program is None:
        return None
    model = program.functions.network.model
    return model.features if isinstance(model, RememberingModel) else model


@dataclasses.dataclass(frozen=True)
class StoredPolicy:
    """A policy in a checkpoint.

    Attributes:
        checkpoint: of the policy.
        source: where it is from, for messages.
        classes: classes outside this package that it may name.
        overrides: settings that replace stored ones.
        optional_settings: settings that may be missing if the file could not store them.
    """

    checkpoint: Any
    source: str
    classes: Sequence[type] = ()
    overrides: Mapping[str, Any] | None = None
    optional_settings: Collection[str] = TRAINING_ONLY_SETTINGS

    @property
    def state(self) -> dict[str, Any]:
        stored, arrays = self.checkpoint.manifest["state"], self.checkpoint.arrays
        if not isinstance(stored, Mapping):
            raise CheckpointError(f"A checkpoint's state must be a dict, got {stored!r:.80}.")
        state = {key: decode_value(value) for key, value in stored.items()}
        return state | {
            key: arrays[group] for key, group in _ARRAY_GROUPS.items() if group in arrays
        }

    def make_state_for(
        self, policy: Any, overrides: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the state for a policy whose config may differ from the stored one.

        Hyperparameters for which the two configs differ are taken from the policy's config; see
        `apply_configured_hyperparameters`. The exploration state is dropped if the policy has
        another strategy. Classes with the same name count as the same strategy.

        Args:
            policy: the policy.
            overrides: settings that the caller named; None for those of this object.
        """
        state, settings = self.state, self.checkpoint.manifest["config"]["settings"]
        strategy, exploration = (
            settings.get("exploration_config"),
            getattr(policy, "exploration", None),
        )
        if exploration is not None and type(exploration).__name__ != _get_strategy_name(strategy):
            state.pop("_exploration_state", None)
        named_settings = self.overrides if overrides is None else overrides
        return apply_configured_hyperparameters(
            policy, state, decode_settings(settings), named_settings
        )

    @property
    def spaces(self) -> tuple[Any, Any]:
        stored = self.checkpoint.manifest
        return decode_space(stored["observation_space"]), decode_space(stored["action_space"])

    @property
    def weight_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the weights."""
        return [np.shape(array) for array in self.checkpoint.arrays.get("weights", {}).values()]

    def require_finite(self, *, allow: bool) -> None:
        """Raises a `CheckpointError` if the weights have NaN or infinity, unless allowed."""
        non_finite = None if allow else _find_non_finite(self.checkpoint.arrays)
        if non_finite is not None:
            raise CheckpointError(
                f"{self.source} is not finite: {non_finite[0]} is {non_finite[1]}. It was saved "
                "while training continued with such numbers (on_nan='warn'). Load an older "
                "checkpoint; or give allow_non_finite=True to inspect this one."
            )

    def make_policy(self, *, allow_non_finite: bool = False) -> Any:
        """Returns a new policy with the stored class, spaces, config and state.

        Args:
            allow_non_finite: also accept weights with NaN or infinity.
        """
        self.require_finite(allow=allow_non_finite)
        with limit_to_stored_weights(self.source, self.weight_shapes):
            policy = self.build()
        set_stored_state(policy, self.make_state_for(policy))
        return policy

    def build(self) -> Any:
        """Returns a new policy with the stored class, spaces and config, but fresh weights."""
        spec, manifest = self._read_spec(), self.checkpoint.manifest
        policy_class: Any = spec.policy_class
        program, policy_id = manifest.get("program"), manifest.get("policy_id")
        identity = {"__policy_id": policy_id} if program is not None else {}
        policy = policy_class(
            spec.observation_space, spec.action_space, {**spec.config, **identity}
        )
        if program is not None:
            stored_settings = manifest["config"]["settings"]
            policy.auto_settings = {
                name: stored_settings.get(name) for name in policy.auto_settings
            }
            _warn_of_other_device(manifest.get("device"), policy)
        if get_fingerprint(policy, self._get_saved_hyperparameters(policy)) != program:
            raise CheckpointError(
                f"{self.source} does not fit {policy_class.__name__}: the variables differ from "
                "the saved ones, or a hyperparameter is missing. Load it with the class and model "
                "it was saved with."
            )
        return policy

    def _get_saved_hyperparameters(self, policy: Any) -> set[str]:
        state = self.checkpoint.manifest["state"]
        aliases = getattr(policy, "_state_aliases", {})
        aliased = {name for key, name in aliases.items() if key in state}
        return {*(state.get("hyperparameters") or ()), *aliased}

    def get_spec(self) -> PolicySpec:
        """Returns class, spaces and complete config, from which a worker creates the policy.

        The observation space is the environment's, before connectors; None if they do not store it.
        """
        with limit_to_stored_weights(self.source, self.weight_shapes):
            spec = self._read_spec()
        try:
            agent, _ = pipelines_from_state(self.state.get("connector_configs") or {})
        except ConfigError as error:
            raise CheckpointError(f"{self.source}: {error}") from error
        if agent is None:
            return spec
        observation_space = agent.space if agent.is_connected else None
        return dataclasses.replace(spec, observation_space=observation_space)

    def _read_spec(self) -> PolicySpec:
        manifest = self.checkpoint.manifest
        try:
            policy_class, spaces = self.get_policy_class(), self.spaces
            record = manifest["config"]
            config = decode_config(
                record, self.overrides, self.source, unneeded=self.optional_settings
            )
            config |= dict.fromkeys(get_stored_auto(manifest, config, self.overrides), "auto")
            _ = manifest["state"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.source}: its manifest lacks {error}, or has it malformed."
            ) from error
        return PolicySpec(policy_class, *spaces, config)

    def get_policy_class(self) -> Any:
        stored: Any = self.checkpoint.manifest.get("policy_class")
        reference = stored if isinstance(stored, Mapping) else {}
        name = reference.get("$import") or reference.get("$unavailable")
        if not isinstance(name, str):
            raise CheckpointError(f"{self.source} must name a policy class, got {stored!r:.80}.")
        policy_class = resolve_allowed(
            decode_value(stored), POLICY_CLASS, objects=index_by_path(self.classes)
        )
        if isinstance(policy_class, UnresolvedObject) and not (
            policy_class.importable and name.startswith("tfpolicies.")
        ):
            raise CheckpointError(
                f"{self.source} holds a policy of the class {name}, which is not in this package."
            ).add_advice(
                f"Call `{name.rpartition(':')[2]}.from_checkpoint(path)` on your class. To load "
                "other policies of the checkpoint only, name them: `policy_ids=[...]`.",
                {"policies": name.replace("__main__:", "MODULE:")},
            )
        if not is_allowed(policy_class, POLICY_CLASS.role):
            raise CheckpointError(
                f"{self.source}: {name} is not a policy class that can be instantiated."
            )
        return policy_class


def apply_configured_hyperparameters(
    policy: Any,
    state: Mapping[str, Any],
    stored: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns a state that takes hyperparameters from a policy's config where the configs differ.

    A policy's hyperparameters may differ from its config, for example after `set_hyperparameter`.
    They are kept where both configs agree. Where the configs differ, the user chose the value in
    the policy's config, so the state gets it. A hyperparameter with a schedule always follows the
    policy's schedule.

    Args:
        policy: the policy that the state is for.
        state: as `Policy.get_state` returns it; it is not changed.
        stored: the config of the policy that the state is from.
        overrides: settings that the user named: their values win even where both configs agree.
    """
    if policy.driver.program is None:
        return dict(state)
    spec, config, named_settings = policy.program.spec, policy.config, overrides or {}

    def differs(name: str) -> bool:
        if callable(config.get(name)):  # a schedule, which computes the number
            return False
        if name not in config:
            return name in stored
        is_named = name in named_settings and is_equal(named_settings[name], config[name])
        return is_named or name not in stored or not is_equal(config[name], stored[name])

    hyperparameters = dict(state.get("hyperparameters") or {})
    state = {**state, "hyperparameters": hyperparameters}
    keys = {name: key for key, name in policy._state_aliases.items()}
    sharing_lr = spec.get_unset_rates(config)
    for name, value in zip(
        spec.hyperparameters, spec.get_hyperparameter_values(config), strict=True
    ):
        sources = [name, f"{name}_schedule", policy._enabling_settings.get(name, name)]
        if any(map(differs, [*sources, *["lr", "lr_schedule"] * (name in sharing_lr)])):
            target = state if name in keys else hyperparameters
            target[keys.get(name, name)] = None if value == math.inf else value
    return state


def _get_strategy_name(record: Json) -> str:
    kind = record.get("type") if isinstance(record, Mapping) else None
    if isinstance(kind, Mapping):
        kind = kind.get("$import") or kind.get("$unavailable")
    return re.split("[.:]", str(kind or StochasticSampling.__name__))[-1]


def make_stored_policies(
    checkpoint: Checkpoint, source: str, *attributes: Any
) -> dict[str, StoredPolicy]:
    """Returns the policies of an algorithm's checkpoint, by id.

    Args:
        checkpoint: the checkpoint.
        source: where it is from, for messages.
        *attributes: further attributes of each `StoredPolicy`.
    """
    return {
        pid: StoredPolicy(policy_checkpoint, f"policy {pid!r} of {source}", *attributes)
        for pid, policy_checkpoint in checkpoint.policies.items()
    }


def write_policy_checkpoint(
    policy: Any, folder: str | os.PathLike[str], state: Mapping[str, Any] | None
) -> None:
    """Writes a policy into a folder, replacing a checkpoint that is there."""
    part = make_policy_part(policy, state)
    warn_unavailable_objects(part.manifest)
    write_checkpoint(folder, part.manifest_name, part.manifest, part.arrays)


def reduce_policy(policy: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the `__reduce__` value of a policy: its checkpoint and unserializable settings.

    Raises:
        UnpicklableError: if its class, or one of those settings, cannot be imported by a name.
    """
    part, policy_class = make_policy_part(policy), type(policy)
    stored = decode_settings(part.manifest["config"]["settings"])
    unserializable = {
        name: policy.config[name] for name, value in stored.items() if find_unresolved(value)
    }
    unserializable["worker_index"] = policy._worker_index
    unserializable = to_pickle(unserializable)
    check_picklable_by_name({"the class of the policy": policy_class, "config": unserializable})
    return _unpickle_policy, (policy_class, serialize_part(part), unserializable)


def _unpickle_policy(
    policy_class: type, frozen_checkpoint: Any, unserializable: Mapping[str, Any]
) -> Any:
    source = f"A pickled {policy_class.__name__}"
    stored = StoredPolicy(
        restore_checkpoint(frozen_checkpoint), source, [policy_class], from_pickle(unserializable)
    )
    with limit_work(math.inf):  # unpickling requires a trusted source anyway
        return stored.make_policy()


def get_path(checkpoint: Any) -> str | os.PathLike[str]:
    """Returns the folder of a checkpoint: a path, or the result of `Algorithm.save`."""
    folder = getattr(checkpoint, "checkpoint", checkpoint)
    path: str | os.PathLike[str] = getattr(folder, "path", folder)
    return path


def load_policies(
    path: str | os.PathLike[str],
    policy_ids: Sequence[str] | None,
    policy_class: type,
    overrides: Mapping[str, Any] | None,
    *,
    allow_non_finite: bool = False,
    extra_classes: Sequence[type] = (),
) -> Any:
    """Returns the policy of a policy's checkpoint, or those of an algorithm's by id.

    Args:
        path: the folder, as the caller wrote it.
        policy_ids: of an algorithm's checkpoint, load only these.
        policy_class: the expected base class of each policy.
        overrides: settings that replace stored ones.
        allow_non_finite: also accept weights with NaN or infinity.
        extra_classes: classes of other packages that the checkpoint may name.

    Raises:
        CheckpointError: if the checkpoint is missing, damaged or foreign, if a policy is not a
            `policy_class`, or if `policy_ids` are given for the checkpoint of a single policy.
        UnknownPolicyError: if one of `policy_ids` is not in it.
    """
    folder, classes = resolve_path(path), [policy_class, *extra_classes]
    source = repr(os.fspath(path))
    parent, name = folder.parent.parent, folder.name
    is_part = folder.parent.name == "policies" and (parent / ALGORITHM_MANIFEST).exists()
    if is_part and policy_ids is None and not folder.exists():  # the path ends with a policy id
        policies = load_policies(
            parent,
            [name],
            policy_class,
            overrides,
            allow_non_finite=allow_non_finite,
            extra_classes=extra_classes,
        )
        return policies[name]
    if (folder / POLICY_MANIFEST).exists() or not (folder / ALGORITHM_MANIFEST).exists():
        if policy_ids is not None:
            read_manifest(path, POLICY_MANIFEST, kind="Policy")
            raise CheckpointError(
                f"{source} is the checkpoint of one policy; leave policy_ids out."
            )
        checkpoint = read_checkpoint(path, POLICY_MANIFEST, kind="Policy")
        single = StoredPolicy(checkpoint, source, classes, overrides)
        _require_class({None: single}, source, policy_class)
        return single.make_policy(allow_non_finite=allow_non_finite)
    ids = None if policy_ids is None else list(policy_ids)
    algorithm_checkpoint = read_checkpoint(
        path, ALGORITHM_MANIFEST, kind="Algorithm", groups=[], policies=ids
    )
    stored = make_stored_policies(algorithm_checkpoint, source, classes, overrides)
    _require_class(stored, source, policy_class)
    return {
        pid: stored_policy.make_policy(allow_non_finite=allow_non_finite)
        for pid, stored_policy in stored.items()
    }


def _require_class(policies: Mapping[Any, StoredPolicy], source: str, expected: type) -> None:
    """Checks that policies, by id (None for a single one), are of a class or its subclasses."""
    classes = {pid: stored.get_policy_class() for pid, stored in policies.items()}
    mismatched = {
        pid: policy_class
        for pid, policy_class in classes.items()
        if not issubclass(policy_class, expected)
    }
    if not mismatched:
        return
    matching = [pid for pid in classes if pid not in mismatched]
    descriptions = ", ".join(
        policy_class.__name__ if pid is None else f"{pid!r} ({policy_class.__name__})"
        for pid, policy_class in mismatched.items()
    )
    class_names = {policy_class.__name__ for policy_class in classes.values()}
    calls = [f"{name}.from_checkpoint(path)" for name in class_names if len(class_names) == 1]
    calls += (
        [f"{expected.__name__}.from_checkpoint(path, policy_ids={matching})"] if matching else []
    )
    calls += ["Policy.from_checkpoint(path)"]
    subject = "a policy of the class" if None in mismatched else "policies of other classes,"
    raise CheckpointError(
        f"{source} holds {subject} {descriptions}, but should be loaded as {expected.__name__}. "
        f"Call {' or '.join(calls)}; the last accepts all classes."
    )
