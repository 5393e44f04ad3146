"""Checkpoints on disk: atomic, checksummed folders of JSON and arrays."""
