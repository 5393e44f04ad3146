"""What the operating system gives: files, locks, memory, processes."""
