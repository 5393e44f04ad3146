"""Experience as columns: sample batches, sequences, trajectory postprocessing."""
