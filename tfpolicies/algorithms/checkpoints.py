"""Checkpoint folders of algorithms: writing them and restoring from them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from tfpolicies.algorithms.host import HostAlgorithm, States
from tfpolicies.algorithms.run_state import MALFORMED, get_progress, run_state
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.multi_agent import as_predicate, require_mapping_fn
from tfpolicies.config.multi_agent_setup import policy_config
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID, PolicySpec
from tfpolicies.config.read_only import is_equal
from tfpolicies.config.stored_config import (
    arrived,
    automatic_of,
    decode_config,
    encode_config,
    overridden_config,
    travelling,
)
from tfpolicies.config.stored_settings import (
    ALGORITHM_SETTINGS,
    POLICY_CLASS,
    ROSTER,
    decode_settings,
)
from tfpolicies.distributed import messages
from tfpolicies.distributed.tune import default_config
from tfpolicies.envs.making import EnvContext, make_any_environments
from tfpolicies.envs.vector import Environments
from tfpolicies.errors import CheckpointError, ConfigError, NotOfferedError, UnpicklableError
from tfpolicies.models.extent import built_from
from tfpolicies.models.work import limit_work
from tfpolicies.policy.checkpoints import (
    ALGORITHM_MANIFEST,
    StoredPolicy,
    check_stored_state,
    custom_object_scope,
    path_of,
    policies_in,
    policy_part,
    set_stored_state,
    with_configured_hyperparameters,
)
from tfpolicies.rollout.fitting_spaces import require_trained_spaces
from tfpolicies.rollout.policy_changes import MappingAndTrainable
from tfpolicies.rollout.rollout_worker import RolloutWorker
from tfpolicies.rollout.worker_policies import WorkerPolicies
from tfpolicies.rollout.worker_state import restore_sampling
from tfpolicies.storage.array_places import take_arrays
from tfpolicies.storage.checkpoint import Checkpoint, PolicyPart, read_checkpoint, write_checkpoint
from tfpolicies.storage.generator_json import encode_generator
from tfpolicies.storage.import_paths import describe
from tfpolicies.storage.json_values import Missing, decode_value, encode_value, find_missing
from tfpolicies.storage.pickling import checkpoint_of, frozen_part, require_named
from tfpolicies.storage.places import Place, admitted
from tfpolicies.storage.segments import Segment
from tfpolicies.system.paths import resolve_path

logger = logging.getLogger(__name__)


class SavedPath(str):
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
    ) -> SavedPath:
        made = super().__new__(cls, folder)
        made.settings, made.functions = settings, functions
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


class SavedCheckpoint(NamedTuple):
    """The location of a checkpoint."""

    path: str


class SaveResult(NamedTuple):
    """The return value of `Algorithm.save`."""

    checkpoint: SavedCheckpoint
    metrics: dict[str, Any]  # of the last training iteration


class AlgorithmRecord(NamedTuple):
    """A snapshot of an algorithm for a checkpoint; further training does not change it."""

    manifest: dict[str, Any]
    arrays: dict[str, dict[str, np.ndarray]]
    policies: dict[str, PolicyPart]
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

    def stored(self, source: str) -> StoredAlgorithm:
        """Returns the stored algorithm without arrays and policies."""
        return StoredAlgorithm(Checkpoint(self.manifest, {}, {}), source)


def record_of(algorithm: HostAlgorithm, policy_states: States | None = None) -> AlgorithmRecord:
    """Returns a snapshot of an algorithm with its policies, as copies.

    Args:
        algorithm: the algorithm to copy.
        policy_states: by policy id, states to use instead of the current ones.
    """
    instead = policy_states or {}
    worker = algorithm.worker
    sampler_state, sampler_arrays = _sampler_record(worker)
    extra_arrays: dict[str, np.ndarray] = {}
    segments: list[Segment] = []
    extra = take_arrays(algorithm.get_extra_state(), extra_arrays, segments)
    manifest = {
        "type": "Algorithm",
        "algorithm_class": encode_value(type(algorithm)),
        "config": encode_config(algorithm.config.to_dict()),
        "automatic": algorithm.config.automatic(),
        "progress": encode_value(get_progress(algorithm)),
        "roster": _roles_record(worker.policies),
        "worker": {
            "seeds_used": worker.seeds.used,
            "rng": None if worker.sampler is None else encode_generator(worker.sampler.rng),
            "global_vars": encode_value(worker.global_vars),
            "sampler": sampler_state,
        },
        "evaluation": _evaluation_record(algorithm.evaluation_worker),
        "extra": encode_value(extra),
    }
    only = algorithm.config.checkpoint_trainable_policies_only
    policies = {
        pid: policy_part(policy, instead.get(pid))
        for pid, policy in worker.policy_map.items()
        if not only or worker.policies.trains(pid)
    }
    manifest["finite"] = all(part.manifest["finite"] for part in policies.values())
    groups = {"sampler": sampler_arrays, "extra": extra_arrays}
    arrays = {name: group for name, group in groups.items() if group}
    return AlgorithmRecord(manifest, arrays, policies, segments)


def _export_models(
    algorithm: HostAlgorithm, record: AlgorithmRecord, folder: Path, states: States
) -> None:
    """Writes a SavedModel of each policy with a Keras model; `states` replace current ones."""
    for policy_id in record.policies:
        policy: Any = algorithm.worker.policy_map[policy_id]
        if policy_id in states:
            policy = policy.copy()
            policy.set_state(states[policy_id])
        with contextlib.suppress(NotOfferedError):
            policy.export_model(folder / "policies" / quote(policy_id, safe=" ") / "model")


def save(
    algorithm: HostAlgorithm,
    checkpoint_dir: str | os.PathLike[str] | None,
    policy_states: States | None,
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
    record = record_of(algorithm, policy_states)
    record.write(folder)
    if algorithm.config.export_native_model_files:
        _export_models(algorithm, record, folder, policy_states or {})
    if record.manifest["finite"] and not policy_states:
        algorithm._last_good = str(folder)
    stored = record.stored(repr(str(folder)))
    settings, functions = held_back(algorithm, stored)
    _warn_unheld(algorithm, stored)
    if algorithm.config.new_episodes_at_checkpoint:
        algorithm.workers.foreach_worker(messages.begin_episodes)
    return SavedCheckpoint(SavedPath(str(folder), settings, MappingAndTrainable(**functions)))


def _warn_unheld(algorithm: HostAlgorithm, stored: StoredAlgorithm) -> None:
    """Warns once about the objects a caller must pass again when loading the checkpoint."""
    unheld = stored.unheld()
    if unheld is not None and algorithm.tells_of_unheld:
        algorithm.tells_of_unheld = False
        logger.warning(
            "This checkpoint does not store these objects, since a file must not choose what is "
            "imported: %s. Pass them when you load it: %s.%s.",
            unheld.names,
            type(algorithm).__name__,
            unheld.call,
        )


def reduced(algorithm: HostAlgorithm) -> tuple[Any, tuple[Any, ...]]:
    """Returns the `__reduce__` value: the checkpoint, and the objects that cannot be stored in it.

    Raises:
        UnpicklableError: if its class, or one of these objects, cannot be imported by name; or if
            the class of an added policy is not named in the config.
    """
    record = record_of(algorithm)
    manifest, arrays, policies, segments = record
    stored = record.stored(repr(algorithm))
    given, functions = held_back(algorithm, stored)
    given = travelling(given)
    kind = type(algorithm)
    require_named({"the class of the algorithm": kind, "config": given, **functions})
    for pid in policies.keys() - algorithm.config.policies.keys():
        _require_known_class(pid, policies[pid])
    frozen = {pid: frozen_part(part) for pid, part in policies.items()}
    whole = frozen_part(PolicyPart(ALGORITHM_MANIFEST, manifest, arrays))
    return _unpickled, (kind, whole, frozen, given, functions, segments)


def held_back(
    algorithm: HostAlgorithm, stored: StoredAlgorithm
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the settings and the functions of an algorithm that no file can hold, by name."""
    settings = algorithm.config.to_dict()
    present = algorithm.worker.policies.mapping_and_trainable._asdict()
    stored_functions = stored.functions._asdict()
    functions = {
        name: function
        for name, function in present.items()
        if isinstance(stored_functions[name], Missing)
    }
    return {name: settings[name] for name in stored.missing_settings()}, functions


