"""Exports SavedModels in numbered version folders, as TensorFlow Serving reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from tfpolicies.export.job import ExportJob
from tfpolicies.export.publish import (
    link_newest,
    open_staging_folder,
    publish_folder,
    publish_version,
)
from tfpolicies.export.serving_functions import ServingFunctions
from tfpolicies.export.spec_writer import ExportResult, wrap_export_errors, write_spec
from tfpolicies.export.verify import verify_saved_model
from tfpolicies.system.fork_guard import check_tensorflow_survived_fork
from tfpolicies.system.log_suppression import suppress_conversion_output
from tfpolicies.system.paths import has_wildcards

AddFiles = Callable[[Path, ServingFunctions], None]


def export_saved_model(job: ExportJob, add_files: AddFiles | None = None) -> ExportResult:
    """Writes `<folder>/<version>/saved_model.pb` and its other files, verified.

    The version is the next free number, starting at 1. TensorFlow can load it without this package;
    the signatures are described in `tfpolicies.export.serving_functions`. Links let the folder
    itself be loaded as the newest version. `add_files` adds files to the version folder before it
    is published.

    Raises:
        ExportError: if it cannot be written or differs from the policy; the folder is then
            unchanged.
        ForkError: if this process was forked after TensorFlow had started.
    """
    check_tensorflow_survived_fork()
    target, program, state = job.target, job.program, job.state
    with wrap_export_errors("SavedModel", target), open_staging_folder(target) as staging:
        folder = staging / "1"
        serving = ServingFunctions(program, state)
        with suppress_conversion_output():
            serving.module.__call__ = serving.as_callable()
            tf.saved_model.save(serving.module, str(folder), signatures=serving.signatures)
        parity = verify_saved_model(folder, program, state)
        write_spec(folder, "saved_model", serving, parity, job.card, opset=None)
        if add_files is not None:
            add_files(folder, serving)
        link_newest(staging, staging)
        path = target / folder.name
        if not publish_folder(staging, target):
            path = publish_version(folder, target)
            link_newest(target, staging)
    return ExportResult(path, parity, _describe_use(path))


def _describe_use(path: Path) -> str:
    if has_wildcards(path):
        return (
            f"TensorFlow reads {str(path)!r} as a wildcard pattern. Load it with import_policy; or "
            "move it to a folder whose name has none of * ? [ ] and \\, for tf.saved_model.load."
        )
    return (
        f"Load it with tf.saved_model.load({str(path)!r}), which is the folder of one version; "
        f"{str(path.parent)!r}, the folder of all versions, loads the newest one, and is the model "
        "path for TensorFlow Serving."
    )
