"""Tests of `tfpolicies.connectors`."""
