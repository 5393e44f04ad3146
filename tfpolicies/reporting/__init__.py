"""Output of a training run: its folder, CSV, TensorBoard events, learning curve and console."""
