"""Tests of `tfpolicies.tuning`."""
