"""Tests of the project's tools."""
