"""Kubernetes: the ONNX files of a policy with an image and a deployment of `tfpolicies serve`."""

from __future__ import annotations

import os
from pathlib import Path

from tfpolicies._version import __version__
from tfpolicies.export.layouts.kserve import kubernetes_name
from tfpolicies.export.onnx_file import checked_opset, onnx_staging, write_onnx
from tfpolicies.export.result import SPEC_FILE, ExportResult
from tfpolicies.export.staging import place_files
from tfpolicies.export.verify import ONNX_FILES
from tfpolicies.program.program import Program
from tfpolicies.program.runtimes.onnx import OPSET
from tfpolicies.state import PolicyState

MANIFEST_FILE, IMAGE_FILE = "kubernetes.yaml", "Dockerfile"
REGISTRY = "YOUR-REGISTRY"

_IMAGE = """\
FROM python:3.12-slim
RUN pip install --no-cache-dir 'tfpolicies-serve=={version}'
WORKDIR /models/{name}
COPY --chmod=0444 {files} ./
USER 65532:65532
EXPOSE 8000 8001
ENTRYPOINT ["tfpolicies", "serve", "{name}=/models/{name}", "--host", "0.0.0.0", \
"--drain-seconds", "10", "--log-format", "json"]
"""

_MANIFEST = """\
# Build and push the image, put its address in the place of {registry}, apply:
#   docker build -t {registry}/{name}:1 . && docker push {registry}/{name}:1
#   kubectl apply -f {file}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: {name}
spec:
{replicas}  selector:
    matchLabels:
      app.kubernetes.io/name: {name}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      maxSurge: 1
      maxUnavailable: 0
  template:
    metadata:
      labels:
        app.kubernetes.io/name: {name}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 60  # 10 to drain, up to 40 for requests that run
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: server
          image: {registry}/{name}:1
          ports:
            - name: http
              containerPort: 8000
            - name: grpc
              containerPort: 8001
          startupProbe:  # up to two minutes to load the model
            httpGet:
              path: /v2/health/ready
              port: http
            periodSeconds: 2
            failureThreshold: 60
          readinessProbe:  # fails at once when the server drains
            httpGet:
              path: /v2/health/ready
              port: http
            periodSeconds: 2
            timeoutSeconds: 2
            failureThreshold: 1
          livenessProbe:
            httpGet:
              path: /v2/health/live
              port: http
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 3
          resources:
            requests:
              cpu: 500m
              memory: 512Mi
            limits:
              memory: 2Gi
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop:
                - ALL
          volumeMounts:
            - name: tmp
              mountPath: /tmp
      volumes:
        - name: tmp
          emptyDir: {{}}
---
apiVersion: v1
kind: Service
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: {name}
spec:
  selector:
    app.kubernetes.io/name: {name}
  ports:
    - name: http
      port: 8000
      targetPort: http
    - name: grpc
      port: 8001
      targetPort: grpc
"""

_ONE_REPLICA = """\
  replicas: 1  # it keeps the memory of each sequence, which others would not know
"""

_AUTOSCALER = """\
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: {name}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {name}
  minReplicas: 2
  maxReplicas: 10
  metrics:
    - type: Resource
      resource:
        name: cpu
        target:
          type: Utilization
          averageUtilization: 70
"""


def export_kubernetes(
    program: Program, state: PolicyState, export_dir: str | os.PathLike[str], opset: int = OPSET
) -> ExportResult:
    """Writes `kubernetes.yaml` and a `Dockerfile` beside the ONNX files, verified.

    The image runs `tfpolicies serve`. The model's name is that of the folder, in letters that
    Kubernetes takes. A policy with a memory has one replica; others have an autoscaler.

    Args:
        program: what the policy shares with its kind.
        state: what it owns.
        export_dir: the folder; made if missing.
        opset: the version of ONNX's operators.

    Returns:
        The folder and how well both graphs agree with the policy.

    Raises:
        MissingPackageError: if tf2onnx or ONNX Runtime is not installed.
        ExportError: if it cannot be written or does not do what the policy does; `export_dir` is
            then as it was.
        ForkError: if this process was forked after TensorFlow had started.
    """
    opset, target = checked_opset(opset), Path(export_dir)
    name, is_recurrent = kubernetes_name(target.name), program.ports.is_recurrent
    files = [*ONNX_FILES.values(), SPEC_FILE]
    image = _IMAGE.format(version=__version__, files=" ".join(files), name=name)
    replicas, autoscaler = (_ONE_REPLICA, "") if is_recurrent else ("", _AUTOSCALER)
    manifest = (_MANIFEST + autoscaler).format(
        registry=REGISTRY, name=name, file=MANIFEST_FILE, replicas=replicas
    )
    with onnx_staging(target, opset) as staging:
        parity = write_onnx(staging, program, state.copy(), opset, layout="kubernetes")
        (staging / IMAGE_FILE).write_text(image, encoding="utf-8")
        (staging / MANIFEST_FILE).write_text(manifest, encoding="utf-8")
        place_files(staging, target, [IMAGE_FILE, MANIFEST_FILE, *files])
    use = (
        f"Build the image of its Dockerfile, then kubectl apply -f {str(target / MANIFEST_FILE)!r}."
    )
    return ExportResult(target, parity, use)
