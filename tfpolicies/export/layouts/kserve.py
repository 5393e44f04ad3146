"""KServe: an `InferenceService` on Triton, with the model repository that it reads."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

from tfpolicies.export.job import ExportJob
from tfpolicies.export.layouts.triton import FIRST_VERSION, publish_triton, write_triton
from tfpolicies.export.onnx_writer import open_onnx_staging
from tfpolicies.export.publish import make_folder, publish_folder, replace_files
from tfpolicies.export.spec_writer import ExportResult

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
    target, name = job.target, make_kubernetes_name(job.target.name)
    with open_onnx_staging(job) as staging:
        entry = staging / REPOSITORY / name
        entry.mkdir(parents=True)
        parity = write_triton(entry, job)
        replicas = _ONE_REPLICA if job.program.ports.is_recurrent else ""
        service = fill_template("kserve.yaml", name=name, one_replica=replicas)
        (staging / SERVICE_FILE).write_text(service, encoding="utf-8")
        destination = target / REPOSITORY / name
        if publish_folder(staging, target):
            path = destination / FIRST_VERSION
        else:
            with make_folder(destination), replace_files(staging, target, [SERVICE_FILE]):
                path = publish_triton(entry, destination)
    service_file = str(target / SERVICE_FILE)
    return ExportResult(path, parity, f"Start it with kubectl apply -f {service_file!r}.")


def fill_template(file: str, **values: str) -> str:
    """Returns the text of a file in `templates/` with its placeholders replaced."""
    return Template((TEMPLATES / file).read_text(encoding="utf-8")).substitute(values)


def make_kubernetes_name(name: str) -> str:
    """Returns a valid Kubernetes name: at most 40 lower-case letters, digits and hyphens.

    >>> make_kubernetes_name("CartPole_v1"), make_kubernetes_name("7"), make_kubernetes_name("...")
    ('cartpole-v1', 'policy-7', 'policy')
    """
    plain = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    prefixed = plain if plain[:1].isalpha() else f"policy-{plain}"
    return prefixed[:40].strip("-")
