"""Policies: handles that act, learn, save and export."""
