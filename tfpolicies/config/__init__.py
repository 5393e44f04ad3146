"""The fluent configuration and its frozen, self-checking sections."""
