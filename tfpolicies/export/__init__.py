"""Programs with a state, written as SavedModel or ONNX and verified."""
