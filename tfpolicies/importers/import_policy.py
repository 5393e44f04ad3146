"""`import_policy`: a policy that acts with a third-party SavedModel, ONNX file or Keras model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from tfpolicies.errors import (
    CheckpointError,
    MissingModelFileError,
    ModelImportError,
    SpaceError,
    UsageError,
)
from tfpolicies.export.spec_writer import FORMAT, FORMAT_VERSION, SPEC_FILE
from tfpolicies.importers.imported_model import ImportedModel
from tfpolicies.importers.imported_policy import MODEL_SETTING, ImportedPolicy, MappedModel
from tfpolicies.importers.io_mapping import IOMapping, infer_io_mapping, map_export
from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.models.spaces import require_non_empty
from tfpolicies.storage.spaces_json import check_space_sizes, decode_space
from tfpolicies.system.fork_guard import check_tensorflow_survived_fork
from tfpolicies.system.paths import describe_path, resolve_path
from tfpolicies.system.regular_files import read_regular

if TYPE_CHECKING:
    import keras

_MAX_SPEC_BYTES = 1 << 26  # bytes of a policy_spec.json


@ensure_eager()
def import_policy(
    path: str | os.PathLike[str] | keras.Model,
    *,
    observation_space: gym.Space | None = None,
    action_space: gym.Space | None = None,
    names: Mapping[str, str] | None = None,
    signature: str | None = None,
    normalized: bool = False,
    explore: bool = False,
    seed: int | None = None,
    model_work_limit: float = 1.0,
    providers: Sequence[str] | None = None,
) -> ImportedPolicy:
    """Returns a policy that acts with a third-party model, and never learns.

    Use it for evaluations, in a `PolicyMap`, and as an opponent in training. Supported are:

    * exports of this package, whose `policy_spec.json` gives spaces, inputs and outputs;
    * a SavedModel of TF-Agents' PolicySaver, with `action(time_step, policy_state)` and
      `get_initial_state`;
    * any other SavedModel, ONNX file, `.keras` file or `keras.Model`: with one input for each part
      of the observation and one output of actions or logits.

    A file can only compute. Each operation of a SavedModel must be on the list of those that read
    only their inputs and the model's own variables: reading and writing files, Python, lookup
    tables from files and operations of other libraries are refused. An ONNX file may use ONNX's own
    operators, with weights in the file, or in files next to it. A `.keras` file may name Keras
    layers without code, and must stay within the computation limit of a checkpoint's model. An ONNX
    file is first run in a separate process, and each call is limited to 30 seconds and 1 GiB. A
    call of a SavedModel is also limited to 30 seconds, and such models run one at a time.

    Args:
        path: a folder or file, or a `keras.Model`.
        observation_space: the space of the model's observations; not needed for exports of this
            package.
        action_space: the space of its actions; not needed for exports of this package.
        names: inputs and outputs that cannot be inferred: `{"obs": input, "actions": output}`, or
            "logits" in place of "actions" for Discrete and MultiDiscrete actions. Parts of nested
            spaces are `obs_<key>` and `actions_<key>`; recurrent state is `state_in_0`, ... and
            `state_out_0`, ..., initially zeros.
        signature: the function of a SavedModel; by default `action`, else `serving_default`.
        normalized: whether actions of a Box are from -1 to 1 instead of within its bounds.
        explore: whether actions are drawn from logits, unless a call sets it.
        seed: the seed of these draws.
        model_work_limit: how many times the default computation limit the model of a `.keras` file
            may use; see `docs/decisions/003`. `math.inf` for no limit, which also lifts the limits
            of ONNX files and SavedModels.
        providers: for an ONNX file: the execution providers of ONNX Runtime, such as
            `["CUDAExecutionProvider"]`; None: the CPU.

    Raises:
        MissingModelFileError: if there is no such file; also a FileNotFoundError.
        ModelImportError: if it is damaged, contains something that is refused, or does not fit; the
            message names the inputs and outputs.
        SpaceError: if a space is missing or cannot be used.
        UsageError: for arguments that do not fit each other, and providers that ONNX Runtime lacks.
        ForkError: if this process was forked after TensorFlow had started.
    """
    check_tensorflow_survived_fork()
    if providers is not None:
        _require_providers(providers)
    model, spec = _open_model(path, signature, model_work_limit, providers)
    if providers is not None and not model.supports_providers:
        raise UsageError(f"providers={list(providers)!r:.200} are for ONNX files; leave them out.")
    io_mapping: IOMapping | None = None
    if spec is not None:
        if names or normalized:
            raise UsageError(
                "An export of this package defines its own names: leave `names` and `normalized` "
                "out."
            )
        io_mapping, observation_space, action_space = _parse_spec(model, spec)
    for name, space in (("observation_space", observation_space), ("action_space", action_space)):
        if not isinstance(space, gym.Space):
            source = f"{model.source[0].lower()}{model.source[1:]}"
            got = "" if space is None else f", and {space!r} is not a gymnasium space"
            raise SpaceError(f"Give {name}: {source} does not define it{got}.")
        require_non_empty(space, name)
    io_mapping = io_mapping or infer_io_mapping(model, observation_space, action_space, names)  # type: ignore[arg-type]
    config = {
        "normalize_actions": normalized,
        "clip_actions": True,
        "explore": explore,
        "seed": seed,
        MODEL_SETTING: MappedModel(model, io_mapping),
    }
    return ImportedPolicy(observation_space, action_space, config)  # type: ignore[arg-type]


def _open_model(
    path: str | os.PathLike[str] | keras.Model,
    signature: str | None,
    model_work_limit: float,
    providers: Sequence[str] | None,
) -> tuple[ImportedModel, Mapping[str, Any] | None]:
    """Returns a model, and its `policy_spec.json` if this package exported it."""
    import keras

    if isinstance(path, keras.Model):
        from tfpolicies.importers.keras_model import ImportedKerasModel

        return ImportedKerasModel(path), None
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"import_policy takes the path of a model, or a keras.Model, got {path!r:.200}."
        )
    location = resolve_path(path)
    name = describe_path(path, location)
    if not location.exists():
        raise MissingModelFileError(f"There is no file or folder {name}. Check the path.")
    if location.suffix == ".keras":
        from tfpolicies.importers.keras_model import read_keras_file

        return read_keras_file(location, model_work_limit), None
    from tfpolicies.importers.saved_model import ImportedSavedModel, find_saved_model

    if location.is_dir() and (folder := find_saved_model(location)):
        spec = _read_spec(folder)
        function_name = "serving_default" if spec is not None and signature is None else signature
        return ImportedSavedModel(folder, function_name, math.isfinite(model_work_limit)), spec
    from tfpolicies.importers.onnx_file import ImportedOnnxFile

    file = location / "model.onnx" if location.is_dir() else location
    if not file.exists() or file.suffix != ".onnx":
        raise MissingModelFileError(
            f"{name} is neither a SavedModel, nor a .onnx or .keras file. Give the folder "
            "that has saved_model.pb, or the file."
        )
    spec = _read_spec(file.parent)
    describes_file = spec is not None and file.name in spec.get("files", {}).values()
    is_limited = math.isfinite(model_work_limit)
    return ImportedOnnxFile(file, is_limited, providers), spec if describes_file else None


def _require_providers(providers: Sequence[str]) -> None:
    from tfpolicies.export.player import require_providers

    try:
        require_providers(providers)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _read_spec(folder: Path) -> Mapping[str, Any] | None:
    path = folder / SPEC_FILE
    if not path.exists():
        return None
    try:
        spec = json.loads(read_regular(path, _MAX_SPEC_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelImportError(f"{str(path)!r} cannot be read: {error}.") from error
    version = (spec.get("format"), spec.get("format_version")) if isinstance(spec, dict) else None
    if version != (FORMAT, FORMAT_VERSION):
        raise ModelImportError(
            f"{str(path)!r} is of the format {version}; export the policy again."
        )
    return dict(spec)


def _parse_spec(model: ImportedModel, spec: Mapping[str, Any]) -> tuple[IOMapping, Any, Any]:
    try:
        check_space_sizes(dict(spec))
        spaces = [decode_space(spec[name]) for name in ("observation_space", "action_space")]
        return map_export(model, spec), *spaces  # type: ignore[return-value]
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        raise ModelImportError(
            f"The {SPEC_FILE} of {model.source} is malformed: {error!r:.200}. Export the policy "
            "again."
        ) from error
