"""Tests of `tfpolicies.batch`."""