def _require_known_class(policy_id: str, part: PolicyPart) -> None:
    found = admitted(decode_value(part.manifest["policy_class"]), POLICY_CLASS)
    if isinstance(found, Missing):
        raise UnpicklableError(
            f"The class {found.name} of the added policy {policy_id!r} is not in the config. "
            "Name it there, multi_agent(policies={...}), before you build the algorithm; or "
            "pickle the policies themselves."
        )


def _unpickled(
    kind: type,
    whole: tuple[bytes, Any],
    policies: Mapping[str, tuple[bytes, Any]],
    given: Mapping[str, Any],
    functions: Mapping[str, Any],
    segments: Sequence[Segment],
) -> Any:
    source = f"A pickled {kind.__name__}"
    checkpoint = checkpoint_of(whole, policies, segments)
    stored = StoredAlgorithm(checkpoint, source, MappingAndTrainable(**functions), arrived(given))
    return stored.algorithm(kind, allow_non_finite=True, model_work_limit=math.inf)


def _sampler_record(worker: RolloutWorker) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns the running episodes, if the environments support `get_state`."""
    sampler = worker.sampler
    goes_on = worker.has_episodes and not worker.config.new_episodes_at_checkpoint
    state = sampler.get_state() if goes_on and sampler is not None else None
    if state is None:
        return None, {}
    arrays: dict[str, np.ndarray] = {}
    envs = encode_value(state.pop("envs"))
    del state["rng"]  # stored separately
    return {"envs": envs, "running": encode_value(take_arrays(state, arrays))}, arrays


def _roles_record(policies: WorkerPolicies) -> dict[str, Any]:
    """Returns the mapping function and the trained policies; functions as import paths."""
    to_train = policies.is_policy_to_train
    ids = getattr(to_train, "ids", None)
    return {
        "policy_mapping_fn": encode_value(policies.policy_mapping_fn),
        "policies_to_train": encode_value(to_train if ids is None else sorted(ids)),
    }


def _evaluation_record(worker: RolloutWorker | None) -> Any:
    if worker is None:
        return None
    own = {pid: policy.driver.generator for pid, policy in worker.policy_map.items()}
    generators = {pid: encode_generator(rng) for pid, rng in own.items() if rng is not None}
    return {"seeds_used": worker.seeds.used, "rngs": generators}


_NOTHING = MappingAndTrainable()


def given_again(
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
    named = {name: settings.pop(name, None) for name in MappingAndTrainable._fields}
    path = path_of(checkpoint)
    functions = _first_given(functions, MappingAndTrainable(**named))
    if not isinstance(path, SavedPath):
        return functions, settings
    return _first_given(functions, path.functions), {**path.settings, **settings}


def _first_given(
    chosen: MappingAndTrainable, otherwise: MappingAndTrainable
) -> MappingAndTrainable:
    pairs = zip(chosen, otherwise, strict=True)
    return MappingAndTrainable(*(other if own is None else own for own, other in pairs))


class Unheld(NamedTuple):
    """Objects that a file cannot hold safely, so they must be passed when loading."""

    names: str  # of settings and arguments, with their values
    call: str  # that passes them
    settings: Mapping[str, str]  # import paths of their values, by name


def _named(missing: Mapping[str, Missing]) -> dict[str, str]:
    """Returns the import path of each, or "MODULE:NAME" if it has none."""
    return {name: x.name if x.importable else "MODULE:NAME" for name, x in missing.items()}


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
    given: MappingAndTrainable = _NOTHING
    overrides: Mapping[str, Any] | None = None

    @classmethod
    def read(
        cls,
        folder: str | os.PathLike[str],
        policy_ids: Collection[str] | None = None,
        *instead: Any,
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
        chosen = None if policy_ids is None else list(policy_ids)
        found = read_checkpoint(folder, ALGORITHM_MANIFEST, kind="Algorithm", policies=chosen)
        return cls(found, repr(os.fspath(folder)), *instead)

    def policies(self, classes: Sequence[type] = ()) -> dict[str, StoredPolicy]:
        """Returns the policies by id; `classes` are allowed in addition to this package's."""
        return policies_in(self.checkpoint, self.source, classes)

    def require_finite(self, *, allow: bool) -> None:
        """Raises a `CheckpointError` if weights have NaN or infinity, unless allowed."""
        for stored in self.policies().values():
            stored.require_finite(allow=allow)

    # -- objects that a file cannot hold ------------------------------------------------------

    @property
    def functions(self) -> MappingAndTrainable:
        """The mapping and the trained policies; `Missing` for functions the file may not name."""
        stored = self.checkpoint.manifest["roster"]
        found = {
            name: admitted(decode_value(stored[name]), ROSTER[name]) if value is None else value
            for name, value in self.given._asdict().items()
        }
        return MappingAndTrainable(**found)

    def missing_settings(self) -> dict[str, dict[str, Missing]]:
        """Returns the `Missing` values of the config, by setting and location in it."""
        record = {**self.checkpoint.manifest["config"], "keras": None}
        overrides = {**dict.fromkeys(MappingAndTrainable._fields), **(self.overrides or {})}
        config = overridden_config(record, overrides, self.source, ALGORITHM_SETTINGS)
        settings = {name: find_missing(value) for name, value in config.items()}
        return {name: missing for name, missing in settings.items() if missing}

    def unheld(self) -> Unheld | None:
        """Returns all objects that must be passed when loading; None if there are none.

        These are functions and classes of other packages, and objects without an import path.
        """
        roles = self.functions._asdict()
        functions = {name: x for name, x in roles.items() if isinstance(x, Missing)}
        settings = self.missing_settings()
        names = [
            f"config[{name!r}]{place} ({found.name})"
            for name, missing in settings.items()
            for place, found in missing.items()
        ]
        names += [f"{name} ({found.name})" for name, found in functions.items()]
        if not names:
            return None
        arguments = [f"{name}=..." for name in functions]
        if settings:
            parts = ", ".join(f"{name!r}: ..." for name in settings)
            arguments.insert(0, f"config={{{parts}}}")
        found = {name: x for name, missing in settings.items() for x in missing.values()}
        call = f"from_checkpoint(path, {', '.join(arguments)})"
        return Unheld(", ".join(names), call, _named({**found, **functions}))

    def roles(self, otherwise: MappingAndTrainable = _NOTHING) -> MappingAndTrainable:
        """Returns the mapping function and the trained policies.

        Args:
            defaults: replaces functions that the file cannot hold.
        """
        found = {
            name: getattr(otherwise, name) if isinstance(value, Missing) else value
            for name, value in self.functions._asdict().items()
        }
        ids = found["policies_to_train"]
        if isinstance(ids, list) and self.given.policies_to_train is None:
            found["policies_to_train"] = [pid for pid in ids if pid in self.checkpoint.policies]
        return MappingAndTrainable(**found)

    # -- loading ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Converts errors caused by a malformed manifest into `CheckpointError`."""
        try:
            yield
        except CheckpointError:
            raise
        except MALFORMED as error:
            text = f"{self.source}: its manifest lacks or garbles {error}."
            raise CheckpointError(text) from error

    def algorithm(
        self,
        kind: type,
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
        with self._reading():
            kind, lacking = self._class(kind), self.unheld()
        self.require_finite(allow=allow_non_finite)
        if lacking is not None:
            raise CheckpointError(
                f"{self.source} was saved with objects that a file cannot hold safely: "
                f"{lacking.names}."
            ).advised(f"Pass them when loading: {lacking.call}.", lacking.settings)
        shapes: Counter[tuple[int, ...]] = Counter()  # that weights must have
        for stored in self.policies().values():
            shapes |= Counter(stored.weight_shapes)
        scope, source = custom_object_scope(custom_objects or {}), self.source
        with scope, limit_work(model_work_limit), built_from(source, shapes.elements()):
            algorithm = self._built(kind)
        try:
            with limit_work(model_work_limit):
                self.restore(algorithm, allow_other_spaces=allow_other_spaces)
        except BaseException:
            algorithm.stop()
            raise
        return algorithm

    def _class(self, given: type) -> type:
        """Returns the class of the algorithm: `base_class` or a subclass of it.

        Raises:
            CheckpointError: if it is another class, or a custom class and `from_checkpoint` was not
                called on it.
        """
        stored = self.checkpoint.manifest["algorithm_class"]
        known = {describe(given): given}
        found = admitted(decode_value(stored), Place("algorithm_class"), known=known)
        if isinstance(found, Missing) and not found.name.startswith("tfpolicies."):
            raise CheckpointError(
                f"{self.source} holds an algorithm of the class {found.name}, which is not part of "
                "this package."
            ).advised("Call `from_checkpoint` on your class.", {"algo": found.name})
        if not isinstance(found, type):
            raise CheckpointError(f"{self.source} names {found!r} as its algorithm's class.")
        if not issubclass(found, given):
            raise CheckpointError(
                f"{self.source} holds an algorithm of the class {found.__name__}, not of "
                f"{given.__name__}. Call `{found.__name__}.from_checkpoint(path)`, or "
                "`Algorithm.from_checkpoint(path)` for any class."
            )
        return found

    def _built(self, kind: type) -> Any:
        config = self._config(kind)
        if config.is_multi_agent():  # else added policies are added again when restoring
            trained = self.roles().policies_to_train
            config.multi_agent(policies=self._specs(config), policies_to_train=trained)
        try:
            return kind(config)
        except CheckpointError:
            self._require_trained_environment(config)
            raise

    def _config(self, kind: type) -> Any:
        """Returns the stored config with overrides, for an algorithm class.

        Raises:
            CheckpointError: if settings that a file cannot hold are missing, or do not fit.
        """
        manifest = self.checkpoint.manifest
        with self._reading():
            roles = self.roles()._asdict()
        overrides = {**roles, "policies_to_train": None, **(self.overrides or {})}
        settings = decode_config(manifest["config"], overrides, self.source, ALGORITHM_SETTINGS)
        automatic = automatic_of(manifest, settings, overrides)
        settings |= dict.fromkeys(automatic, "auto")
        try:
            config = default_config(kind).update_from_dict(settings)
        except ConfigError as error:
            raise CheckpointError(f"{self.source}: {error}") from error
        config.note_automatic(automatic)
        return config

    def _specs(self, config: AlgorithmConfig) -> dict[str, PolicySpec]:
        """Returns the policy specs, including those of policies that are not in the config.

        Raises:
            CheckpointError: if a policy cannot be created from its stored record.
        """
        known = config.policies
        classes = [spec.policy_class for spec in known.values() if spec.policy_class is not None]
        return {
            pid: known[pid] if pid in known else self._spec(pid, stored, config)
            for pid, stored in self.policies(classes).items()
        }

    def _spec(self, policy_id: str, stored: StoredPolicy, config: AlgorithmConfig) -> PolicySpec:
        found = self._given_again(stored, config).spec()
        common = policy_config(config, policy_id, found.policy_class, {}).to_dict()
        own = {  # shared settings may differ in evaluation
            name: value
            for name, value in found.config.items()
            if name not in common or not is_equal(value, common[name])
        }
        return dataclasses.replace(found, config=own)

    def _given_again(self, stored: StoredPolicy, config: AlgorithmConfig) -> StoredPolicy:
        """Returns a policy with its algorithm's settings, where both had the same stored value.

        The config of an added policy is mostly a copy of the algorithm's. So objects that no file
        holds, such as callbacks or a model, apply to both, and so do numbers that the algorithm has
        changed since.

        Args:
            stored_policy: the policy.
            config: of the algorithm, complete.
        """
        records = [_dict_in(x.checkpoint.manifest, "config") for x in (stored, self)]
        own, common = (_dict_in(record, "settings") for record in records)
        names = [*_unheld(own, common), *self._changed(stored, own, common, config)]
        given = {name: config[name] for name in names if name in config}
        model = _unheld(_dict_in(own, "model"), _dict_in(common, "model"))
        again = {name: config["model"][name] for name in model if name in config["model"]}
        models = [record.get("keras") for record in records]
        if models[0] is not None and models[0] == models[1]:
            again["custom_model"] = config["model"]["custom_model"]
        if again:
            given["model"] = again
        return dataclasses.replace(stored, overrides=given, unneeded=())

    def _changed(
        self,
        stored: StoredPolicy,
        own: Mapping[str, Any],
        common: Mapping[str, Any],
        config: AlgorithmConfig,
    ) -> list[str]:
        """Returns the settings that a policy shared with its algorithm and the algorithm changed.

        Only hyperparameters, their schedules, and settings that the caller named are compared.
        """
        numbers = getattr(stored.policy_class(), "hyperparameters", ())
        names = {*numbers, *(f"{name}_schedule" for name in numbers), *(self.overrides or ())}
        same = sorted((names - {"model"}).intersection(_alike(own, common)))
        before = decode_settings({name: own[name] for name in same})
        return [x for x in same if x in config and not is_equal(config[x], before[x])]

    def _require_trained_environment(self, config: AlgorithmConfig) -> None:
        """Checks that the environment of a config has the spaces of the policy.

        Built policies are compared with their environment anyway. This explains why a policy could
        not be built, and creates an environment for that. Environments with several agents or
        connectors are not compared.

        Raises:
            SpaceError: if the spaces differ.
        """
        stored = self.policies().get(DEFAULT_POLICY_ID)
        connected = config.agent_connectors or config.action_connectors
        made = make_any_environments(config.env, 1, EnvContext(config.env_config), checked=False)
        if made is None:
            return
        try:
            if stored is not None and not connected and isinstance(made, Environments):
                given = (made.observation_space, made.action_space)
                require_trained_spaces(DEFAULT_POLICY_ID, stored.spaces, given, allow_other=True)
        finally:
            made.close()

    def restore(self, algorithm: HostAlgorithm, *, allow_other_spaces: bool = False) -> None:
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
        stored = self.policies([type(policy) for policy in worker.policy_map.values()])
        new = {
            pid: self._given_again(each, algorithm.config).policy(allow_non_finite=True)
            for pid, each in stored.items()
            if pid not in worker.policy_map
        }
        with self._reading():
            there = {pid: worker.get_policy(pid) for pid in stored.keys() - new.keys()}
            states = {pid: stored[pid].state_for(x, self.overrides) for pid, x in there.items()}
            trained = {pid: stored[pid].spaces for pid in there}
            run = run_state(self.checkpoint)
            roles = self.roles(otherwise=worker.policies.mapping_and_trainable)
            require_mapping_fn(roles.policy_mapping_fn)
            as_predicate(roles.policies_to_train)
        for pid, policy in there.items():
            require_trained_spaces(
                pid,
                trained[pid],
                (policy.observation_space, policy.action_space),
                allow_other=allow_other_spaces,
            )
            check_stored_state(policy, states[pid])
        numbers = {name for pid in there for name in _replaced(stored[pid].state, states[pid])}
        if numbers:
            logger.info(
                "%s: %s come from the config, not from the checkpoint.",
                type(algorithm).__name__,
                ", ".join(sorted(numbers)),
            )
        algorithm.set_extra_state(run.extra)
        for pid, policy in new.items():
            algorithm.add_policy(pid, policy=policy)
        algorithm.policies.assign(roles)
        for pid in set(worker.policy_map) - set(stored):
            algorithm.remove_policy(pid)
        for pid, policy in there.items():
            set_stored_state(policy, states[pid])
        algorithm.iteration = run.progress["iteration"]
        algorithm._results.set_progress(run.progress)
        restore_sampling(worker, run.seeds_used, run.rng, run.global_vars, run.sampler)
        algorithm.workers.align(new_episodes=True)
        if run.evaluation is not None:
            seeds_used, rngs = run.evaluation
            rngs = {pid: rng for pid, rng in rngs.items() if pid in stored}
            algorithm._evaluator.restore_generators(seeds_used, rngs)


def _dict_in(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a dict in a record; an empty one if there is none, which is reported elsewhere."""
    found = record.get(name)
    return found if isinstance(found, Mapping) else {}


def with_configured_numbers(worker: RolloutWorker, state: Any) -> Any:
    """Returns a worker's state, with hyperparameters from its policies' configs where these differ.

    Args:
        worker: the worker that the state is for.
        state: as `RolloutWorker.get_state` returns it; a malformed one is returned unchanged.
    """
    policy_states = state.get("policy_states") if isinstance(state, Mapping) else None
    if not isinstance(policy_states, Mapping):
        return state
    changed = dict(policy_states)
    for pid, each in policy_states.items():
        spec = each.get("policy_spec") if isinstance(each, Mapping) else None
        if pid in worker.policy_map and isinstance(spec, Mapping):
            policy = worker.policy_map.handle(pid)
            changed[pid] = with_configured_hyperparameters(policy, each, spec.get("config") or {})
    return {**state, "policy_states": changed}


def _replaced(stored: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    before, now = (x.get("hyperparameters") or {} for x in (stored, state))
    return [name for name, value in now.items() if before.get(name) != value]


def _alike(own: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    return [name for name, value in own.items() if name in stored and stored[name] == value]


def _unheld(own: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Returns the names that have equal values in both which a file cannot hold."""
    return [x for x in _alike(own, stored) if find_missing(decode_settings({x: own[x]}))]
