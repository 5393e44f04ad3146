"""Tests of `tfpolicies.exploration`."""
