"""Replay buffers and the training steps that use them."""
