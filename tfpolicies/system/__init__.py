"""Services of the operating system: files, locks, memory, processes."""
