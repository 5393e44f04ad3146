"""Replay buffers: experience that is stored and sampled for learning more than once."""
