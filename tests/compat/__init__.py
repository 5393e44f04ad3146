"""Tests of `tfpolicies.compat`."""
