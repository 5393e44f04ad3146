"""Sampling: from environments to postprocessed batches."""
