"""Checkpoint folders of algorithms: writing them and restoring from them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from tfpolicies.algorithms.algorithm_card import make_algorithm_card
from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol, PolicyStateDicts
from tfpolicies.algorithms.training_state import MALFORMED_ERRORS, get_progress, read_training_state
from tfpolicies.base.warn_once import warn_once
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.config_serialization import (
    decode_and_override,
    decode_config,
    encode_config,
    from_pickle,
    get_stored_auto,
    to_pickle,
)
from tfpolicies.config.live_dict import is_equal
from tfpolicies.config.multi_agent import as_predicate, require_mapping_fn
from tfpolicies.config.multi_agent_setup import (
    UPDATE_SETTINGS,
    make_policy_config,
    without_run_settings,
)
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID, PolicySpec
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.config.settings_allowlist import (
    ALGORITHM_SETTINGS,
    POLICY_CLASS,
    ROSTER,
    decode_settings,
)
from tfpolicies.distributed import worker_protocol
from tfpolicies.distributed.tune import make_default_config
from tfpolicies.envs.env_factory import EnvContext, make_any_environments
from tfpolicies.envs.env_registry import ENVIRONMENTS
from tfpolicies.envs.episode_state import encode_episode_states
from tfpolicies.envs.vector_adapters import VectorEnvAdapter
from tfpolicies.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    UnpicklableError,
    UnsupportedMethodError,
)
from tfpolicies.export.model_card import export_facts
from tfpolicies.models.registry import MODELS
from tfpolicies.models.size_check import limit_to_stored_weights
from tfpolicies.models.work import limit_work
from tfpolicies.offline.experience_io import UnavailableData
from tfpolicies.policy.policy_checkpoints import (
    StoredPolicy,
    apply_configured_hyperparameters,
    check_stored_state,
    custom_object_scope,
    get_path,
    make_policy_part,
    make_stored_policies,
    set_stored_state,
)
from tfpolicies.rollout.policy_changes import MappingAndTrainable
from tfpolicies.rollout.rollout_worker import RolloutWorker
from tfpolicies.rollout.space_checks import require_trained_spaces
from tfpolicies.rollout.worker_policies import WorkerPolicies
from tfpolicies.rollout.worker_state import restore_sampling
from tfpolicies.storage.allowed_objects import AllowedObject, resolve_allowed
from tfpolicies.storage.checkpoint import (
    Checkpoint,
    CheckpointData,
    read_checkpoint,
    write_checkpoint,
)
from tfpolicies.storage.generator_json import encode_generator
from tfpolicies.storage.import_paths import get_declared_path
from tfpolicies.storage.json_values import (
    UnresolvedObject,
    decode_value,
    encode_value,
    find_unresolved,
)
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST
from tfpolicies.storage.nested_arrays import extract_arrays
from tfpolicies.storage.pickling import check_picklable_by_name, restore_checkpoint, serialize_part
from tfpolicies.storage.segment_files import Segment
from tfpolicies.system.paths import resolve_path

logger = logging.getLogger(__name__)

_DATA_SETTINGS = ("input_", "input_config", "output", "output_config")


class CheckpointPath(str):
    """The folder of a checkpoint, with the objects that cannot be stored in a file.

    Pickling, copying or joining it gives a plain `str`.

    Args:
        folder: of the checkpoint.
        settings: those of the algorithm's settings that cannot be stored.
        functions: those of its mapping and trainable functions that cannot be stored.
    """

    settings: dict[str, Any]
    functions: MappingAndTrainable

    def __new__(
        cls, folder: str, settings: dict[str, Any], functions: MappingAndTrainable
    ) -> CheckpointPath:
        path = super().__new__(cls, folder)
        path.settings, path.functions = settings, functions
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


class SavedCheckpoint(NamedTuple):
    """The location of a checkpoint."""

    path: str


class SaveResult(NamedTuple):
    """The return value of `Algorithm.save`."""

    checkpoint: SavedCheckpoint
    metrics: dict[str, Any]  # of the last training iteration


class AlgorithmSnapshot(NamedTuple):
    """A snapshot of an algorithm for a checkpoint; further training does not change it."""

    manifest: dict[str, Any]
    arrays: dict[str, dict[str, np.ndarray]]
    policies: dict[str, CheckpointData]
    segments: list[Segment]

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes it into a folder, replacing the checkpoint there.

        Raises:
            CheckpointError: if it cannot be written.
        """
        write_checkpoint(
            folder,
            ALGORITHM_MANIFEST,
            self.manifest,
            self.arrays,
            policies=self.policies,
            segments=self.segments,
        )

    def as_stored_algorithm(self, source: str) -> StoredAlgorithm:
        """Returns the stored algorithm without arrays and policies."""
        return StoredAlgorithm(Checkpoint(self.manifest, {}, {}), source)


