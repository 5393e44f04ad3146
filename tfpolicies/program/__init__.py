"""Programs: what policies of one kind share, and the runtimes they run on."""
