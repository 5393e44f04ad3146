"""Tests of `tfpolicies.loggers`."""
