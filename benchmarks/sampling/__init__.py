"""Sampling: loops, processes, Ray workers, several agents."""
