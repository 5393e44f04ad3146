"""Maps of policies: where their states are, in memory or on disk, and how many act in one call."""