def make_snapshot(
    algorithm: AlgorithmProtocol, policy_states: PolicyStateDicts | None = None
) -> AlgorithmSnapshot:
    """Returns a snapshot of an algorithm with its policies, as copies.

    Args:
        algorithm: the algorithm to copy.
        policy_states: by policy id, states to use instead of the current ones.
    """
    replacement_states = policy_states or {}
    worker = algorithm.worker
    sampler_state, sampler_arrays = _encode_sampler(worker)
    extra_arrays: dict[str, np.ndarray] = {}
    segments: list[Segment] = []
    extra = extract_arrays(algorithm.get_extra_state(), extra_arrays, segments)
    meter_arrays: dict[str, np.ndarray] = {}
    row_meter = extract_arrays(algorithm._train_batch_sampler.row_meter.get_state(), meter_arrays)
    manifest = {
        "type": "Algorithm",
        "algorithm_class": encode_value(type(algorithm)),
        "config": encode_config(algorithm.config.to_dict()),
        "automatic": algorithm.config.get_auto_settings(),
        "progress": encode_value(get_progress(algorithm)),
        "roster": _encode_mapping_and_trainable(worker.policies),
        "worker": {
            "seeds_used": worker.seeds.num_calls,
            "rng": None if worker.sampler is None else encode_generator(worker.sampler.rng),
            "global_vars": encode_value(worker.global_vars),
            "sampler": sampler_state,
            "input_positions": [[*x] for x in sorted(algorithm.workers.input_positions.items())],
        },
        "evaluation": _encode_evaluation(algorithm.evaluation_worker),
        "extra": encode_value(extra),
        "row_meter": encode_value(row_meter),
    }
    trainable_only = algorithm.config.checkpoint_trainable_policies_only
    policies = {
        pid: make_policy_part(policy, replacement_states.get(pid))
        for pid, policy in worker.policy_map.items()
        if not trainable_only or worker.policies.is_trained(pid)
    }
    manifest["finite"] = all(part.manifest["finite"] for part in policies.values())
    groups = {"sampler": sampler_arrays, "extra": extra_arrays, "row_meter": meter_arrays}
    arrays = {name: group for name, group in groups.items() if group}
    return AlgorithmSnapshot(manifest, arrays, policies, segments)


def _export_models(
    algorithm: AlgorithmProtocol,
    snapshot: AlgorithmSnapshot,
    folder: Path,
    states: PolicyStateDicts,
) -> None:
    """Writes a SavedModel of each policy with a Keras model; `states` replace current ones."""
    for policy_id in snapshot.policies:
        policy: Any = algorithm.worker.policy_map[policy_id]
        if policy_id in states:
            policy = policy.copy()
            policy.set_state(states[policy_id])
        card = make_algorithm_card(algorithm, policy_id)
        with contextlib.suppress(UnsupportedMethodError), export_facts(card):
            policy.export_model(folder / "policies" / quote(policy_id, safe=" ") / "model")


def save(
    algorithm: AlgorithmProtocol,
    checkpoint_dir: str | os.PathLike[str] | None,
    policy_states: PolicyStateDicts | None,
) -> SavedCheckpoint:
    """Writes the checkpoint of an algorithm; see `Algorithm.save`.

    Args:
        algorithm: an `Algorithm`.
        checkpoint_dir: the folder; None for one named after the iteration.
        policy_states: states to write instead of the current ones, by policy id.

    Raises:
        CheckpointError: if it cannot be written.
        ExportError: if a SavedModel cannot be written; the checkpoint is complete.
    """
    folder = resolve_path(checkpoint_dir or f"checkpoint_{algorithm.iteration:06d}")
    snapshot = make_snapshot(algorithm, policy_states)
    snapshot.write(folder)
    if algorithm.config.export_native_model_files:
        _export_models(algorithm, snapshot, folder, policy_states or {})
    if snapshot.manifest["finite"] and not policy_states:
        algorithm._last_finite_checkpoint = str(folder)
    stored_algorithm = snapshot.as_stored_algorithm(repr(str(folder)))
    settings, functions = collect_unserializable(algorithm, stored_algorithm)
    _warn_unserializable(algorithm, stored_algorithm)
    if algorithm.config.reset_episodes_at_checkpoint:
        algorithm.workers.foreach_worker(worker_protocol.request_new_episodes)
        if needs_environment(algorithm.config.input_):
            num_workers = max(1, algorithm.config.num_rollout_workers)
            algorithm._metrics.add_reset(algorithm.workers.num_envs() * num_workers)
    return SavedCheckpoint(CheckpointPath(str(folder), settings, MappingAndTrainable(**functions)))


