"""Tests of `tfpolicies.system`."""
