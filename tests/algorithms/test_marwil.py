"""MARWIL."""
