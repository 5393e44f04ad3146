"""Exports of policies as SavedModel, ONNX or LiteRT, verified against the policy."""
