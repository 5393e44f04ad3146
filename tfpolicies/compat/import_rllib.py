"""`tfpolicies import-rllib`: converts checkpoints of RLlib's TensorFlow stack.

RLlib need not be installed, and nothing in the checkpoint is executed: see `pickle_reader.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfpolicies.errors import CheckpointError, TfPoliciesError, UsageError
from tfpolicies.system.installed_distributions import import_or_explain
from tfpolicies.system.paths import describe_path, resolve_path
from tfpolicies.system.regular_files import read_regular

if TYPE_CHECKING:
    from gymnasium import spaces

SUMMARY = "convert a checkpoint of RLlib's TensorFlow policies"
_DESCRIPTION = "rllib_checkpoint.json"
_STATE = "policy_state.pkl"
_ID = re.compile(r"(?!\.{1,2}$)[^/\\\0]+")  # a valid name of a folder
_MAX_DESCRIPTION_BYTES = 1 << 20  # bytes of the description
_RLLIB_EPSILON = 1e-6  # added by RLlib to standard deviations
_EPSILON = 1e-8


class ImportResult(NamedTuple):
    """A policy made from a checkpoint.

    Attributes:
        policy: has the checkpoint's weights.
        not_imported: the parts of its config and state that were not imported.
    """

    policy: Any
    not_imported: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder that RLlib wrote for an algorithm or policy",
    )
    parser.add_argument("out", metavar="OUT", help="folder to write; must be missing or empty")


def run(args: argparse.Namespace) -> int:
    """Writes a checkpoint for each policy, once all of them are made; returns the exit status.

    Raises:
        CheckpointError: if the checkpoint is not one of RLlib, or has unsupported content.
        MissingPackageError: if this environment has no Gymnasium or TensorFlow.
        UsageError: if the output folder exists and is not empty.
    """
    out = resolve_path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{str(out)!r} exists already, and is not empty. Name another folder.")
    import_or_explain("`tfpolicies import-rllib`", "tfpolicies.compat.rllib_spaces")
    results = import_checkpoint(args.checkpoint)
    for policy_id, (policy, not_imported) in results.items():
        folder = out / policy_id if len(results) > 1 else out
        policy.export_checkpoint(folder)
        print(f"{policy_id}: a {type(policy).__name__} is in {str(folder)!r}.")
        if not_imported:
            print(f"  Not imported: {'; '.join(not_imported)}.")
    return 0


def import_checkpoint(checkpoint: str | os.PathLike[str]) -> dict[str, ImportResult]:
    """Returns the policies of a checkpoint that RLlib 2.0 to 2.10 wrote, by id.

    Args:
        checkpoint: the folder of an algorithm or of a policy, saved with `framework` "tf" or "tf2".

    Raises:
        CheckpointError: if it is another folder, is damaged, or has unsupported content; the
            message names it.
        SpaceError: if its spaces are not supported.
        ModelSettingError: if a setting of its networks has an invalid value.
        ModelImportError: if its weights do not fit the network that its config describes.
        WeightsError: if its counters are not numbers.
    """
    folder = resolve_path(checkpoint)
    description = _read_description(folder, describe_path(checkpoint, folder))
    if description["type"] == "Policy":
        policy_id = folder.name if folder.parent.name == "policies" else "default_policy"
        return {policy_id: _import_policy(folder, policy_id)}
    ids = description.get("policy_ids") or []
    for policy_id in ids:
        if not isinstance(policy_id, str) or not _ID.fullmatch(policy_id):
            raise CheckpointError(
                f"{str(folder)!r} names the policy {policy_id!r}, which is not a valid id."
            )
    if not ids:
        raise CheckpointError(f"{str(folder)!r} names no policies. Give the folder of one policy.")
    return {
        policy_id: _import_policy(folder / "policies" / policy_id, policy_id) for policy_id in ids
    }


def _read_description(folder: Path, name: str) -> Mapping[str, Any]:
    """Returns the content of `rllib_checkpoint.json`; messages call the folder `name`."""
    try:
        description = json.loads(read_regular(folder / _DESCRIPTION, _MAX_DESCRIPTION_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{name} has no {_DESCRIPTION} that can be read: {error}. Give the folder of "
            "a checkpoint that RLlib 2.0 to 2.10 saved."
        ) from error
    kind = description.get("type") if isinstance(description, dict) else None
    if kind not in ("Algorithm", "Policy"):
        raise CheckpointError(
            f"{name} must be a checkpoint of an Algorithm or Policy, got {kind!r:.80}. The "
            "new API stack is not supported."
        )
    if description.get("format", "cloudpickle") != "cloudpickle":
        raise CheckpointError(
            f"{name} is of the format {description['format']!r:.80}; save it in RLlib with "
            "checkpoint_format='cloudpickle'."
        )
    return description


def _import_policy(folder: Path, policy_id: str) -> ImportResult:
    from tfpolicies.compat.pickle_process import read_pickle

    try:
        state = read_pickle(folder / _STATE)
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{_STATE} must hold a dict, got {state!r:.80}.")
        return _build_policy(state, policy_id, str(folder))
    except TfPoliciesError as error:
        error.args = (f"Policy {policy_id!r} of {str(folder)!r}: {error}",)
        raise


def _build_policy(state: Mapping[str, Any], policy_id: str, source: str) -> ImportResult:
    from tfpolicies.compat.rllib_checkpoint_config import convert_policy_spec
    from tfpolicies.compat.rllib_policies import convert_policy_weights, make_policy_networks
    from tfpolicies.compat.rllib_spaces import convert_space

    spec: Any = state.get("policy_spec")
    settings = convert_policy_spec(spec)
    model_space, action_space = (
        convert_space(spec.get(name), name) for name in ("observation_space", "action_space")
    )
    networks = make_policy_networks(settings, model_space, action_space)
    observation_space = getattr(model_space, "original_space", model_space)
    config = {**settings.config.to_dict(), **networks.settings, "__policy_id": policy_id}
    policy = settings.policy_class(observation_space, action_space, config)
    weights = convert_policy_weights(state.get("weights"), networks.parts, policy, source)
    filters, notes = _convert_filter(state, config, observation_space)
    policy.set_state(_merge_state(policy.get_state(), state, weights, filters))
    not_imported = [*settings.not_imported, *notes, "the state of the optimizer"]
    if policy.program.layout.targets:
        not_imported.append(
            "target networks, which RLlib does not save (they are now copies of the networks)"
        )
    return ImportResult(policy, not_imported)


def _merge_state(
    new_state: dict[str, Any],
    state: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    filters: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Returns a new policy's state, updated with the checkpoint's values."""
    result = {**new_state, "weights": {**new_state["weights"], **weights}}
    result.pop("target_weights", None)
    for name in ("global_timestep", "num_grad_updates", "current_kl_coeff"):
        if name in new_state and isinstance(state.get(name), int | float):
            result[name] = state[name]
    if filters:
        result["filter"] = {**new_state["filter"], **filters}
    return result


