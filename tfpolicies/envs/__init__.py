"""Adapters that step many environments through one interface."""

from tfpolicies.envs.checking import check_env

__all__ = ["check_env"]
