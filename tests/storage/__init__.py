"""Tests of `tfpolicies.storage`."""
