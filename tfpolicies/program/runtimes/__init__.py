"""The ways a Program runs: traced functions and ONNX Runtime."""
