"""The runtimes of a Program: traced functions, graph-mode sessions and ONNX Runtime."""
