"""Acting, sampling, updates and learning beside SB3, RLlib and the bare environment."""
