"""Episodes that do not end where somebody waits for their end."""

from __future__ import annotations

import logging

logger = logging.getLogger("tfpolicies")

LONG = 30_000
"""Steps after which an episode that somebody waits for is reported."""


def report_long_episode(index: int, steps: int, waits: str, way_out: str) -> None:
    """Logs a warning about an episode that has not ended.

    Args:
        index: of its environment.
        steps: that it has so far.
        waits: who waits for its end.
        way_out: what else to do than to give the environment a time limit.
    """
    logger.warning(
        "Environment %d: an episode has not ended after %d steps, and %s waits for its end. Give "
        "the environment a time limit, such as gym.make(..., max_episode_steps=1000), or %s.",
        index,
        steps,
        waits,
        way_out,
    )


def report_long_sample(index: int, steps: int) -> None:
    """Logs a warning about an episode that sampling waits for."""
    report_long_episode(
        index, steps, "batch_mode='complete_episodes'", "use batch_mode='truncate_episodes'"
    )


def report_long_evaluation(index: int, steps: int) -> None:
    """Logs a warning about an episode that evaluation waits for."""
    report_long_episode(index, steps, "evaluation", "set evaluation_sample_timeout_s in the config")
