"""Numbered rows for tests of replay buffers."""

import numpy as np

from tfpolicies import SampleBatch


def make_rows(first, stop, **columns):
    """Returns rows whose actions are `first` to `stop - 1`, and whose observations name them."""
    numbers = np.arange(first, stop)
    obs = np.stack([numbers, -numbers], axis=1).astype(np.float32)
    return SampleBatch(obs=obs, actions=numbers, **columns)
