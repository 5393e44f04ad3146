"""Tests of `tfpolicies.offline`."""
