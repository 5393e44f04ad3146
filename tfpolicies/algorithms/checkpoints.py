"""Algorithms as checkpoint folders: what is written, and how a run goes on from it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.algorithms.run_state import run_state
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
from tfpolicies.distributed.messages import Roster, roster_of
from tfpolicies.envs.making import EnvContext, make_any_environments
from tfpolicies.envs.vector import Environments
from tfpolicies.errors import CheckpointError, ConfigError, UnpicklableError
from tfpolicies.models.extent import built_from
from tfpolicies.policy.checkpoints import (
    ALGORITHM_MANIFEST,
    StoredPolicy,
    check_stored_state,
    custom_object_scope,
    policies_in,
    policy_part,
    set_stored_state,
)
from tfpolicies.rollout.fitting_spaces import require_trained_spaces
from tfpolicies.storage.array_places import take_arrays
from tfpolicies.storage.checkpoint import (
    Checkpoint,
    PolicyPart,
    read_checkpoint,
    write_checkpoint,
)
from tfpolicies.storage.generator_json import encode_generator
from tfpolicies.storage.import_paths import describe
from tfpolicies.storage.json_values import Missing, decode_value, encode_value, find_missing
from tfpolicies.storage.pickling import checkpoint_of, frozen_part, require_named
from tfpolicies.storage.places import Place, admitted


class SavedCheckpoint(NamedTuple):
    """Where a checkpoint lies."""

    path: str


class SaveResult(NamedTuple):
    """What `Algorithm.save` returns."""

    checkpoint: SavedCheckpoint
    metrics: dict[str, Any]  # of the last training iteration


class AlgorithmRecord(NamedTuple):
    """What a checkpoint will hold of an algorithm; training on does not change it."""

    manifest: dict[str, Any]
    arrays: dict[str, dict[str, np.ndarray]]
    policies: dict[str, PolicyPart]

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes it into a folder, replacing the checkpoint there.

        Raises:
            CheckpointError: if it cannot be written.
        """
        write_checkpoint(
            folder, ALGORITHM_MANIFEST, self.manifest, self.arrays, policies=self.policies
        )


