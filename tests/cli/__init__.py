"""Tests of `tfpolicies.cli`."""
