"""Probabilities, and checks of how often something was drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def softmax(logits: Any) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def sigmoid(logits: Any) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(logits, np.float64)))


def assert_frequency(hits: Any, p: float) -> None:
    """Asserts that the share of True in `hits` is p within four standard errors."""
    assert abs(np.mean(hits) - p) <= 4 * math.sqrt(p * (1 - p) / len(hits)) + 1e-9


def assert_frequencies(choices: np.ndarray, probabilities: Sequence[float]) -> None:
    """Asserts that choices from 0 have these probabilities within four standard errors."""
    assert 0 <= choices.min() <= choices.max() < len(probabilities)
    for choice, p in enumerate(probabilities):
        assert_frequency(choices.ravel() == choice, p)
