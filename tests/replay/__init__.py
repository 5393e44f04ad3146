"""Tests of `tfpolicies.replay`."""
