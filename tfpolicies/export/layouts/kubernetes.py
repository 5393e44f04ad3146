"""Kubernetes: the ONNX files of a policy with an image and a deployment of `tfpolicies serve`."""

from __future__ import annotations

from tfpolicies._version import __version__
from tfpolicies.export.job import ExportJob
from tfpolicies.export.layouts.kserve import fill_template, make_kubernetes_name
from tfpolicies.export.onnx_writer import write_onnx
from tfpolicies.export.spec_writer import SPEC_FILE, ExportResult
from tfpolicies.export.verify import ONNX_FILES

MANIFEST_FILE, IMAGE_FILE = "kubernetes.yaml", "Dockerfile"

_ONE_REPLICA = """\
  replicas: 1  # it stores the recurrent state of each sequence, which replicas cannot share
"""


def export_kubernetes(job: ExportJob) -> ExportResult:
    """Writes `kubernetes.yaml`, a `Dockerfile` and the ONNX files, verified.

    The image runs `tfpolicies serve`. The model's name is that of the folder, in letters that
    Kubernetes accepts. A recurrent policy has one replica; others have an autoscaler. Raises as
    `export_onnx` does.
    """
    target, name = job.target, make_kubernetes_name(job.target.name)
    files = [*ONNX_FILES.values(), SPEC_FILE]
    image = fill_template("Dockerfile", version=__version__, files=" ".join(files), name=name)
    if job.program.ports.is_recurrent:
        manifest = fill_template("kubernetes.yaml", name=name, replicas=_ONE_REPLICA)
    else:
        manifest = fill_template("kubernetes.yaml", name=name, replicas="")
        manifest += fill_template("autoscaler.yaml", name=name)
    extra_files = {IMAGE_FILE: image.encode(), MANIFEST_FILE: manifest.encode()}
    parity = write_onnx(job, extra_files, layout="kubernetes")
    use = (
        f"Build the image of its Dockerfile, then kubectl apply -f {str(target / MANIFEST_FILE)!r}."
    )
    return ExportResult(target, parity, use)
