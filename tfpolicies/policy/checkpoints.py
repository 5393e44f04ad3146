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

from tfpolicies.config.policy_spec import PolicySpec
from tfpolicies.config.read_only import is_equal
from tfpolicies.config.stored_config import (
    arrived,
    automatic_of,
    decode_config,
    encode_config,
    travelling,
)
from tfpolicies.config.stored_settings import POLICY_CLASS, decode_settings
from tfpolicies.connectors.pipelines import pipelines_from_state
from tfpolicies.errors import CheckpointError, ConfigError
from tfpolicies.exploration.strategies import StochasticSampling
from tfpolicies.finite import first_bad
from tfpolicies.marks import fits
from tfpolicies.models.catalog.memory import RememberingModel
from tfpolicies.models.extent import built_from
from tfpolicies.models.work import limit_work
from tfpolicies.policy.driver import FILTERS
from tfpolicies.program.devices import CPU
from tfpolicies.program.spec import program_fingerprint
from tfpolicies.storage.checkpoint import (
    Checkpoint,
    PolicyPart,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from tfpolicies.storage.import_paths import Missing, describe
from tfpolicies.storage.json_values import (
    decode_value,
    encode_value,
    find_missing,
    warn_of_unavailable,
)
from tfpolicies.storage.pickling import checkpoint_of, frozen_part, require_named
from tfpolicies.storage.places import admitted
from tfpolicies.storage.spaces_json import decode_space, encode_space
from tfpolicies.system.paths import resolve_path
from tfpolicies.type_aliases import Json

custom_object_scope = keras.saving.custom_object_scope

POLICY_MANIFEST = "policy.json"
ALGORITHM_MANIFEST = "algorithm.json"

logger = logging.getLogger("tfpolicies")

_GROUPS = {
    "weights": "weights",
    "target_weights": "target",
    "filter": "filter",
    "reward_filter": "reward_filter",
    "_optimizer_variables": "optimizer",
}
"""Keys of a state that hold arrays by name, and the groups of array files that store them."""

FOR_TRAINING = (
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


def policy_part(policy: Any, state: Mapping[str, Any] | None = None) -> PolicyPart:
    """Returns the manifest and the arrays of a policy's checkpoint.

    Args:
        policy: the policy.
        state: a state from `get_state`, written instead of the current one.
    """
    state = policy.get_state() if state is None else state
    arrays = _arrays_in(state)
    in_files = {key for key, group in _GROUPS.items() if group in arrays}
    manifest = {
        "type": "Policy",
        "policy_class": encode_value(type(policy)),
        "observation_space": encode_space(policy.observation_space),
        "action_space": encode_space(policy.action_space),
        "config": encode_config(_without_environment(policy.config), _built_model(policy)),
        "automatic": sorted(policy.driver.auto_settings),
        "policy_id": policy.policy_id,
        "program": _fingerprint(policy),
        "finite": _first_bad(arrays) is None,
        "state": {
            key: encode_value(value)
            for key, value in state.items()
            if key != "policy_spec" and key not in in_files
        },
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
    }
    if _asks_for_gpu(policy):
        manifest["device"] = policy.devices[0]
    return PolicyPart(POLICY_MANIFEST, manifest, arrays)


_CHECKED = ("weights", "target", "optimizer")
"""The groups that training may fill with NaN; filters check themselves."""


def _first_bad(arrays: Mapping[str, Mapping[str, np.ndarray]]) -> tuple[str, float] | None:
    """Returns place and value of the first weight that is not finite, or None."""
    return first_bad(
        {
            f"{group}[{key!r}]": array
            for group in _CHECKED
            for key, array in arrays.get(group, {}).items()
        }
    )


def is_finite_state(state: Mapping[str, Any]) -> bool:
    """Whether the weights in a state from `get_state` have neither NaN nor infinity."""
    return _first_bad(_arrays_in(state)) is None


def set_stored_state(policy: Any, state: Mapping[str, Any]) -> None:
    """Sets a stored state. The caller has checked whether it is finite."""
    with policy.driver.allow_non_finite():
        policy.set_state(state)


def check_stored_state(policy: Any, state: Mapping[str, Any]) -> None:
    """Checks a state as `set_stored_state` would, and changes nothing."""
    with policy.driver.allow_non_finite():
        policy.driver.check_state(state)


def _without_environment(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drops an environment that has no name from a config: no policy needs it."""
    env = config.get("env")
    return {**config, "env": env if isinstance(env, str) else None}


def _arrays_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a state by group, without empty groups.

    Python numbers, which custom policies may have as weights, become 0-d arrays.
    """
    groups = {group: state.get(key) for key, group in _GROUPS.items()}
    return {
        group: {
            name: np.asarray(x) if isinstance(x, bool | int | float) else x
            for name, x in arrays.items()
        }
        for group, arrays in groups.items()
        if isinstance(arrays, Mapping) and arrays
    }


def _asks_for_gpu(policy: Any) -> bool:
    return policy.driver.program is not None and bool(policy.config["num_gpus"])


def _warn_of_other_device(stored: str | None, policy: Any) -> None:
    """Logs that a policy which learned without a GPU now learns on one.

    A missing GPU is reported by the code that looks for it.
    """
    if stored == CPU and _asks_for_gpu(policy) and policy.devices != [CPU]:
        logger.warning(
            "policy %r learned on the CPU; with num_gpus=%s it now learns on the GPU; set "
            "num_gpus=0 to keep it on the CPU",
            *(policy.policy_id, policy.config["num_gpus"]),
        )


def _fingerprint(policy: Any, saved: Collection[str] | None = None) -> str | None:
    """Returns a hash that tells whether states fit a policy; None for custom policies."""
    program = policy.driver.program
    return program and program_fingerprint(program.spec, program.layout.slots, saved)


def policy_record(policy: Any) -> dict[str, Any]:
    """Returns the description of a policy without its variables, as JSON values."""
    part = policy_part(policy)
    warn_of_unavailable(part.manifest)
    filters = {key: encode_value(part.arrays[key]) for key in FILTERS if key in part.arrays}
    return {**part.manifest, "state": {**part.manifest["state"], **filters}}


def policy_of_record(
    record: Mapping[str, Any],
    source: str,
    classes: Sequence[type],
    num_weights: int,
    model_work_limit: float = 1.0,
) -> Any:
    """Returns the policy that `policy_record` described; its variables must be set afterwards.

    Args:
        record: the result of `policy_record`.
        source: where it is from, for messages.
        classes: policy classes outside this package that it may name.
        num_weights: upper bound for the number of weights.
        model_work_limit: see `limit_work`.

    Raises:
        CheckpointError: if it is damaged, or names an unknown class.
    """
    stored = StoredPolicy(Checkpoint(dict(record), {}, {}), source, classes)
    with built_from(source, num_weights), limit_work(model_work_limit):
        policy = stored.built()
    policy.set_state({**policy.get_state(), **stored.state})
    return policy


def _built_model(policy: Any) -> keras.Model | None:
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
    unneeded: Collection[str] = FOR_TRAINING

    @property
    def state(self) -> dict[str, Any]:
        """The state, as `set_state` takes it."""
        stored, arrays = self.checkpoint.manifest["state"], self.checkpoint.arrays
        if not isinstance(stored, Mapping):
            raise CheckpointError(f"A checkpoint's state must be a dict, got {stored!r:.80}.")
        state = {key: decode_value(value) for key, value in stored.items()}
        return state | {key: arrays[group] for key, group in _GROUPS.items() if group in arrays}

    def state_for(self, policy: Any, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the state for a policy whose config may differ from the stored one.

        Hyperparameters for which the two configs differ are taken from the policy's config; see
        `with_configured_hyperparameters`. The exploration state is dropped if the policy has
        another strategy. Classes with the same name count as the same strategy.

        Args:
            policy: the policy.
            overrides: settings that the caller named; None for those of this object.
        """
        state, settings = self.state, self.checkpoint.manifest["config"]["settings"]
        strategy, own = settings.get("exploration_config"), getattr(policy, "exploration", None)
        if own is not None and type(own).__name__ != _strategy_name(strategy):
            state.pop("_exploration_state", None)
        named = self.overrides if overrides is None else overrides
        return with_configured_hyperparameters(policy, state, decode_settings(settings), named)

    @property
    def spaces(self) -> tuple[Any, Any]:
        """The observation and the action space."""
        stored = self.checkpoint.manifest
        return decode_space(stored["observation_space"]), decode_space(stored["action_space"])

    @property
    def weight_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the weights."""
        return [np.shape(array) for array in self.checkpoint.arrays.get("weights", {}).values()]

    def require_finite(self, *, allow: bool) -> None:
        """Raises a `CheckpointError` if the weights have NaN or infinity, unless allowed."""
        found = None if allow else _first_bad(self.checkpoint.arrays)
        if found is not None:
            raise CheckpointError(
                f"{self.source} is not finite: {found[0]} is {found[1]}. It was saved while "
                "training continued with such numbers (on_nan='warn'). Load an older checkpoint; "
                "or give allow_non_finite=True to inspect this one."
            )

    def policy(self, *, allow_non_finite: bool = False) -> Any:
        """Returns a new policy with the stored class, spaces, config and state.

        Args:
            allow_non_finite: also accept weights with NaN or infinity.
        """
        self.require_finite(allow=allow_non_finite)
        with built_from(self.source, self.weight_shapes):
            policy = self.built()
        set_stored_state(policy, self.state_for(policy))
        return policy

    def built(self) -> Any:
        """Returns a new policy with the stored class, spaces and config, but fresh weights."""
        spec, manifest = self._stored_spec(), self.checkpoint.manifest
        found: Any = spec.policy_class
        program, policy_id = manifest.get("program"), manifest.get("policy_id")
        named = {"__policy_id": policy_id} if program is not None else {}
        policy = found(spec.observation_space, spec.action_space, {**spec.config, **named})
        if program is not None:
            stored = manifest["config"]["settings"]
            policy.automatic = {name: stored.get(name) for name in policy.automatic}
            _warn_of_other_device(manifest.get("device"), policy)
        if _fingerprint(policy, self._saved_hyperparameters(policy)) != program:
            raise CheckpointError(
                f"{self.source} does not fit {found.__name__}: the variables differ from the saved "
                "ones, or a hyper-parameter is missing. Load it with the class and model it was "
                "saved with."
            )
        return policy

    def _saved_hyperparameters(self, policy: Any) -> set[str]:
        state = self.checkpoint.manifest["state"]
        aliases = getattr(policy, "_state_aliases", {})
        aliased = {name for key, name in aliases.items() if key in state}
        return {*(state.get("hyperparameters") or ()), *aliased}

    def spec(self) -> PolicySpec:
        """Returns class, spaces and complete config, from which a worker creates the policy.

        The observation space is the environment's, before connectors; None if they do not store it.

        Raises:
            CheckpointError: if the manifest lacks it, or names an unknown class.
        """
        with built_from(self.source, self.weight_shapes):
            spec = self._stored_spec()
        try:
            agent, _ = pipelines_from_state(self.state.get("connector_configs") or {})
        except ConfigError as error:
            raise CheckpointError(f"{self.source}: {error}") from error
        if agent is None:
            return spec
        observed = agent.space if agent.is_connected else None
        return dataclasses.replace(spec, observation_space=observed)

    def _stored_spec(self) -> PolicySpec:
        manifest = self.checkpoint.manifest
        try:
            found, spaces = self.policy_class(), self.spaces
            record = manifest["config"]
            config = decode_config(record, self.overrides, self.source, unneeded=self.unneeded)
            config |= dict.fromkeys(automatic_of(manifest, config, self.overrides), "auto")
            _ = manifest["state"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.source}: its manifest lacks {error}, or has it malformed."
            ) from error
        return PolicySpec(found, *spaces, config)

    def policy_class(self) -> Any:
        """Returns the stored class.

        Raises:
            CheckpointError: if the manifest has none, or an unknown one.
        """
        stored: Any = self.checkpoint.manifest.get("policy_class")
        named = stored if isinstance(stored, Mapping) else {}
        name = named.get("$import") or named.get("$unavailable")
        if not isinstance(name, str):
            raise CheckpointError(f"{self.source} must name a policy class, got {stored!r:.80}.")
        known = {describe(each): each for each in self.classes}
        found = admitted(decode_value(stored), POLICY_CLASS, known=known)
        if isinstance(found, Missing) and not (found.importable and name.startswith("tfpolicies.")):
            raise CheckpointError(
                f"{self.source} holds a policy of the class {name}, which is not in this package."
            ).advised(
                f"Call `{name.rpartition(':')[2]}.from_checkpoint(path)` on your class.",
                {"algo": "MODULE:CLASS"},
            )
        if not fits(found, POLICY_CLASS.kind):
            raise CheckpointError(
                f"{self.source}: {name} is not a policy class that can be instantiated."
            )
        return found


def with_configured_hyperparameters(
    policy: Any,
    state: Mapping[str, Any],
    stored: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns a state that takes hyperparameters from a policy's config where the configs differ.

    A policy's hyperparameters may differ from its config, for example after `set_hyper`. They are
    kept where both configs agree. Where the configs differ, the user chose the value in the
    policy's config, so the state gets it. A hyperparameter with a schedule always follows the
    policy's schedule.

    Args:
        policy: the policy that the state is for.
        state: as `Policy.get_state` returns it; it is not changed.
        stored: the config of the policy that the state is from.
        overrides: settings that the user named: their values win even where both configs agree.
    """
    if policy.driver.program is None:
        return dict(state)
    spec, config, named = policy.program.spec, policy.config, overrides or {}

    def differs(name: str) -> bool:
        if callable(config.get(name)):  # a schedule, which computes the number
            return False
        if name not in config:
            return name in stored
        is_named = name in named and is_equal(named[name], config[name])
        return is_named or name not in stored or not is_equal(config[name], stored[name])

    hyperparameters = dict(state.get("hyperparameters") or {})
    state = {**state, "hyperparameters": hyperparameters}
    keys = {name: key for key, name in policy._state_aliases.items()}
    as_lr = spec.rates_as_lr(config)
    for name, value in zip(spec.hyperparameters, spec.hyper_values(config), strict=True):
        sources = [name, f"{name}_schedule", policy._switches.get(name, name)]
        if any(map(differs, [*sources, *["lr", "lr_schedule"] * (name in as_lr)])):
            target = state if name in keys else hyperparameters
            target[keys.get(name, name)] = None if value == math.inf else value
    return state


def _strategy_name(record: Json) -> str:
    kind = record.get("type") if isinstance(record, Mapping) else None
    if isinstance(kind, Mapping):
        kind = kind.get("$import") or kind.get("$unavailable")
    return re.split("[.:]", str(kind or StochasticSampling.__name__))[-1]


def policies_in(whole: Checkpoint, source: str, *more: Any) -> dict[str, StoredPolicy]:
    """Returns the policies of an algorithm's checkpoint, by id.

    Args:
        checkpoint: the checkpoint.
        source: where it is from, for messages.
        *attributes: further attributes of each `StoredPolicy`.
    """
    return {
        pid: StoredPolicy(part, f"policy {pid!r} of {source}", *more)
        for pid, part in whole.policies.items()
    }


def write_policy_checkpoint(
    policy: Any, folder: str | os.PathLike[str], state: Mapping[str, Any] | None
) -> None:
    """Writes a policy into a folder, replacing a checkpoint that is there."""
    part = policy_part(policy, state)
    warn_of_unavailable(part.manifest)
    write_checkpoint(folder, part.manifest_name, part.manifest, part.arrays)


def reduced(policy: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the `__reduce__` value of a policy: its checkpoint and unserializable settings.

    Raises:
        UnpicklableError: if its class, or one of those settings, cannot be imported by a name.
    """
    part, kind = policy_part(policy), type(policy)
    stored = decode_settings(part.manifest["config"]["settings"])
    given = {name: policy.config[name] for name, value in stored.items() if find_missing(value)}
    given["worker_index"] = policy._worker_index
    given = travelling(given)
    require_named({"the class of the policy": kind, "config": given})
    return _unpickled, (kind, frozen_part(part), given)


def _unpickled(policy_class: type, frozen: Any, given: Mapping[str, Any]) -> Any:
    source = f"A pickled {policy_class.__name__}"
    stored = StoredPolicy(checkpoint_of(frozen), source, [policy_class], arrived(given))
    with limit_work(math.inf):  # unpickling requires a trusted source anyway
        return stored.policy()


def path_of(checkpoint: Any) -> str | os.PathLike[str]:
    """Returns the folder of a checkpoint: a path, or the result of `Algorithm.save`."""
    found = getattr(checkpoint, "checkpoint", checkpoint)
    path: str | os.PathLike[str] = getattr(found, "path", found)
    return path


def load_policies(
    path: str | os.PathLike[str],
    policy_ids: Sequence[str] | None,
    policy_class: type,
    overrides: Mapping[str, Any] | None,
    *,
    allow_non_finite: bool = False,
    known: Sequence[type] = (),
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
    folder, classes = resolve_path(path), [policy_class, *known]
    source = repr(os.fspath(path))
    parent, name = folder.parent.parent, folder.name
    is_part = folder.parent.name == "policies" and (parent / ALGORITHM_MANIFEST).exists()
    if is_part and policy_ids is None and not folder.exists():  # the path ends with a policy id
        found = load_policies(
            parent, [name], policy_class, overrides, allow_non_finite=allow_non_finite, known=known
        )
        return found[name]
    if (folder / POLICY_MANIFEST).exists() or not (folder / ALGORITHM_MANIFEST).exists():
        if policy_ids is not None:
            read_manifest(path, POLICY_MANIFEST, kind="Policy")
            raise CheckpointError(
                f"{source} is the checkpoint of one policy; leave policy_ids out."
            )
        checkpoint = read_checkpoint(path, POLICY_MANIFEST, kind="Policy")
        single = StoredPolicy(checkpoint, source, classes, overrides)
        _require_class({None: single}, source, policy_class)
        return single.policy(allow_non_finite=allow_non_finite)
    chosen = None if policy_ids is None else list(policy_ids)
    whole = read_checkpoint(path, ALGORITHM_MANIFEST, kind="Algorithm", groups=[], policies=chosen)
    stored = policies_in(whole, source, classes, overrides)
    _require_class(stored, source, policy_class)
    return {pid: each.policy(allow_non_finite=allow_non_finite) for pid, each in stored.items()}


def _require_class(found: Mapping[Any, StoredPolicy], source: str, wanted: type) -> None:
    """Checks that policies, by id (None for a single one), are of a class or its subclasses."""
    classes = {pid: stored.policy_class() for pid, stored in found.items()}
    others = {pid: kind for pid, kind in classes.items() if not issubclass(kind, wanted)}
    if not others:
        return
    own = [pid for pid in classes if pid not in others]
    held = ", ".join(
        kind.__name__ if pid is None else f"{pid!r} ({kind.__name__})"
        for pid, kind in others.items()
    )
    kinds = {kind.__name__ for kind in classes.values()}
    calls = [f"{name}.from_checkpoint(path)" for name in kinds if len(kinds) == 1]
    calls += [f"{wanted.__name__}.from_checkpoint(path, policy_ids={own})"] if own else []
    calls += ["Policy.from_checkpoint(path)"]
    what = "a policy of the class" if None in others else "policies of other classes,"
    raise CheckpointError(
        f"{source} holds {what} {held}, but should be loaded as {wanted.__name__}. Call "
        f"{' or '.join(calls)}; the last accepts all classes."
    )
