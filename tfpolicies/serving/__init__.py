"""Exported policies over HTTP and gRPC, by the Open Inference Protocol.

A process that serves needs the export, NumPy, ONNX Runtime and the extra `serve`. It never imports
TensorFlow.
"""
