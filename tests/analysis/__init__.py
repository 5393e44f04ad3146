"""Tests of `tfpolicies.analysis`."""
