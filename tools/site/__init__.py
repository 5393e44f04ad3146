"""Builds the documentation site, and runs the code of its pages."""
