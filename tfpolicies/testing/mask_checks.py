"""Checks of policies whose observations forbid actions."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.errors import ConfigError
from tfpolicies.models.spaces import Leaf, is_float_box
from tfpolicies.testing.acting_checks import FLOATS
from tfpolicies.testing.report import Broken, NotApplicable
from tfpolicies.testing.subject import Subject, choices, random_masks, with_masks

_DRAWS, _AT_ONCE = 10_000, 500


def masks(subject: Subject) -> str:
    """No forbidden action is ever chosen, and log-probabilities, entropy and KL stay finite."""
    if not any(subject.ports.is_mask):
        raise NotApplicable("observations have no 'action_mask'")
    policy, rng = subject.twin(), subject.rng()
    for start in range(0, _DRAWS, _AT_ONCE):
        inputs = subject.inputs(_AT_ONCE, rng)
        mask = random_masks(subject.ports, subject.leaves, _AT_ONCE, rng)
        shown = with_masks(subject.ports, inputs, mask)
        found = subject.acted(policy, shown, explore=start % 2 == 0)
        _check_allowed(subject, found, mask, explore=start % 2 == 0)
        _check_finite(subject, policy, found)
    return f"{_DRAWS} draws"


def _check_allowed(
    subject: Subject, found: dict[str, np.ndarray], mask: np.ndarray, *, explore: bool
) -> None:
    start, sizes = 0, iter(choices(subject.leaves))
    for leaf in subject.leaves:
        if is_float_box(leaf.space):
            continue
        actions = found[leaf.name("actions")]
        actions = actions.reshape(len(mask), -1).astype(np.int64)
        first = _first_choice(leaf, subject)
        for cell in range(actions.shape[1]):
            size = next(sizes)
            allowed = mask[:, start : start + size]
            start += size
            chosen = actions[:, cell] - first[cell]
            if isinstance(leaf.space, spaces.MultiBinary):
                wrong = (chosen == 1) & ~allowed[:, 0]
            else:
                inside = np.clip(chosen, 0, size - 1)
                wrong = (chosen != inside) | ~allowed[np.arange(len(mask)), inside]
            if wrong.any():
                row = int(np.argmax(wrong))
                raise Broken(
                    f"{leaf.name('actions')} to be allowed by the mask, explore={explore}",
                    f"{int(actions[row, cell])} under the mask {allowed[row].astype(int).tolist()}"
                    f" ({int(wrong.sum())} of {len(mask)} rows)",
                    "Give forbidden choices the least possible logit before anything is drawn, "
                    "and apply the mask when exploring at random, too.",
                )


def _first_choice(leaf: Leaf, subject: Subject) -> np.ndarray:
    """Returns the action that the first choice of each cell stands for."""
    space: Any = leaf.space
    cells = int(np.prod(leaf.shape))
    if subject.is_tf or isinstance(space, spaces.MultiBinary):
        return np.zeros(cells, np.int64)
    start = space.low if isinstance(space, spaces.Box) else space.start
    return np.broadcast_to(np.asarray(start, np.int64).reshape(-1), cells)


def _check_finite(subject: Subject, policy: Any, found: dict[str, np.ndarray]) -> None:
    numbers = {n: x for n, x in found.items() if n in FLOATS}
    if subject.is_tf:
        distribution = policy.dist_class(tf.constant(found["action_dist_inputs"]))
        shifted = policy.dist_class(tf.constant(np.roll(found["action_dist_inputs"], 1, axis=0)))
        with contextlib.suppress(ConfigError):  # some distributions have no closed form
            numbers["entropy"] = distribution.entropy().numpy()
            numbers["KL to itself"] = distribution.kl(distribution).numpy()
            numbers["KL to another row's mask"] = distribution.kl(shifted).numpy()
    for name, array in numbers.items():
        if not np.isfinite(array).all():
            raise Broken(
                f"{name} to be finite under any mask that allows something",
                f"{array[~np.isfinite(array)][0]}",
                "Mask with a large finite negative logit (`tfpolicies.models.distributions."
                "MASKED_LOGIT`), not with -inf.",
            )
