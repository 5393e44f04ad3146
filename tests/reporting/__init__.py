"""Tests of `tfpolicies.reporting`."""
