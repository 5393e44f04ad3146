"""Environments, stepped many at a time behind one interface."""
