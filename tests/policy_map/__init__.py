"""Tests of `tfpolicies.policy_map`."""
