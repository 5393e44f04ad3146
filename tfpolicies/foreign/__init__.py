"""Policies that others made, as policies that act."""
