"""Runs that take long: fuzzers, killed processes, conformance."""