def record_of(
    algorithm: Any, policy_states: Mapping[str, Mapping[str, Any]] | None = None
) -> AlgorithmRecord:
    """Returns what a checkpoint of an algorithm with its policies holds, as copies.

    Args:
        algorithm: what is recorded.
        policy_states: by policy id, states to take instead of the present ones.
    """
    instead = policy_states or {}
    worker = algorithm.worker
    sampler_state, sampler_arrays = _sampler_record(worker)
    extra_arrays: dict[str, np.ndarray] = {}
    extra = take_arrays(algorithm.get_extra_state(), extra_arrays)
    manifest = {
        "type": "Algorithm",
        "algorithm_class": encode_value(type(algorithm)),
        "config": encode_config(algorithm.config.to_dict()),
        "automatic": algorithm.config.automatic(),
        "progress": encode_value(algorithm.progress()),
        "roster": _roster_record(worker.roster),
        "worker": {
            "seeds_used": worker.seeds_used,
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
        if not only or worker.roster.trains(pid)
    }
    manifest["finite"] = all(part.manifest["finite"] for part in policies.values())
    groups = {"sampler": sampler_arrays, "extra": extra_arrays}
    arrays = {name: group for name, group in groups.items() if group}
    return AlgorithmRecord(manifest, arrays, policies)


def reduced(algorithm: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns how pickle makes an algorithm: its checkpoint, and what no file can hold of it.

    Raises:
        UnpicklableError: if its class, or a part of that, has no name to be found by; or if a
            policy was added of a class that its config does not name.
    """
    manifest, arrays, policies = record_of(algorithm)
    missing = _missing_settings(manifest, repr(algorithm), dict.fromkeys(Roster._fields), {})
    settings = algorithm.config.to_dict()
    given = travelling({name: settings[name] for name in missing})
    roster = {
        name: value
        for name, value in roster_of(algorithm.worker)._asdict().items()
        if isinstance(_of_roster(manifest, name), Missing)
    }
    kind = type(algorithm)
    require_named({"the class of the algorithm": kind, "config": given, **roster})
    for pid in policies.keys() - settings["policies"].keys():
        _require_known_class(pid, policies[pid])
    frozen = {pid: frozen_part(part) for pid, part in policies.items()}
    whole = frozen_part(PolicyPart(ALGORITHM_MANIFEST, manifest, arrays))
    return _unpickled, (kind, whole, frozen, given, roster)


def _require_known_class(policy_id: str, part: PolicyPart) -> None:
    found = admitted(decode_value(part.manifest["policy_class"]), POLICY_CLASS)
    if isinstance(found, Missing):
        raise UnpicklableError(
            f"The policy {policy_id!r} was added as a {found.name}, which the config does not "
            "name. Name it there, multi_agent(policies={...}), before you build the algorithm; or "
            "pickle the policies themselves."
        )


def _unpickled(kind: Any, whole: Any, policies: Any, given: Any, roster: Any) -> Any:
    checkpoint = checkpoint_of(whole, policies)
    source, functions = f"A pickled {kind.__name__}", Roster(**roster)
    return build_algorithm(
        kind, checkpoint, source, functions, arrived(given), allow_non_finite=True
    )


def _sampler_record(worker: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns the running episodes, if the environments can give their state."""
    if worker.config.new_episodes_at_checkpoint or not worker.has_episodes:
        return None, {}
    state = worker.sampler.get_state()
    if state is None:
        return None, {}
    arrays: dict[str, np.ndarray] = {}
    envs = encode_value(state.pop("envs"))
    del state["rng"]  # it is stored apart
    return {"envs": envs, "running": encode_value(take_arrays(state, arrays))}, arrays


def _roster_record(roster: Any) -> dict[str, Any]:
    """Returns which policy acts for whom and which are trained; functions as import paths."""
    to_train = roster.is_policy_to_train
    ids = getattr(to_train, "ids", None)
    return {
        "policy_mapping_fn": encode_value(roster.policy_mapping_fn),
        "policies_to_train": encode_value(to_train if ids is None else sorted(ids)),
    }


def _evaluation_record(worker: Any) -> Any:
    if worker is None:
        return None
    own = {pid: policy.holding.generator for pid, policy in worker.policy_map.items()}
    generators = {pid: encode_generator(rng) for pid, rng in own.items() if rng is not None}
    return {"seeds_used": worker.seeds_used, "rngs": generators}


def read_algorithm(folder: Path, policy_ids: Collection[str] | None = None) -> Checkpoint:
    """Reads and checks an algorithm's checkpoint.

    Args:
        folder: where it is.
        policy_ids: only these policies; None for all.

    Raises:
        CheckpointError: if it is missing, damaged or foreign.
        UnknownPolicyError: if one of `policy_ids` is not in it.
    """
    chosen = None if policy_ids is None else list(policy_ids)
    return read_checkpoint(folder, ALGORITHM_MANIFEST, kind="Algorithm", policies=chosen)


def require_all_finite(checkpoint: Checkpoint, source: str, *, allow: bool) -> None:
    """Raises a `CheckpointError` if weights of a policy have NaN or infinity, unless allowed."""
    for stored in policies_in(checkpoint, source).values():
        stored.require_finite(allow=allow)


class Unheld(NamedTuple):
    """What a file cannot hold safely, so that loading asks for it."""

    names: str  # of settings and arguments, with what they were
    call: str  # how to give them again


def unheld(
    manifest: Mapping[str, Any],
    source: str,
    given: Roster,
    overrides: Mapping[str, Any] | None,
) -> Unheld | None:
    """Returns what loading an algorithm asks for, all at once; None if nothing.

    These are functions and classes of other packages than this one, and what has no import path.

    Args:
        manifest: of the algorithm's checkpoint.
        source: where it is from, for messages.
        given: the functions that are given again.
        overrides: the settings that are given again.
    """
    roster = {
        name: _of_roster(manifest, name) if value is None else value
        for name, value in given._asdict().items()
    }
    functions = {name: x.name for name, x in roster.items() if isinstance(x, Missing)}
    settings = _missing_settings(manifest, source, dict.fromkeys(roster), overrides or {})
    names = [
        f"config[{name!r}]{place} ({found.name})"
        for name, missing in settings.items()
        for place, found in missing.items()
    ]
    names += [f"{name} ({function})" for name, function in functions.items()]
    if not names:
        return None
    arguments = [f"{name}=..." for name in functions]
    if settings:
        parts = ", ".join(f"{name!r}: ..." for name in settings)
        arguments.insert(0, f"config={{{parts}}}")
    return Unheld(", ".join(names), f"from_checkpoint(path, {', '.join(arguments)})")


def _of_roster(manifest: Mapping[str, Any], name: str) -> Any:
    """Returns an entry of the roster; a `Missing` for a function that the file may not name."""
    return admitted(decode_value(manifest["roster"][name]), ROSTER[name])


def _missing_settings(
    manifest: Mapping[str, Any],
    source: str,
    elsewhere: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> dict[str, dict[str, Missing]]:
    """Returns, by setting and place in it, what a stored config lacks.

    Args:
        manifest: of the algorithm's checkpoint.
        source: where it is from, for messages.
        elsewhere: the settings that are asked for by other names.
        overrides: the settings that are given again.
    """
    record = {**manifest["config"], "keras": None}
    config = overridden_config(record, {**elsewhere, **overrides}, source, ALGORITHM_SETTINGS)
    settings = {name: find_missing(value) for name, value in config.items()}
    return {name: missing for name, missing in settings.items() if missing}


def require_unheld(
    checkpoint: Checkpoint, source: str, given: Roster, overrides: Mapping[str, Any] | None
) -> None:
    """Checks that everything is given again that a checkpoint cannot hold.

    Raises:
        CheckpointError: naming all that is not.
    """
    lacking = unheld(checkpoint.manifest, source, given, overrides)
    if lacking is not None:
        raise CheckpointError(
            f"{source} was saved with what a file cannot hold safely: {lacking.names}. Give it "
            f"again: {lacking.call}."
        )


def stored_roster(checkpoint: Checkpoint, given: Roster, otherwise: Roster | None = None) -> Roster:
    """Returns what a checkpoint says of mapping and training.

    Args:
        checkpoint: what was read.
        given: what to take instead, where it is not None.
        otherwise: what to take for functions that a file cannot hold; None where all of them are
            given (`require_unheld`).
    """
    found = {}
    for name, value in given._asdict().items():
        value = _of_roster(checkpoint.manifest, name) if value is None else value
        if isinstance(value, Missing) and otherwise is not None:
            value = getattr(otherwise, name)
        found[name] = value
    ids = found["policies_to_train"]
    if isinstance(ids, list) and given.policies_to_train is None:
        found["policies_to_train"] = [pid for pid in ids if pid in checkpoint.policies]
    return Roster(**found)


def build_algorithm(
    kind: Any,
    checkpoint: Checkpoint,
    source: str,
    given: Roster,
    overrides: Mapping[str, Any] | None,
    *,
    allow_other_spaces: bool = False,
    allow_non_finite: bool = False,
    custom_objects: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the algorithm of a checkpoint, restored; see `Algorithm.from_checkpoint`.

    Args:
        kind: the class that it, or a base of it, must be.
        checkpoint: what was read.
        source: where it is from, for messages.
        given: what to take instead of the stored functions.
        overrides: settings that replace stored ones.
        allow_other_spaces: as in `from_checkpoint`.
        allow_non_finite: likewise.
        custom_objects: likewise.
    """
    kind = algorithm_class_of(checkpoint, source, kind)
    require_all_finite(checkpoint, source, allow=allow_non_finite)
    require_unheld(checkpoint, source, given, overrides)
    roster = stored_roster(checkpoint, given)
    settings = {**roster._asdict(), "policies_to_train": None, **(overrides or {})}
    with building(checkpoint, source, custom_objects):
        config = config_of(checkpoint, source, kind.config_class, settings)
        if config.is_multi_agent():  # else those beside the only one are added when restoring
            specs = specs_of(checkpoint, source, config)
            config.multi_agent(policies=specs, policies_to_train=None)  # the roster comes later
        try:
            algorithm = kind(config)
        except CheckpointError:
            require_trained_environment(checkpoint, config)
            raise
    try:
        restore_algorithm(
            algorithm, checkpoint, source, roster, allow_other_spaces=allow_other_spaces
        )
    except BaseException:
        algorithm.stop()
        raise
    return algorithm


def restore_algorithm(
    algorithm: Any,
    checkpoint: Checkpoint,
    source: str,
    roster: Roster,
    *,
    allow_other_spaces: bool = False,
) -> None:
    """Puts an algorithm into the state of a checkpoint; checks all before it changes anything.

    All but whether weights are finite, which is asked before (`require_all_finite`).
    Policies that the algorithm lacks are added, those that the checkpoint lacks are removed.

    Raises:
        CheckpointError: if the checkpoint does not fit the algorithm.
        SpaceError: if the algorithm's environment has other spaces; see `require_trained_spaces`.
    """
    worker = algorithm.worker
    classes = [type(policy) for policy in worker.policy_map.values()]
    config = algorithm.config
    stored = policies_in(checkpoint, source, classes)
    new = {
        pid: dataclasses.replace(
            each, overrides=_given_again(checkpoint, each.checkpoint, config), unneeded=()
        ).policy(allow_non_finite=True)
        for pid, each in stored.items()
        if pid not in worker.policy_map
    }
    try:
        states = {pid: each.state for pid, each in stored.items()}
        trained = {pid: each.spaces for pid, each in stored.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: its manifest lacks or garbles {error}.") from error
    run = run_state(checkpoint, source)
    for pid in states.keys() - new.keys():
        policy = worker.get_policy(pid)
        require_trained_spaces(
            pid,
            trained[pid],
            (policy.observation_space, policy.action_space),
            allow_other=allow_other_spaces,
        )
        check_stored_state(policy, states[pid])
    algorithm.set_extra_state(run.extra)
    for pid, policy in new.items():
        algorithm.add_policy(pid, policy=policy)
    for pid in set(worker.policy_map) - set(states):
        algorithm.remove_policy(pid)
    for pid in states.keys() - new.keys():
        set_stored_state(worker.get_policy(pid), states[pid])
    algorithm.set_roster(roster.policy_mapping_fn, roster.policies_to_train)
    algorithm.set_progress(run.progress)
    worker.restore_sampling(run.seeds_used, run.rng, run.global_vars, run.sampler)
    algorithm.workers.align(new_episodes=True)
    if run.evaluation is not None:
        seeds_used, rngs = run.evaluation
        algorithm.restore_evaluation(seeds_used, {k: x for k, x in rngs.items() if k in states})


def require_trained_environment(checkpoint: Checkpoint, config: Any) -> None:
    """Checks that the environment of a config is one that the policy of a checkpoint is for.

    Policies are compared with environments when they have been built; this is for those that
    cannot be, and makes an environment to see why. What has several agents, or stands behind
    connectors, is not compared.

    Raises:
        SpaceError: if it is not.
    """
    part = checkpoint.policies.get(DEFAULT_POLICY_ID)
    connected = config.agent_connectors or config.action_connectors
    made = make_any_environments(config.env, 1, EnvContext(config.env_config), checked=False)
    if made is None:
        return
    try:
        if part is not None and not connected and isinstance(made, Environments):
            given = (made.observation_space, made.action_space)
            trained = StoredPolicy(part, "the checkpoint").spaces
            require_trained_spaces(DEFAULT_POLICY_ID, trained, given, allow_other=True)
    finally:
        made.close()


@contextlib.contextmanager
def building(
    checkpoint: Checkpoint, source: str, custom_objects: Mapping[str, Any] | None
) -> Iterator[None]:
    """While it is entered, models must have weights that a checkpoint holds.

    Args:
        checkpoint: of an algorithm.
        source: where it is from, for messages.
        custom_objects: what Keras models may be made of beside what is registered.
    """
    shapes: Counter[tuple[int, ...]] = Counter()
    for stored in policies_in(checkpoint, source).values():
        shapes |= Counter(stored.weight_shapes)
    with custom_object_scope(custom_objects or {}), built_from(source, shapes.elements()):
        yield


def specs_of(checkpoint: Checkpoint, source: str, config: Any) -> dict[str, PolicySpec]:
    """Returns how the policies of a checkpoint are made; those that its config lacks, too.

    Raises:
        CheckpointError: if a policy cannot be made of what was stored.
    """
    known = config.policies
    classes = [spec.policy_class for spec in known.values() if spec.policy_class is not None]

    def spec(pid: str, stored: StoredPolicy) -> PolicySpec:
        if pid in known:
            return known[pid]
        given = _given_again(checkpoint, stored.checkpoint, config)
        found = dataclasses.replace(stored, overrides=given, unneeded=()).spec()
        common = policy_config(config, pid, found.policy_class, {}).to_dict()
        own = {  # what it has in common may differ in evaluation
            name: value
            for name, value in found.config.items()
            if name not in common or not is_equal(value, common[name])
        }
        return dataclasses.replace(found, config=own)

    stored = policies_in(checkpoint, source, classes)
    return {pid: spec(pid, each) for pid, each in stored.items()}


def _given_again(checkpoint: Checkpoint, part: Checkpoint, config: Any) -> dict[str, Any]:
    """Returns what a file cannot hold of a policy's config, where its algorithm's has the same.

    A policy that was added to an algorithm has a config of its own, with the algorithm's callbacks
    or model among it; those that the algorithm is given again are the policy's, too.

    Args:
        checkpoint: of the algorithm.
        part: of the policy.
        config: of the algorithm, complete.
    """
    own, stored = (
        _dict_in(_dict_in(each.manifest, "config"), "settings") for each in (part, checkpoint)
    )
    given = {name: config[name] for name in _unheld_alike(own, stored) if name in config}
    model = _unheld_alike(_dict_in(own, "model"), _dict_in(stored, "model"))
    again = {name: config["model"][name] for name in model if name in config["model"]}
    models = [_dict_in(each.manifest, "config").get("keras") for each in (part, checkpoint)]
    if models[0] is not None and models[0] == models[1]:
        again["custom_model"] = config["model"]["custom_model"]
    return {**given, "model": again} if again else given


def _dict_in(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a dict in a record; an empty one if there is none, which will be told elsewhere."""
    found = record.get(name)
    return found if isinstance(found, Mapping) else {}


def _unheld_alike(own: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Returns the names under which both have the same that a file cannot hold."""
    same = [name for name, value in own.items() if name in stored and stored[name] == value]
    return [name for name in same if find_missing(decode_settings({name: own[name]}))]


def algorithm_class_of(checkpoint: Checkpoint, source: str, given: type) -> type:
    """Returns the class of the algorithm that a checkpoint holds: `given` or a subclass of it.

    Raises:
        CheckpointError: if it is another one, or a class of the user's and `from_checkpoint` was
            not called on it.
    """
    stored = checkpoint.manifest["algorithm_class"]
    known = {describe(given): given}
    found = admitted(decode_value(stored), Place("algorithm_class"), known=known)
    if isinstance(found, Missing) and not found.name.startswith("tfpolicies."):
        raise CheckpointError(
            f"{source} holds an algorithm of the class {found.name}, which is not one of this "
            "package's. Call `from_checkpoint` on your class."
        )
    if not isinstance(found, type):
        raise CheckpointError(f"{source} names {found!r} as its algorithm's class.")
    if not issubclass(found, given):
        raise CheckpointError(
            f"{source} holds an algorithm of the class {found.__name__}, which is no "
            f"{given.__name__}. Call `{found.__name__}.from_checkpoint(path)`, or "
            "`Algorithm.from_checkpoint(path)` for whatever a checkpoint holds."
        )
    return found


def config_of(
    checkpoint: Checkpoint, source: str, config_class: Any, overrides: Mapping[str, Any] | None
) -> Any:
    """Returns the config of a checkpoint as an `AlgorithmConfig`.

    Raises:
        CheckpointError: if settings are missing that a file cannot hold, or do not fit.
    """
    record = checkpoint.manifest["config"]
    settings = decode_config(record, overrides, source, ALGORITHM_SETTINGS)
    automatic = automatic_of(checkpoint.manifest, settings, overrides)
    settings |= dict.fromkeys(automatic, "auto")
    try:
        config = config_class().update_from_dict(settings)
    except ConfigError as error:
        raise CheckpointError(f"{source}: {error}") from error
    config.note_automatic(automatic)
    return config
