"""Searches settings that learn well: `tune`, and the ranges of a search space."""

from tfpolicies.tuning.ranges import choice, int_uniform, log_uniform, share_of_steps, uniform

__all__ = ["choice", "int_uniform", "log_uniform", "share_of_steps", "uniform"]
