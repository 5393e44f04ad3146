"""Tests of `tfpolicies.testing`."""
