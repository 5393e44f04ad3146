"""Tests of `tfpolicies.envs`."""
