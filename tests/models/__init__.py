"""Tests of `tfpolicies.models`."""