def _warn_unserializable(algorithm: AlgorithmProtocol, stored_algorithm: StoredAlgorithm) -> None:
    """Warns once about the objects a caller must pass again when loading the checkpoint."""
    if not algorithm.warns_about_unserializable:
        return
    registered_names = _find_registered_names(algorithm.config)
    if registered_names:
        algorithm.warns_about_unserializable = False
        logger.warning(
            "This checkpoint refers to registered names: %s. Register them before you load it in "
            "another process.",
            ", ".join(registered_names),
        )
    unserializable = stored_algorithm.get_unserializable()
    if unserializable is not None:
        algorithm.warns_about_unserializable = False
        logger.warning(
            "This checkpoint does not store these objects, since a file must not choose "
            "imports: %s. Pass them when you load it: %s.%s.",
            unserializable.names,
            type(algorithm).__name__,
            unserializable.call,
        )


def _find_registered_names(config: AlgorithmConfig) -> list[str]:
    """Returns the environment and the models of an algorithm that are registered names."""
    configs = [config, *(spec.config for spec in config.policies.values())]
    models = [(x.get("model") or {}).get("custom_model") for x in configs if x is not None]
    names = {f"the environment {config['env']!r}": ENVIRONMENTS.find(config["env"])}
    names |= {f"the model {model!r}": MODELS.find(model) for model in models}
    return [name for name, value in names.items() if value is not None]


def reduce_algorithm(algorithm: AlgorithmProtocol) -> tuple[Any, tuple[Any, ...]]:
    """Returns the `__reduce__` value: the checkpoint, and the objects that cannot be stored in it.

    Raises:
        UnpicklableError: if its class, or one of these objects, cannot be imported by name; or if
            the class of an added policy is not named in the config.
    """
    snapshot = make_snapshot(algorithm)
    manifest, arrays, policies, segments = snapshot
    stored_algorithm = snapshot.as_stored_algorithm(repr(algorithm))
    settings, functions = collect_unserializable(algorithm, stored_algorithm)
    settings = to_pickle(settings)
    algorithm_class = type(algorithm)
    check_picklable_by_name(
        {"the class of the algorithm": algorithm_class, "config": settings, **functions}
    )
    for pid in policies.keys() - algorithm.config.policies.keys():
        _require_named_policy_class(pid, policies[pid])
    policy_parts = {pid: serialize_part(part) for pid, part in policies.items()}
    algorithm_part = serialize_part(CheckpointData(ALGORITHM_MANIFEST, manifest, arrays))
    return _unpickle_algorithm, (
        algorithm_class,
        algorithm_part,
        policy_parts,
        settings,
        functions,
        segments,
    )


