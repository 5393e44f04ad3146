"""Tests of `tfpolicies.program`."""
