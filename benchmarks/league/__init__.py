"""Many policies in one process."""