# -- filters --------------------------------------------------------------------------------------


def _convert_filter(
    state: Mapping[str, Any], config: Mapping[str, Any], observation_space: spaces.Space
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the converted statistics of a MeanStdFilter, and notes for the report."""
    from gymnasium import spaces

    if config["observation_filter"] == "NoFilter":
        return {}, []
    filter_state = _find_filter_state(state)
    if not isinstance(observation_space, spaces.Box) or observation_space.dtype.kind != "f":
        raise CheckpointError(
            "The checkpoint's observation_filter normalises the flat encoding of "
            f"{observation_space}, and cannot be imported: filters of this package normalise only "
            "Boxes of floats."
        )
    count, mean, squares = _read_statistics(filter_state, observation_space.shape)
    std = (
        np.sqrt(squares / (count - 1)) + _RLLIB_EPSILON - _EPSILON
    )  # so that both divide by the same number
    stats = {"count": np.float64(count), "mean": mean, "m2": (count - 1) * np.square(std)}
    note = "the filter's clip=None (now clipped at 10 standard deviations)"
    arrays = {f"frozen/0/{name}": np.asarray(x, np.float64) for name, x in stats.items()}
    return arrays, [] if filter_state.get("clip") == 10 else [note]


def _find_filter_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    connectors = state.get("connector_configs")
    agent = connectors.get("agent") if isinstance(connectors, Mapping) else None
    steps = agent[1] if isinstance(agent, list | tuple) and len(agent) == 2 else ()
    for step in steps if isinstance(steps, list | tuple) else ():
        is_filter = isinstance(step, tuple) and len(step) == 2 and "MeanStd" in str(step[0])
        if is_filter and isinstance(step[1], Mapping):
            return step[1]
    raise CheckpointError(
        "The checkpoint has an observation_filter, but its connectors have no statistics of it. "
        "Save it in RLlib with enable_connectors=True."
    )


def _read_statistics(
    filter_state: Mapping[str, Any], shape: tuple[int, ...]
) -> tuple[int, np.ndarray, np.ndarray]:
    """Returns count, mean and sum of squared deviations."""
    stats = filter_state.get("running_stats")
    stat = stats[0] if isinstance(stats, list) and len(stats) == 1 else None
    stat = stat if isinstance(stat, Mapping) else {}
    count: Any = stat.get("num_pushes")
    arrays: list[Any] = [stat.get(x) for x in ("mean_array", "std_array")]
    has_arrays = all(isinstance(x, np.ndarray) and x.shape == shape for x in arrays)
    is_default = filter_state.get("demean") is True and filter_state.get("destd") is True
    if not has_arrays or not is_default or not isinstance(count, int) or count < 2:
        raise CheckpointError(
            f"The checkpoint's observation_filter must have the mean and spread of at least two "
            f"observations of the shape {shape}, got {count!r:.20} with demean="
            f"{filter_state.get('demean')!r:.20}, destd={filter_state.get('destd')!r:.20}."
        )
    return count, arrays[0], arrays[1]
