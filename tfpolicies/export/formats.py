"""Chooses the format of an export, and writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tfpolicies.base.type_aliases import Structure
from tfpolicies.errors import ExportError
from tfpolicies.export.job import ExportJob
from tfpolicies.export.layouts.kserve import REPOSITORY, SERVICE_FILE, export_kserve
from tfpolicies.export.layouts.kubernetes import export_kubernetes
from tfpolicies.export.layouts.mlserver import export_mlserver
from tfpolicies.export.layouts.tf_serving import export_tf_serving
from tfpolicies.export.layouts.triton import export_triton
from tfpolicies.export.litert_writer import WEIGHTS, export_litert
from tfpolicies.export.model_card import ModelCard
from tfpolicies.export.onnx_writer import check_opset, export_onnx
from tfpolicies.export.publish import list_version_folders
from tfpolicies.export.saved_model_writer import export_saved_model
from tfpolicies.export.spec_file import SPEC_FILE, read_format
from tfpolicies.export.spec_writer import ExportResult
from tfpolicies.export.web import WebPage
from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.program import Program
from tfpolicies.program.runtimes.onnx import OPSET
from tfpolicies.system.paths import resolve_path

TF_SERVING = "tf-serving"
_SAVED_MODEL, _ONNX, _LITERT = "saved_model", "onnx", "litert"
_TRITON, _KSERVE = "triton", "kserve"
_WRITERS: Mapping[str, Callable[[ExportJob], ExportResult]] = {
    _SAVED_MODEL: export_saved_model,
    _ONNX: export_onnx,
    _LITERT: export_litert,
    TF_SERVING: export_tf_serving,
    _TRITON: export_triton,
    "mlserver": export_mlserver,
    _KSERVE: export_kserve,
    "kubernetes": export_kubernetes,
}
LAYOUTS = (TF_SERVING, _TRITON, "mlserver", _KSERVE, "kubernetes")
_VERSIONED_FORMATS = (_SAVED_MODEL, _TRITON)  # the formats whose specs are in version folders
_COMPATIBLE_FORMATS = {_SAVED_MODEL: _ONNX, _ONNX: _SAVED_MODEL}  # formats that may share a folder


@ensure_eager()
def export_policy(
    program: Program,
    state: PolicyState,
    export_dir: str | os.PathLike[str],
    onnx: int | bool | None = None,
    *,
    layout: str | None = None,
    litert: bool | str = False,
    observations: Structure | None = None,
    web: bool = False,
    ort_web: str | os.PathLike[str] | None = None,
    card: ModelCard | None = None,
) -> ExportResult:
    """Writes a Program with a state in one format.

    For the arguments see `TFPolicy.export_model`; `card` has the known facts of the policy.
    """
    opset = OPSET if onnx is None or isinstance(onnx, bool) else check_opset(onnx)
    export_format = _choose_format(onnx, layout, litert, web)
    export_dir = resolve_path(export_dir)
    _check_folder(export_dir, export_format)
    page = WebPage.from_arguments(web, ort_web)
    if observations is not None and not litert:
        raise ExportError(
            "observations are for comparing a LiteRT file to the policy, but litert is False. Give "
            "litert=True, 'float16' or 'int8', or leave observations out."
        )
    weights = litert if isinstance(litert, str) else "float32"
    state, card = state.copy(), card or ModelCard()
    job = ExportJob(program, state, export_dir, opset, page, weights, observations, card)
    return _WRITERS[export_format](job)


def _choose_format(
    onnx: int | bool | None, layout: str | None, litert: bool | str, web: bool
) -> str:
    """Returns the format that the arguments select."""
    if litert not in (False, True, *WEIGHTS):
        raise ExportError(
            f"litert must be True or the dtype of stored weights, one of {list(WEIGHTS)}, got "
            f"{litert!r}."
        )
    if layout not in (None, *LAYOUTS):
        raise ExportError(f"layout must be one of {list(LAYOUTS)}, got {layout!r}.")
    is_onnx = onnx is not None and onnx is not False
    onnx_option = onnx if is_onnx and layout in (None, TF_SERVING) and not web else None
    options = {"onnx": onnx_option, "layout": layout, "litert": litert, "web": web}
    descriptions = [f"{name}={value!r}" for name, value in options.items() if value]
    if len(descriptions) > 1:
        raise ExportError(
            f"{' and '.join(descriptions)} are two formats. An export has one: call export_model "
            "once for each, with separate folders."
        )
    if litert:
        return _LITERT
    return layout or (_ONNX if is_onnx or web else _SAVED_MODEL)


def _check_folder(folder: Path, export_format: str) -> None:
    """Refuses a folder with an export of another format, with which this one would mix.

    A SavedModel may be next to ONNX: one has versions, the other one files. An export must not be
    inside another one, except that of Triton in its own entry of KServe's repository.
    """
    export_format = _SAVED_MODEL if export_format == TF_SERVING else export_format
    other_folder, other_format = _find_enclosing_export(folder, export_format)
    if other_format is not None:
        raise ExportError(
            f"{str(folder)!r} is a part of the export of the format {other_format} in "
            f"{str(other_folder)!r}, and {export_format} would mix with it. Give each format a "
            "separate folder."
        )
    conflicting = _list_formats(folder) - {export_format, _COMPATIBLE_FORMATS.get(export_format)}
    if conflicting:
        raise ExportError(
            f"{str(folder)!r} has an export of another format ({', '.join(sorted(conflicting))}), "
            f"and {export_format} would mix with it. Give each format a separate folder."
        )


def _list_formats(folder: Path) -> set[str]:
    if (folder / SERVICE_FILE).exists():
        return {_KSERVE}
    formats = [
        read_format(version_folder / SPEC_FILE)
        for version_folder in (folder, *list_version_folders(folder))
    ]
    return {export_format for export_format in formats if export_format is not None}


def _find_enclosing_export(folder: Path, export_format: str) -> tuple[Path, str | None]:
    """Returns the export that contains a folder, and its format; None for the format if none."""
    for ancestor in (folder, *folder.parents[:2]):
        other_format = read_format(ancestor / SPEC_FILE)
        if other_format in _VERSIONED_FORMATS:
            return ancestor.parent, other_format
    for ancestor in folder.parents[:2]:
        if (ancestor / SERVICE_FILE).exists() and (ancestor / REPOSITORY) in (
            folder,
            folder.parent,
        ):
            is_own_entry = export_format == _TRITON and folder.parent == ancestor / REPOSITORY
            return ancestor, None if is_own_entry else _KSERVE
    return folder, None
