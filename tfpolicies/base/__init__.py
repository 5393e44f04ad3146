"""Modules that the whole package uses: validators, registries, extensions, number checks."""
