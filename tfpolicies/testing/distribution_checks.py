"""Checks of the action distribution: what it computes of itself is what its samples show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.models.distributions import MASKED_LOGIT, Distribution
from tfpolicies.testing.report import Broken, NotApplicable
from tfpolicies.testing.subject import Subject, all_same, leaves_of

_DRAWN = 4096
_HALVINGS = 24
_ADVICE = (
    "Look at `sample`, `logp`, `sampled_logp`, `entropy` and `kl` of the distribution: over "
    "samples of p, the entropy is the mean of -log p, and KL(p || q) that of log p - log q."
)


def distribution(subject: Subject) -> str:
    """Noise of zeros gives the mode; log-densities, entropy and KL are those of samples."""
    subject.needs_tf("distributions are made of what a model gives")
    policy, rng = subject.twin(), subject.rng()
    dist_class = policy.dist_class
    if not all(issubclass(kind, Distribution) for kind in dist_class.kinds):
        raise NotApplicable("the distribution is one over all parts of an action at once")
    row = policy.acting.dist_inputs(subject.inputs(4, rng))[2:3]  # some of it may be masked
    one = _repeated(dist_class, row)

    silent = one.sample_leaves(tf.zeros([_DRAWN, dist_class.noise_size]))
    ours, wanted = _by_place(silent), _by_place(leaves_of(one.deterministic_sample()))
    all_same(ours, wanted, "zero noise to give `deterministic_sample`", _ADVICE)

    noise = dist_class.draw_noise(rng, _DRAWN)
    drawn = one.sample_leaves(noise)
    logp = one.logp_leaves(drawn).numpy()
    gap = float(np.median(np.abs(one.sampled_logp(noise).numpy() - logp)))  # few lose digits
    if not gap <= 1e-3 * max(1.0, float(np.median(np.abs(logp)))):
        raise Broken(
            "`sampled_logp(noise)` to be `logp(sample(noise))`",
            f"a median difference of {gap:.3g}",
            _ADVICE,
        )
    way = rng.standard_normal(row.shape)
    for halvings in range(_HALVINGS):  # to where neither is too far from the other to compare them
        moved = np.where(row > MASKED_LOGIT / 2, row + 0.5**halvings * way, row)
        another = _repeated(dist_class, moved)
        ratio = logp - another.logp_leaves(drawn).numpy()
        if ratio.mean() <= 1.0:
            break
    entropy = _compared("entropy", one.entropy, -logp)
    return f"{entropy}, {_compared('kl', lambda: one.kl(another), ratio)}"


def _repeated(dist_class: Any, row: np.ndarray) -> Any:
    return dist_class(tf.constant(np.repeat(row, _DRAWN, axis=0), tf.float32))


def _by_place(leaves: Any) -> dict[str, np.ndarray]:
    return {f"leaf {i}": np.asarray(x)[:1] for i, x in enumerate(leaves)}


def _compared(name: str, computed: Callable[[], tf.Tensor], sampled: np.ndarray) -> str:
    """Compares what a method gives to the mean over samples, within six standard errors."""
    try:
        value = float(computed()[0])
    except ConfigError:
        return f"no {name} in closed form"
    mean, error = float(sampled.mean()), float(sampled.std()) / _DRAWN**0.5
    if not abs(value - mean) <= 6.0 * error + 1e-3 * max(1.0, abs(mean)):
        raise Broken(
            f"`{name}` to be {mean:.4g} (standard error {error:.2g}), as samples show",
            f"{value:.4g}",
            _ADVICE,
        )
    return f"{name} {value:.3g}"
