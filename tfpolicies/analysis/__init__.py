"""Finished and running runs, read back: comparison, diagnosis, and the search for settings."""
