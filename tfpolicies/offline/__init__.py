"""Recorded experience: reads and writes tables of steps."""
