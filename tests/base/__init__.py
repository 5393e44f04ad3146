"""Tests of `tfpolicies.base`."""
