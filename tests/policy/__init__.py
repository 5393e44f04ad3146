"""Tests of `tfpolicies.policy`."""
