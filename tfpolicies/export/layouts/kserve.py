"""KServe: an `InferenceService` on Triton, beside the model repository that it reads."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tfpolicies.export.layouts.triton import FIRST_VERSION, place_triton, write_triton
from tfpolicies.export.onnx_file import checked_opset, onnx_staging
from tfpolicies.export.result import ExportResult
from tfpolicies.export.staging import files_placed, folder_made, place_whole
from tfpolicies.program.program import Program
from tfpolicies.program.runtimes.onnx import OPSET
from tfpolicies.state import PolicyState

SERVICE_FILE = "inference_service.yaml"
REPOSITORY = "models"
STORAGE = "s3://YOUR-BUCKET"

_SERVICE = """\
# Copy the folder {repository} to the place that storageUri names, then: kubectl apply -f {file}
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: {name}
spec:
  predictor:
    minReplicas: 1
{one_replica}    model:
      modelFormat:
        name: triton
      runtime: kserve-tritonserver
      protocolVersion: v2
      storageUri: {storage}/{name}/{repository}
"""

_ONE_REPLICA = """\
    maxReplicas: 1  # it keeps the memory of each sequence, which others would not know
"""


def export_kserve(
    program: Program, state: PolicyState, export_dir: str | os.PathLike[str], opset: int = OPSET
) -> ExportResult:
    """Writes `inference_service.yaml` and `models/<name>`, an entry as `export_triton` writes it.

    The name is that of the folder, in letters that Kubernetes takes. `storageUri` is a placeholder:
    it is to name the place that `models` was copied to.

    Args:
        program: what the policy shares with its kind.
        state: what it owns.
        export_dir: the folder; made if missing.
        opset: the version of ONNX's operators.

    Returns:
        The version folder and how well it agrees with the policy.

    Raises:
        MissingPackageError: if tf2onnx or ONNX Runtime is not installed.
        ExportError: if it cannot be written or does not do what the policy does; `export_dir` is
            then as it was.
        ForkError: if this process was forked after TensorFlow had started.
    """
    opset, target = checked_opset(opset), Path(export_dir)
    name = kubernetes_name(target.name)
    with onnx_staging(target, opset) as staging:
        entry = staging / REPOSITORY / name
        entry.mkdir(parents=True)
        parity = write_triton(entry, program, state.copy(), opset)
        service = _SERVICE.format(
            file=SERVICE_FILE,
            name=name,
            one_replica=_ONE_REPLICA if program.ports.is_recurrent else "",
            repository=REPOSITORY,
            storage=STORAGE,
        )
        (staging / SERVICE_FILE).write_text(service, encoding="utf-8")
        placed = target / REPOSITORY / name
        if place_whole(staging, target):
            path = placed / FIRST_VERSION
        else:
            with folder_made(placed), files_placed(staging, target, [SERVICE_FILE]):
                path = place_triton(entry, placed)
    service_file = str(target / SERVICE_FILE)
    return ExportResult(path, parity, f"Start it with kubectl apply -f {service_file!r}.")


def kubernetes_name(name: str) -> str:
    """Returns a name as Kubernetes takes it: at most 40 lower-case letters, digits and hyphens.

    >>> kubernetes_name("CartPole_v1"), kubernetes_name("7"), kubernetes_name("...")
    ('cartpole-v1', 'policy-7', 'policy')
    """
    plain = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"policy-{plain}"
    return named[:40].strip("-")
