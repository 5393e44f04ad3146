"""What the published schemas of Kubernetes say of the objects that an export writes, kept by hand.

From the OpenAPI documents of Kubernetes 1.31 (apps/v1, v1 and autoscaling/v2): of each kind the
fields that an export may use, with `!` those that are required.
"""

import re

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")

ROOTS = {
    ("apps/v1", "Deployment"): "Deployment",
    ("v1", "Service"): "Service",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "HorizontalPodAutoscaler",
}
ROOT = {"apiVersion!": str, "kind!": str, "metadata!": "Meta"}
KINDS = {
    "Meta": {"name": NAME, "namespace": NAME, "labels": "Labels", "annotations": dict},
    "Deployment": {**ROOT, "spec!": "DeploymentSpec"},
    "DeploymentSpec": {
        "replicas": int,
        "selector!": "Selector",
        "strategy": "Strategy",
        "template!": "PodTemplate",
        "minReadySeconds": int,
        "revisionHistoryLimit": int,
        "progressDeadlineSeconds": int,
    },
    "Selector": {"matchLabels": "Labels"},
    "Strategy": {"type": ("Recreate", "RollingUpdate"), "rollingUpdate": "RollingUpdate"},
    "RollingUpdate": {"maxSurge": (int, str), "maxUnavailable": (int, str)},
    "PodTemplate": {"metadata": "Meta", "spec": "PodSpec"},
    "PodSpec": {
        "containers!": ["Container"],
        "volumes": ["Volume"],
        "automountServiceAccountToken": bool,
        "serviceAccountName": NAME,
        "terminationGracePeriodSeconds": int,
        "securityContext": "PodSecurity",
    },
    "PodSecurity": {
        "runAsNonRoot": bool,
        "runAsUser": int,
        "runAsGroup": int,
        "fsGroup": int,
        "seccompProfile": "Seccomp",
    },
    "Seccomp": {"type!": ("RuntimeDefault", "Unconfined", "Localhost")},
    "Container": {
        "name!": NAME,
        "image": str,
        "args": [str],
        "command": [str],
        "ports": ["ContainerPort"],
        "startupProbe": "Probe",
        "readinessProbe": "Probe",
        "livenessProbe": "Probe",
        "resources": "Resources",
        "securityContext": "ContainerSecurity",
        "volumeMounts": ["Mount"],
    },
    "ContainerPort": {
        "name": NAME,
        "containerPort!": int,
        "protocol": ("TCP", "UDP", "SCTP"),
    },
    "Probe": {
        "httpGet": "HttpGet",
        "initialDelaySeconds": int,
        "periodSeconds": int,
        "timeoutSeconds": int,
        "successThreshold": int,
        "failureThreshold": int,
    },
    "HttpGet": {"path": str, "port!": (int, str), "scheme": ("HTTP", "HTTPS")},
    "Resources": {"requests": "Quantities", "limits": "Quantities"},
    "Quantities": {"cpu": QUANTITY, "memory": QUANTITY},
    "ContainerSecurity": {
        "allowPrivilegeEscalation": bool,
        "readOnlyRootFilesystem": bool,
        "runAsNonRoot": bool,
        "capabilities": "Capabilities",
    },
    "Capabilities": {"add": [str], "drop": [str]},
    "Mount": {"name!": NAME, "mountPath!": str, "readOnly": bool},
    "Volume": {"name!": NAME, "emptyDir": "EmptyDir"},
    "EmptyDir": {"medium": str, "sizeLimit": QUANTITY},
    "Service": {**ROOT, "spec!": "ServiceSpec"},
    "ServiceSpec": {
        "selector": "Labels",
        "ports": ["ServicePort"],
        "type": ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
    },
    "ServicePort": {
        "name": NAME,
        "port!": int,
        "targetPort": (int, str),
        "protocol": ("TCP", "UDP", "SCTP"),
        "appProtocol": str,
    },
    "HorizontalPodAutoscaler": {**ROOT, "spec!": "AutoscalerSpec"},
    "AutoscalerSpec": {
        "scaleTargetRef!": "Reference",
        "minReplicas": int,
        "maxReplicas!": int,
        "metrics": ["Metric"],
        "behavior": dict,
    },
    "Reference": {"apiVersion": str, "kind!": str, "name!": NAME},
    "Metric": {
        "type!": ("Resource", "ContainerResource", "Pods", "Object", "External"),
        "resource": "ResourceMetric",
    },
    "ResourceMetric": {"name!": str, "target!": "Target"},
    "Target": {
        "type!": ("Utilization", "Value", "AverageValue"),
        "averageUtilization": int,
        "averageValue": QUANTITY,
        "value": QUANTITY,
    },
}


def find_faults(document):
    """Returns what the schemas do not know, miss or type otherwise in an object."""
    root = ROOTS.get((document.get("apiVersion"), document.get("kind")))
    return [*_faults(document, root, root)] if root else [f"no such kind: {document}"]


def _faults(value, kind, path):
    if kind == "Labels":
        labels = value.items() if isinstance(value, dict) else [("", None)]
        if not all(LABEL_KEY.fullmatch(k) and isinstance(v, str) for k, v in labels):
            yield f"{path}: {value!r}"
    elif isinstance(kind, str):
        yield from _object_faults(value, KINDS[kind], path)
    elif isinstance(kind, list):
        if not isinstance(value, list):
            yield f"{path}: no list"
        else:
            for i, each in enumerate(value):
                yield from _faults(each, kind[0], f"{path}[{i}]")
    elif isinstance(kind, re.Pattern):
        if not (isinstance(value, str) and kind.fullmatch(value)):
            yield f"{path}: {value!r}"
    elif isinstance(kind, tuple):
        types = tuple(x for x in kind if isinstance(x, type))
        if value not in kind and not (types and isinstance(value, types)):
            yield f"{path}: {value!r}"
    elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{path}: {value!r}"


def _object_faults(value, fields, path):
    if not isinstance(value, dict):
        yield f"{path}: no object"
        return
    required = {name[:-1] for name in fields if name.endswith("!")}
    known = {name.rstrip("!"): kind for name, kind in fields.items()}
    for name in required - value.keys():
        yield f"{path}.{name} is missing"
    for name, part in value.items():
        if name not in known:
            yield f"{path}.{name} is unknown"
        else:
            yield from _faults(part, known[name], f"{path}.{name}")
