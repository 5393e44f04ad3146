"""Tests of `tfpolicies.rollout`."""
