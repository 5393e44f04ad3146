"""Exported policies over HTTP and gRPC, by the Open Inference Protocol.

A process that serves needs the export, NumPy, ONNX Runtime and the extra `serve`. It never imports
TensorFlow.
"""

from __future__ import annotations

from tfpolicies.serving.ray_serve import deployment

__all__ = ["deployment"]
