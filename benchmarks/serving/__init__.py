"""Serving of exported policies under load."""
