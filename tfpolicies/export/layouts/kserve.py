"""KServe: an `InferenceService` on Triton, with the model repository that it reads."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

from tfpolicies.export.job import ExportJob
from tfpolicies.export.layouts.triton import FIRST_VERSION, place_triton, write_triton
from tfpolicies.export.onnx_file import onnx_staging
from tfpolicies.export.result import ExportResult
from tfpolicies.export.staging import files_placed, folder_made, place_whole

SERVICE_FILE = "inference_service.yaml"
REPOSITORY = "models"
TEMPLATES = Path(__file__).with_name("templates")

_ONE_REPLICA = """\
    maxReplicas: 1  # it stores the recurrent state of each sequence, which replicas cannot share
"""


def export_kserve(job: ExportJob) -> ExportResult:
    """Writes `inference_service.yaml` and `models/<name>`, an entry written by `export_triton`.

    The name is that of the folder, in letters that Kubernetes accepts. `storageUri` is a
    placeholder for the location to which `models` is copied. Raises as `export_onnx` does.
    """
    target, name = job.target, kubernetes_name(job.target.name)
    with onnx_staging(job) as staging:
        entry = staging / REPOSITORY / name
        entry.mkdir(parents=True)
        parity = write_triton(entry, job)
        replicas = _ONE_REPLICA if job.program.ports.is_recurrent else ""
        service = fill_template("kserve.yaml", name=name, one_replica=replicas)
        (staging / SERVICE_FILE).write_text(service, encoding="utf-8")
        placed = target / REPOSITORY / name
        if place_whole(staging, target):
            path = placed / FIRST_VERSION
        else:
            with folder_made(placed), files_placed(staging, target, [SERVICE_FILE]):
                path = place_triton(entry, placed)
    service_file = str(target / SERVICE_FILE)
    return ExportResult(path, parity, f"Start it with kubectl apply -f {service_file!r}.")


def fill_template(file: str, **values: str) -> str:
    """Returns the text of a file in `templates/` with its placeholders replaced."""
    return Template((TEMPLATES / file).read_text(encoding="utf-8")).substitute(values)


def kubernetes_name(name: str) -> str:
    """Returns a valid Kubernetes name: at most 40 lower-case letters, digits and hyphens.

    >>> kubernetes_name("CartPole_v1"), kubernetes_name("7"), kubernetes_name("...")
    ('cartpole-v1', 'policy-7', 'policy')
    """
    plain = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"policy-{plain}"
    return named[:40].strip("-")
