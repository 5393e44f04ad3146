"""Programs: the code that similar policies share, and the runtimes that run it."""