def collect_unserializable(
    algorithm: AlgorithmProtocol, stored_algorithm: StoredAlgorithm
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the settings and the functions of an algorithm that no file can hold, by name."""
    settings = algorithm.config.to_dict()
    current_functions = algorithm.worker.policies.mapping_and_trainable._asdict()
    stored_functions = stored_algorithm.functions._asdict()
    functions = {
        name: function
        for name, function in current_functions.items()
        if isinstance(stored_functions[name], UnresolvedObject)
    }
    return {name: settings[name] for name in stored_algorithm.get_missing_settings()}, functions


def _require_named_policy_class(policy_id: str, part: CheckpointData) -> None:
    policy_class = resolve_allowed(decode_value(part.manifest["policy_class"]), POLICY_CLASS)
    if isinstance(policy_class, UnresolvedObject):
        raise UnpicklableError(
            f"The class {policy_class.name} of the added policy {policy_id!r} is not in the "
            "config. Name it there, multi_agent(policies={...}), before you build the algorithm; "
            "or pickle the policies themselves."
        )


def _unpickle_algorithm(
    algorithm_class: type,
    algorithm_part: tuple[bytes, Any],
    policies: Mapping[str, tuple[bytes, Any]],
    settings: Mapping[str, Any],
    functions: Mapping[str, Any],
    segments: Sequence[Segment],
) -> Any:
    source = f"A pickled {algorithm_class.__name__}"
    checkpoint = restore_checkpoint(algorithm_part, policies, segments)
    stored_algorithm = StoredAlgorithm(
        checkpoint, source, MappingAndTrainable(**functions), from_pickle(settings)
    )
    return stored_algorithm.build(algorithm_class, allow_non_finite=True, model_work_limit=math.inf)


def _encode_sampler(worker: RolloutWorker) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns the running episodes, if the environments support `get_state`."""
    sampler = worker.sampler
    resets = worker.config.reset_episodes_at_checkpoint and worker.environments is not None
    stores_episodes = worker.has_episodes and not resets
    arrays: dict[str, np.ndarray] = {}
    try:
        state = sampler.get_state() if stores_episodes and sampler is not None else None
        if state is None:
            return None, arrays
        envs = encode_episode_states(state.pop("envs"))
    except EnvError as error:
        warn_once(
            "Checkpoints do not contain the running episodes, so a resumed run starts new ones: "
            "%s See the cause with tfpolicies.envs.check_env(env).",
            error,
        )
        return None, arrays
    del state["rng"]  # stored separately
    return {"envs": envs, "running": encode_value(extract_arrays(state, arrays))}, arrays


def _encode_mapping_and_trainable(policies: WorkerPolicies) -> dict[str, Any]:
    """Returns the mapping function and the trained policies; functions as import paths."""
    to_train = policies.is_policy_to_train
    ids = getattr(to_train, "ids", None)
    return {
        "policy_mapping_fn": encode_value(policies.policy_mapping_fn),
        "policies_to_train": encode_value(to_train if ids is None else sorted(ids)),
    }


def _encode_evaluation(worker: RolloutWorker | None) -> Any:
    if worker is None:
        return None
    generators_by_policy = {
        pid: policy.driver.generator for pid, policy in worker.policy_map.items()
    }
    generators = {
        pid: encode_generator(rng) for pid, rng in generators_by_policy.items() if rng is not None
    }
    return {"seeds_used": worker.seeds.num_calls, "rngs": generators}


_NO_OVERRIDES = MappingAndTrainable()


def resolve_overrides(
    checkpoint: str | os.PathLike[str] | SaveResult,
    functions: MappingAndTrainable,
    overrides: Mapping[str, Any] | None,
) -> tuple[MappingAndTrainable, dict[str, Any]]:
    """Returns the functions and settings that replace stored ones.

    Args:
        checkpoint: a path, or the return value of `Algorithm.save`.
        functions: from the caller's arguments; None for those not given.
        overrides: settings from the caller, which may include functions.
    """
    settings = dict(overrides or {})
    function_settings = {name: settings.pop(name, None) for name in MappingAndTrainable._fields}
    path = get_path(checkpoint)
    functions = _fill_missing_functions(functions, MappingAndTrainable(**function_settings))
    if not isinstance(path, CheckpointPath):
        return functions, settings
    return _fill_missing_functions(functions, path.functions), {**path.settings, **settings}


def _fill_missing_functions(
    functions: MappingAndTrainable, defaults: MappingAndTrainable
) -> MappingAndTrainable:
    pairs = zip(functions, defaults, strict=True)
    return MappingAndTrainable(
        *(default if function is None else function for function, default in pairs)
    )


class Unserializable(NamedTuple):
    """Objects that a file cannot hold safely, so they must be passed when loading."""

    names: str  # of settings and arguments, with their values
    call: str  # that passes them
    settings: Mapping[str, str]  # import paths of their values, by name


def _get_import_names(missing: Mapping[str, Mapping[str, UnresolvedObject]]) -> dict[str, str]:
    """Returns the import path of each setting's object, or "MODULE:NAME" if it has none.

    The setting `policies` has the paths of policy classes, joined by commas; objects elsewhere in
    it have names of their own.

    Args:
        missing: by setting and location in it.
    """
    names: dict[str, list[str]] = {}
    for setting, objects in missing.items():
        for place, x in objects.items():
            is_nested = setting == "policies" and not re.fullmatch(r"\[[^]]*\]\[0\]", place)
            path = x.name.replace("__main__:", "MODULE:") if x.importable else "MODULE:NAME"
            names.setdefault(f"{setting}{place}" if is_nested else setting, []).append(path)
    return {
        name: ",".join(dict.fromkeys(paths)) if name == "policies" else paths[-1]
        for name, paths in names.items()
    }


@dataclasses.dataclass(frozen=True)
class StoredAlgorithm:
    """An algorithm as stored in a checkpoint.

    Attributes:
        checkpoint: of the algorithm.
        source: the origin, for messages.
        function_overrides: functions that replace stored ones, where not None.
        overrides: settings that replace stored ones.
    """

    checkpoint: Checkpoint
    source: str
    function_overrides: MappingAndTrainable = _NO_OVERRIDES
    overrides: Mapping[str, Any] | None = None

    @classmethod
    def read(
        cls,
        folder: str | os.PathLike[str],
        policy_ids: Collection[str] | None = None,
        *overrides: Any,
    ) -> StoredAlgorithm:
        """Reads and checks a checkpoint.

        Args:
            folder: its path, as the caller wrote it.
            policy_ids: the policies to read; None for all.
            *overrides: `given` and `overrides`.

        Raises:
            CheckpointError: if it is missing, damaged or of another format.
            UnknownPolicyError: if one of `policy_ids` is not in it.
        """
        requested_ids = None if policy_ids is None else list(policy_ids)
        checkpoint = read_checkpoint(
            folder, ALGORITHM_MANIFEST, kind="Algorithm", policies=requested_ids
        )
        return cls(checkpoint, repr(os.fspath(folder)), *overrides)

    def get_policies(self, classes: Sequence[type] = ()) -> dict[str, StoredPolicy]:
        """Returns the policies by id; `classes` are allowed in addition to this package's."""
        return make_stored_policies(self.checkpoint, self.source, classes)

    def require_finite(self, *, allow: bool) -> None:
        """Raises a `CheckpointError` if weights have NaN or infinity, unless allowed."""
        for stored_policy in self.get_policies().values():
            stored_policy.require_finite(allow=allow)

    # -- objects that a file cannot hold ------------------------------------------------------

    @property
    def functions(self) -> MappingAndTrainable:
        """The mapping and the trained policies; `UnresolvedObject` for functions not allowed."""
        roster = self.checkpoint.manifest["roster"]
        resolved = {
            name: resolve_allowed(decode_value(roster[name]), ROSTER[name])
            if value is None
            else value
            for name, value in self.function_overrides._asdict().items()
        }
        return MappingAndTrainable(**resolved)

    def get_missing_settings(self) -> dict[str, dict[str, UnresolvedObject]]:
        """Returns the `UnresolvedObject` values of the config, by setting and location in it."""
        record = {**self.checkpoint.manifest["config"], "keras": None}
        overrides = {**dict.fromkeys(MappingAndTrainable._fields), **(self.overrides or {})}
        config = decode_and_override(record, overrides, self.source, ALGORITHM_SETTINGS)
        settings = {
            name: find_unresolved(value)
            for name, value in config.items()
            if name not in _DATA_SETTINGS  # acting does not need them
        }
        return {name: missing for name, missing in settings.items() if missing}

    def get_unserializable(self) -> Unserializable | None:
        """Returns all objects that must be passed when loading; None if there are none.

        These are functions and classes of other packages, and objects without an import path.
        """
        roster = self.functions._asdict()
        functions = {name: x for name, x in roster.items() if isinstance(x, UnresolvedObject)}
        settings = self.get_missing_settings()
        names = [
            f"config[{name!r}]{place} ({missing_value.name})"
            for name, missing in settings.items()
            for place, missing_value in missing.items()
        ]
        names += [f"{name} ({missing_value.name})" for name, missing_value in functions.items()]
        if not names:
            return None
        arguments = [f"{name}=..." for name in functions]
        if settings:
            parts = ", ".join(f"{name!r}: ..." for name in settings)
            arguments.insert(0, f"config={{{parts}}}")
        call = f"from_checkpoint(path, {', '.join(arguments)})"
        missing_functions = {name: {"": x} for name, x in functions.items()}
        return Unserializable(
            ", ".join(names), call, _get_import_names({**settings, **missing_functions})
        )

    def get_mapping_and_trainable(
        self, defaults: MappingAndTrainable = _NO_OVERRIDES
    ) -> MappingAndTrainable:
        """Returns the mapping function and the trained policies.

        Args:
            defaults: replaces functions that the file cannot hold.
        """
        resolved = {
            name: getattr(defaults, name) if isinstance(value, UnresolvedObject) else value
            for name, value in self.functions._asdict().items()
        }
        ids = resolved["policies_to_train"]
        if isinstance(ids, list) and self.function_overrides.policies_to_train is None:
            resolved["policies_to_train"] = [pid for pid in ids if pid in self.checkpoint.policies]
        return MappingAndTrainable(**resolved)

    # -- loading ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _convert_manifest_errors(self) -> Iterator[None]:
        """Converts errors caused by a malformed manifest into `CheckpointError`."""
        try:
            yield
        except CheckpointError:
            raise
        except MALFORMED_ERRORS as error:
            text = f"{self.source}: its manifest lacks or garbles {error}."
            raise CheckpointError(text) from error

    def build(
        self,
        algorithm_class: type,
        *,
        allow_other_spaces: bool = False,
        allow_non_finite: bool = False,
        custom_objects: Mapping[str, Any] | None = None,
        model_work_limit: float = 1.0,
    ) -> Any:
        """Builds and restores the algorithm; see `Algorithm.from_checkpoint`.

        Args:
            algorithm_class: the required class; subclasses are allowed.
            allow_other_spaces: as in `from_checkpoint`.
            allow_non_finite: as in `from_checkpoint`.
            custom_objects: as in `from_checkpoint`.
            model_work_limit: as in `from_checkpoint`.
        """
        with self._convert_manifest_errors():
            algorithm_class, unserializable = (
                self._resolve_class(algorithm_class),
                self.get_unserializable(),
            )
        self.require_finite(allow=allow_non_finite)
        if unserializable is not None:
            raise CheckpointError(
                f"{self.source} was saved with objects that a file cannot hold safely: "
                f"{unserializable.names}."
            ).add_advice(f"Pass them when loading: {unserializable.call}.", unserializable.settings)
        shapes: Counter[tuple[int, ...]] = Counter()  # that weights must have
        for stored_policy in self.get_policies().values():
            shapes |= Counter(stored_policy.weight_shapes)
        scope, source = custom_object_scope(custom_objects or {}), self.source
        with (
            scope,
            limit_work(model_work_limit),
            limit_to_stored_weights(source, shapes.elements()),
        ):
            algorithm = self._build_algorithm(algorithm_class)
        try:
            with limit_work(model_work_limit):
                self.restore(algorithm, allow_other_spaces=allow_other_spaces)
        except BaseException:
            algorithm.stop()
            raise
        return algorithm

    def _resolve_class(self, base_class: type) -> type:
        class_record = self.checkpoint.manifest["algorithm_class"]
        allowed = {get_declared_path(base_class): base_class}
        stored_class = resolve_allowed(
            decode_value(class_record), AllowedObject("algorithm_class"), objects=allowed
        )
        if isinstance(stored_class, UnresolvedObject) and not stored_class.name.startswith(
            "tfpolicies."
        ):
            raise CheckpointError(
                f"{self.source} holds an algorithm of the class {stored_class.name}, which is not "
                "part of this package."
            ).add_advice("Call `from_checkpoint` on your class.", {"algo": stored_class.name})
        if not isinstance(stored_class, type):
            raise CheckpointError(f"{self.source} names {stored_class!r} as its algorithm's class.")
        if not issubclass(stored_class, base_class):
            raise CheckpointError(
                f"{self.source} holds an algorithm of the class {stored_class.__name__}, not of "
                f"{base_class.__name__}. Call `{stored_class.__name__}.from_checkpoint(path)`, or "
                "`Algorithm.from_checkpoint(path)` for any class."
            )
        return stored_class

    def _build_algorithm(self, algorithm_class: type) -> Any:
        config = self._make_config(algorithm_class)
        specs = config.policies
        if config.is_multi_agent():  # else added policies are added again when restoring
            policies_to_train = self.get_mapping_and_trainable().policies_to_train
            config.multi_agent(policies_to_train=policies_to_train)
            specs = self._make_policy_specs(config)
        default_class = config._get_default_policy_class()
        config.multi_agent(
            policies={
                pid: without_run_settings(config, pid, spec, default_class)
                for pid, spec in specs.items()
            }
        )
        try:
            return algorithm_class(config)
        except CheckpointError:
            self._require_trained_environment(config)
            raise

    def _make_config(self, algorithm_class: type) -> Any:
        manifest = self.checkpoint.manifest
        with self._convert_manifest_errors():
            roster = self.get_mapping_and_trainable()._asdict()
        overrides = {**roster, "policies_to_train": None, **(self.overrides or {})}
        settings = decode_config(
            manifest["config"],
            overrides,
            self.source,
            ALGORITHM_SETTINGS,
            unneeded=_DATA_SETTINGS,
        )
        _replace_unavailable_data(settings)
        automatic = get_stored_auto(manifest, settings, overrides)
        settings |= dict.fromkeys(automatic, "auto")
        try:
            config = make_default_config(algorithm_class).update_from_dict(settings)
        except ConfigError as error:
            raise CheckpointError(f"{self.source}: {error}") from error
        config.restore_resolved_auto(automatic)
        return config

    def _make_policy_specs(self, config: AlgorithmConfig) -> dict[str, PolicySpec]:
        """Returns the policy specs, including those of policies that are not in the config.

        Raises:
            CheckpointError: if a policy cannot be created from its stored record.
        """
        configured_specs = config.policies
        classes = [
            spec.policy_class for spec in configured_specs.values() if spec.policy_class is not None
        ]
        return {
            pid: configured_specs[pid]
            if pid in configured_specs
            else self._make_policy_spec(pid, stored_policy, config)
            for pid, stored_policy in self.get_policies(classes).items()
        }

    def _make_policy_spec(
        self, policy_id: str, stored_policy: StoredPolicy, config: AlgorithmConfig
    ) -> PolicySpec:
        spec = self._with_algorithm_settings(stored_policy, config).get_spec()
        algorithm_settings = make_policy_config(config, policy_id, spec.policy_class, {}).to_dict()
        overrides = {  # shared settings may differ in evaluation
            name: value
            for name, value in spec.config.items()
            if name not in algorithm_settings or not is_equal(value, algorithm_settings[name])
        }
        return dataclasses.replace(spec, config=overrides)

    def _with_algorithm_settings(
        self, stored_policy: StoredPolicy, config: AlgorithmConfig
    ) -> StoredPolicy:
        """Returns a policy with its algorithm's settings, where both had the same stored value.

        The config of an added policy is mostly a copy of the algorithm's. So objects that no file
        holds, such as callbacks or a model, apply to both, and so do numbers that the algorithm has
        changed since.

        Args:
            stored_policy: the policy.
            config: of the algorithm, complete.
        """
        records = [_get_dict(x.checkpoint.manifest, "config") for x in (stored_policy, self)]
        policy_settings, algorithm_settings = (_get_dict(record, "settings") for record in records)
        names = [
            *_get_equal_unserializable_names(policy_settings, algorithm_settings),
            *self._get_changed_settings(stored_policy, policy_settings, algorithm_settings, config),
        ]
        overrides = {name: config[name] for name in names if name in config}
        model_names = _get_equal_unserializable_names(
            _get_dict(policy_settings, "model"), _get_dict(algorithm_settings, "model")
        )
        model_overrides = {
            name: config["model"][name] for name in model_names if name in config["model"]
        }
        models = [record.get("keras") for record in records]
        if models[0] is not None and models[0] == models[1]:
            model_overrides["custom_model"] = config["model"]["custom_model"]
        if model_overrides:
            overrides["model"] = model_overrides
        return dataclasses.replace(stored_policy, overrides=overrides, optional_settings=())

    def _get_changed_settings(
        self,
        stored_policy: StoredPolicy,
        policy_settings: Mapping[str, Any],
        algorithm_settings: Mapping[str, Any],
        config: AlgorithmConfig,
    ) -> list[str]:
        """Returns the settings that a policy shared with its algorithm and the algorithm changed.

        Only hyperparameters, their schedules, settings of updates, and those that the caller named
        are compared.
        """
        hyperparameters = getattr(stored_policy.get_policy_class(), "hyperparameters", ())
        names = {
            *hyperparameters,
            *(f"{name}_schedule" for name in hyperparameters),
            *UPDATE_SETTINGS,
            *(self.overrides or ()),
        }
        equal_names = sorted(
            (names - {"model"}).intersection(_get_equal_names(policy_settings, algorithm_settings))
        )
        stored_values = decode_settings({name: policy_settings[name] for name in equal_names})
        return [x for x in equal_names if x in config and not is_equal(config[x], stored_values[x])]

    def _require_trained_environment(self, config: AlgorithmConfig) -> None:
        """Checks that the environment of a config has the spaces of the policy.

        Built policies are compared with their environment anyway. This explains why a policy could
        not be built, and creates an environment for that. Environments with several agents or
        connectors are not compared.

        Raises:
            SpaceError: if the spaces differ.
        """
        stored_policy = self.get_policies().get(DEFAULT_POLICY_ID)
        has_connectors = config.agent_connectors or config.action_connectors
        envs = make_any_environments(config.env, 1, EnvContext(config.env_config), checked=False)
        if envs is None:
            return
        try:
            if (
                stored_policy is not None
                and not has_connectors
                and isinstance(envs, VectorEnvAdapter)
            ):
                env_spaces = (envs.observation_space, envs.action_space)
                require_trained_spaces(
                    DEFAULT_POLICY_ID, stored_policy.spaces, env_spaces, allow_different=True
                )
        finally:
            envs.close()

    def restore(self, algorithm: AlgorithmProtocol, *, allow_other_spaces: bool = False) -> None:
        """Restores the stored state into an algorithm; checks everything before changing it.

        Finiteness is not checked; call `require_finite` before. Policies missing in the algorithm
        are added, those missing in the checkpoint are removed. Functions that the file cannot hold
        are kept.

        Raises:
            CheckpointError: if the checkpoint does not fit the algorithm.
            SpaceError: if the algorithm's environment has other spaces; see
                `require_trained_spaces`.
        """
        worker = algorithm.worker
        stored_policies = self.get_policies([type(policy) for policy in worker.policy_map.values()])
        new_policies = {
            pid: self._with_algorithm_settings(stored_policy, algorithm.config).make_policy(
                allow_non_finite=True
            )
            for pid, stored_policy in stored_policies.items()
            if pid not in worker.policy_map
        }
        with self._convert_manifest_errors():
            existing_policies = {
                pid: worker.get_policy(pid) for pid in stored_policies.keys() - new_policies.keys()
            }
            states = {
                pid: stored_policies[pid].make_state_for(x, self.overrides)
                for pid, x in existing_policies.items()
            }
            trained_spaces = {pid: stored_policies[pid].spaces for pid in existing_policies}
            state = read_training_state(self.checkpoint)
            mapping_and_trainable = self.get_mapping_and_trainable(
                defaults=worker.policies.mapping_and_trainable
            )
            require_mapping_fn(mapping_and_trainable.policy_mapping_fn)
            as_predicate(mapping_and_trainable.policies_to_train)
        for pid, policy in existing_policies.items():
            require_trained_spaces(
                pid,
                trained_spaces[pid],
                (policy.observation_space, policy.action_space),
                allow_different=allow_other_spaces,
            )
            check_stored_state(policy, states[pid])
        kept_hyperparameters = {
            name
            for pid in existing_policies
            for name in _get_changed_hyperparameters(stored_policies[pid].state, states[pid])
        }
        if kept_hyperparameters:
            logger.info(
                "%s: %s come from the config, not from the checkpoint.",
                type(algorithm).__name__,
                ", ".join(sorted(kept_hyperparameters)),
            )
        algorithm.set_extra_state(state.extra)
        for pid, policy in new_policies.items():
            algorithm.add_policy(pid, policy=policy)
        algorithm.policies.set_mapping_and_trainable(mapping_and_trainable)
        for pid in set(worker.policy_map) - set(stored_policies):
            algorithm.remove_policy(pid)
        for pid, policy in existing_policies.items():
            set_stored_state(policy, states[pid])
        algorithm.iteration = state.progress["iteration"]
        algorithm._metrics.set_progress(state.progress)
        algorithm._train_batch_sampler.row_meter.set_state(state.row_meter)
        restore_sampling(worker, state.seeds_used, state.rng, state.global_vars, state.sampler)
        algorithm.workers.input_positions = dict(state.input_positions)
        algorithm.workers.sync_workers(new_episodes=True)
        if state.evaluation is not None:
            seeds_used, rngs = state.evaluation
            rngs = {pid: rng for pid, rng in rngs.items() if pid in stored_policies}
            algorithm._evaluator.restore_generators(seeds_used, rngs)


def _replace_unavailable_data(settings: dict[str, Any]) -> None:
    """Replaces data that a file cannot hold: training asks for them, acting does not need them."""
    for name, options_name in (("input_", "input_config"), ("output", "output_config")):
        parts = {x: settings[x] for x in (name, options_name) if x in settings}
        missing = find_unresolved(parts)
        if missing:
            description = ", ".join(value.name for value in missing.values())
            settings[name] = UnavailableData(name, description)
            settings[options_name] = {}


def _get_dict(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a dict in a record; an empty one if there is none, which is reported elsewhere."""
    value = record.get(name)
    return value if isinstance(value, Mapping) else {}


def apply_worker_hyperparameters(worker: RolloutWorker, state: Any) -> Any:
    """Returns a worker's state, with hyperparameters from its policies' configs where these differ.

    Args:
        worker: the worker that the state is for.
        state: as `RolloutWorker.get_state` returns it; a malformed one is returned unchanged.
    """
    policy_states = state.get("policy_states") if isinstance(state, Mapping) else None
    if not isinstance(policy_states, Mapping):
        return state
    new_states = dict(policy_states)
    for pid, policy_state in policy_states.items():
        spec = policy_state.get("policy_spec") if isinstance(policy_state, Mapping) else None
        if pid in worker.policy_map and isinstance(spec, Mapping):
            policy = worker.policy_map.get_handle(pid)
            new_states[pid] = apply_configured_hyperparameters(
                policy, policy_state, spec.get("config") or {}
            )
    return {**state, "policy_states": new_states}


def _get_changed_hyperparameters(
    stored_state: Mapping[str, Any], state: Mapping[str, Any]
) -> list[str]:
    stored_values, new_values = (x.get("hyperparameters") or {} for x in (stored_state, state))
    return [name for name, value in new_values.items() if stored_values.get(name) != value]


def _get_equal_names(settings: Mapping[str, Any], other_settings: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in settings.items()
        if name in other_settings and other_settings[name] == value
    ]


def _get_equal_unserializable_names(
    settings: Mapping[str, Any], other_settings: Mapping[str, Any]
) -> list[str]:
    """Returns the names that have equal values in both which a file cannot hold."""
    return [
        x
        for x in _get_equal_names(settings, other_settings)
        if find_unresolved(decode_settings({x: settings[x]}))
    ]
