"""Exports in the forms that inference engines read."""
