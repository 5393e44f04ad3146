"""Tests of `tfpolicies.distributed`."""
