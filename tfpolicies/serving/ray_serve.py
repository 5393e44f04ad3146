"""Deploys an exported policy on Ray Serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfpolicies.errors import MissingPackageError, UsageError
from tfpolicies.export.spec_file import name_model
from tfpolicies.system.paths import describe_path, resolve_path


def deployment(export: str | Path, *, name: str | None = None, **options: object) -> Any:
    """Returns an application for `ray.serve.run` that serves an exported policy.

    Each replica loads the export, answers HTTP with the Open Inference Protocol as `tfpolicies
    serve` does, batches simultaneous requests, and loads newer versions. Steps of one sequence may
    reach different replicas, so sequences are kept only with a single replica; with several,
    clients must send whole sequences, with their `state_in_<i>`.

    Args:
        export: the folder of an ONNX export, or of numbered versions, that all nodes can read.
        name: of the model; None for the folder's, as in `tfpolicies serve`.
        options: of `ray.serve.deployment`, such as `num_replicas=2`.

    Raises:
        MissingPackageError: if Ray Serve or a package for serving is not installed.
        UsageError: if there is no export.
    """
    try:
        from ray import serve

        from tfpolicies.serving.model_version import find_version
        from tfpolicies.serving.repository import ModelRepository
        from tfpolicies.serving.rest import make_app
        from tfpolicies.serving.served_model import ServingLimits
    except ImportError as error:
        raise MissingPackageError(
            f"Ray Serve needs packages that are not installed ({error}). Install them: "
            "pip install 'tfpolicies[serve]' 'ray[serve]'"
        ) from error
    folder = resolve_path(export)
    try:
        find_version(folder)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"There is no export to deploy in {describe_path(export, folder)}. {error} Give the "
            "folder of an export."
        ) from error
    model = name or name_model(folder)
    is_single_replica = (
        options.get("num_replicas", 1) in (None, 1) and "autoscaling_config" not in options
    )

    def build() -> Any:
        limits = ServingLimits() if is_single_replica else ServingLimits(max_sequences=0)
        return make_app(ModelRepository({model: folder}, limits), manage_models=True)

    settings = {"name": model, "max_ongoing_requests": 256, **options}
    return serve.deployment(**settings)(serve.ingress(build)()).bind()
