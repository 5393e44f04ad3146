"""Callbacks that send the numbers and files of a run to experiment trackers."""
