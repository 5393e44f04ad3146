"""Experience kept for learning more than once."""
