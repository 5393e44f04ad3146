"""Tests of `tfpolicies.config`."""
