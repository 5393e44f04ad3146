"""Autoreset modes: how vector environments reset the environments whose episodes end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from tfpolicies.errors import EnvError, show_value

Infos: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
_FINAL_OBS_KEYS = ("final_obs", "final_observation", "terminal_observation")
"""Keys of infos for the last observation of an episode."""


def get_declared_mode(env: VectorEnv) -> AutoresetMode | None:
    """Returns the autoreset mode in an environment's metadata; None if it has none."""
    mode = (env.metadata or {}).get("autoreset_mode")
    try:
        return None if mode is None else AutoresetMode(mode)
    except ValueError as error:
        raise EnvError(
            f"metadata['autoreset_mode'] of {env} must be an AutoresetMode of gymnasium.vector, "
            f"got {show_value(mode)}."
        ) from error


def get_final_observations(infos: Infos, indices: Sequence[int]) -> Any:
    """Returns the last observations of ended episodes from the infos of a step.

    Args:
        infos: a dict of arrays, or a sequence of N dicts.
        indices: of the K environments whose episodes ended.

    Returns:
        K observations in a list; a batch `[N, ...]`, nested as observations are; or None if one is
        missing.
    """
    if not isinstance(infos, Mapping):
        rows = [
            next((infos[i][key] for key in _FINAL_OBS_KEYS if key in infos[i]), None)
            for i in indices
        ]
        return None if any(x is None for x in rows) else rows
    batch: Any = next((infos[key] for key in _FINAL_OBS_KEYS if infos.get(key) is not None), None)
    if isinstance(batch, list | tuple) or getattr(batch, "dtype", None) == np.dtype(object):
        rows = [batch[i] for i in indices]
        return None if any(x is None for x in rows) else rows
    return batch


class AutoresetModeDetector:
    """Detects the mode of an environment that does not declare it, from its first ended episode.

    Infos with the last observation mean SAME_STEP. Without them, the step after the end decides: in
    NEXT_STEP it only resets, so it has no reward. It differs from an ordinary step if the first
    steps of episodes have rewards.

    Args:
        env: the vector environment, for messages.
    """

    def __init__(self, env: VectorEnv) -> None:
        self._env = env
        self._at_episode_start = True
        self._first_steps_have_rewards = False

    def reset(self) -> None:
        """Records that all environments begin an episode."""
        self._at_episode_start = True

    def detect(
        self,
        rewards: np.ndarray,
        ends: np.ndarray,
        previously_ended: np.ndarray | None,
        infos: Infos,
    ) -> AutoresetMode | None:
        """Returns the mode, or None until an episode has shown it.

        Args:
            rewards: of a step, `[N]`.
            ends: whether it ended an episode, bool `[N]`.
            previously_ended: whether the step before did; None if it ended none.
            infos: of the step.

        Raises:
            EnvError: if the mode cannot be detected, or last observations are lost.
        """
        if previously_ended is not None:
            if rewards[previously_ended].any() or ends[previously_ended].any():
                raise self._make_unknown_mode_error(
                    "steps continue after an episode's end without a reset"
                )
            if not self._first_steps_have_rewards:
                raise self._make_unknown_mode_error(
                    "its rewards do not distinguish a reset from a step"
                )
            return AutoresetMode.NEXT_STEP
        if self._at_episode_start:
            self._at_episode_start, self._first_steps_have_rewards = False, bool(rewards.all())
        if ends.any() and get_final_observations(infos, np.flatnonzero(ends).tolist()) is not None:
            return AutoresetMode.SAME_STEP
        return None

    def _make_unknown_mode_error(self, why: str) -> EnvError:
        return EnvError(
            f"The autoreset mode of {self._env} is unknown: its metadata has no 'autoreset_mode', "
            f"its infos lack the last observation of an episode, and {why}. Declare the mode in "
            "its class: "
            'metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}, or SAME_STEP '
            "with infos['final_obs'], or DISABLED."
        )
