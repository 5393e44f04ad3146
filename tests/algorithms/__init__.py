"""Tests of `tfpolicies.algorithms`."""
