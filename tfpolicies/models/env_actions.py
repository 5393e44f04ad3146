"""Actions of policies written by hand, as environments take them: `action_pipeline.py` in NumPy.

Only Boxes are mapped. With `normalize_actions`, a Box of floats is scaled from [-1, 1] to its
bounds and clipped to them (a component without both is only clipped to the one there is), and a Box
of integers gets `low` added. With `clip_actions` alone, Boxes are clipped. All else stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium import spaces

from tfpolicies.models.spaces import Leaf, half_width_and_middle, is_float_box


def to_env(
    leaves: Sequence[Leaf], actions: Sequence[np.ndarray], *, normalize: bool, clip: bool
) -> list[np.ndarray]:
    """Maps a policy's actions, `[B, *shape]` per leaf, to the environment's, in its dtypes.

    >>> from tfpolicies.models.spaces import action_leaves
    >>> box = action_leaves(spaces.Box(0.0, 4.0, (1,)))
    >>> to_env(box, [np.array([[0.5], [3.0]])], normalize=True, clip=False)[0].tolist()
    [[3.0], [4.0]]
    """
    pairs = zip(leaves, actions, strict=True)
    return [_mapped(leaf.space, x, normalize, clip) for leaf, x in pairs]


def from_env(leaves: Sequence[Leaf], actions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Inverts `to_env` with `normalize`, but for the clipping."""
    return [_unmapped(leaf.space, x) for leaf, x in zip(leaves, actions, strict=True)]


def outside_of_range(leaves: Sequence[Leaf], actions: Sequence[np.ndarray]) -> float | None:
    """Returns a number outside of [-1, 1] that `normalize_actions` scales, if any."""
    for leaf, action in zip(leaves, actions, strict=True):
        if is_float_box(leaf.space):
            space: spaces.Box = leaf.space  # type: ignore[assignment]
            scaled = np.isfinite(space.low) & np.isfinite(space.high)
            outside = action[(abs(action) > 1) & scaled]
            if outside.size:
                return float(max(outside, key=abs))
    return None


def _mapped(space: spaces.Space, actions: np.ndarray, normalize: bool, clip: bool) -> np.ndarray:
    if isinstance(space, spaces.Box) and (normalize or clip):
        if normalize and not is_float_box(space):
            return (actions + space.low).astype(space.dtype)
        if normalize:
            half_width, middle = half_width_and_middle(space.low, space.high)
            actions = actions * half_width + middle
        actions = np.clip(actions, space.low, space.high)
    return actions.astype(space.dtype)


def _unmapped(space: spaces.Space, actions: np.ndarray) -> np.ndarray:
    if is_float_box(space):
        half_width, middle = half_width_and_middle(space.low, space.high)  # type: ignore[attr-defined]
        return (actions - middle) / half_width
    return actions - space.low if isinstance(space, spaces.Box) else actions
