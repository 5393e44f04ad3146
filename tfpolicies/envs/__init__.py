"""Adapters that step many environments through one interface."""

from tfpolicies.envs.env_checker import check_env

__all__ = ["check_env"]
