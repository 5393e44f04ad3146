"""Tests of `tfpolicies.importers`."""
