"""Exports in the layouts of inference engines."""
