"""Tests of `tfpolicies.serving`."""
