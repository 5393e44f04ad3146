"""Maps of policies, a cache that swaps their states to disk, and stacked acting."""
