"""What a training run shows: its folder, its CSV, TensorBoard events, curve and console."""
