"""Tests of `tfpolicies.export`."""
