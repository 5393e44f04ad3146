"""Checks that an action distribution's densities, entropy and KL match its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.export.distribution import samples_by_itself
from tfpolicies.models.distributions import MASKED_LOGIT
from tfpolicies.models.distributions.action_distribution import ActionDistribution
from tfpolicies.models.distributions.base import is_distribution
from tfpolicies.testing.report import Broken, NotApplicable
from tfpolicies.testing.subject import Subject, all_same, leaves_of

_DRAWN = 4096
_NUMBERS = 4_000_000  # maximal number of values in all draws
_HALVINGS = 24
_SLACK = 2e-3
_ADVICE = (
    "Look at `sample`, `logp`, `sampled_logp`, `entropy` and `kl` of the distribution: over "
    "samples of p, the entropy is the mean of -log p, KL(p || q) that of log p - log q, and the "
    "mean of q / p is 1."
)


def distribution(subject: Subject) -> str:
    """Zero noise gives the mode; log-densities, entropy and KL match samples.

    The policy's class is tested with inputs in [-1, 1], near those of the policy: a trained
    policy may do some things too rarely to see them in samples.
    """
    subject.needs_tf("distributions need the outputs of a model")
    policy, rng = subject.twin(), subject.rng()
    dist_class = policy.dist_class
    if samples_by_itself(policy.program.spec):
        raise NotApplicable("the class samples actions by a custom method")
    if not all(map(is_distribution, dist_class.kinds)):
        raise NotApplicable("the distribution is one over all parts of an action at once")
    acted = subject.acted(policy, subject.inputs(4, rng), explore=False)
    if "action_dist_inputs" not in acted:
        raise NotApplicable("acting gives no 'action_dist_inputs'")
    given = acted["action_dist_inputs"][2:3]  # some of it may be masked
    row = np.where(given > MASKED_LOGIT / 2, np.clip(given, -1.0, 1.0), given)
    draws = max(2, min(_DRAWN, _NUMBERS // dist_class.num_inputs))
    one = _repeated(dist_class, row, draws)

    silent = one.sample_leaves(tf.zeros([draws, dist_class.noise_size]))
    pair = silent, leaves_of(one.deterministic_sample())
    ours, wanted = ({f"leaf {i}": np.asarray(x)[:1] for i, x in enumerate(each)} for each in pair)
    all_same(ours, wanted, "zero noise to give `deterministic_sample`", _ADVICE)

    noise = tf.constant(dist_class.draw_noise(rng, draws))
    drawn = one.sample_leaves(noise)
    logp = _numbers("logp", one.logp_leaves(drawn), draws)
    sampled = _numbers("sampled_logp", one.sampled_logp(noise), draws)
    gap = float(np.median(np.abs(sampled - logp)))  # few samples lose digits
    if not gap <= 1e-3 * max(1.0, float(np.median(np.abs(logp)))):
        raise Broken(
            "`sampled_logp(noise)` to be `logp(sample(noise))`",
            f"a median difference of {gap:.3g}",
            _ADVICE,
        )
    direction = np.where(given > MASKED_LOGIT / 2, rng.standard_normal(row.shape), 0.0)
    for halvings in range(_HALVINGS):  # until the two are near enough for a comparison
        another = _repeated(dist_class, row + 0.5**halvings * direction, draws)
        ratio = logp - _numbers("logp", another.logp_leaves(drawn), draws)
        if ratio.mean() <= 0.1:
            break
    mean, error = _mean(np.exp(-ratio))
    if not abs(mean - 1.0) <= 6.0 * error + _SLACK:
        raise Broken(
            "the mean of q / p over samples of p to be 1, for densities that `logp` gives",
            f"{mean:.4g} (standard error {error:.2g})",
            _ADVICE,
        )
    entropy = _compared("entropy", one.entropy, -logp)
    return f"{entropy}, {_compared('kl', lambda: one.kl(another), ratio)}"


def _repeated(dist_class: ActionDistribution, row: np.ndarray, draws: int) -> Any:
    return dist_class(tf.constant(np.repeat(row, draws, axis=0), tf.float32))


def _numbers(name: str, found: tf.Tensor, draws: int) -> np.ndarray:
    """Returns the result of a method as an array, if it has one number per row."""
    numbers = np.asarray(found)
    if numbers.shape != (draws,):
        given = f"the shape {list(numbers.shape)} for {draws} rows"
        raise Broken(f"`{name}` to give one number for each row, [B]", given, _ADVICE)
    return numbers


def _compared(name: str, computed: Callable[[], tf.Tensor], sampled: np.ndarray) -> str:
    try:
        value = float(_numbers(name, computed(), len(sampled))[0])
    except (ConfigError, NotImplementedError):
        return f"no {name} in closed form"
    mean, error = _mean(sampled)
    if not abs(value - mean) <= 6.0 * error + _SLACK * max(1.0, abs(mean)):
        raise Broken(
            f"`{name}` to be {mean:.4g} (standard error {error:.2g}), as samples show",
            f"{value:.4g}",
            _ADVICE,
        )
    return f"{name} {value:.3g}"


def _mean(sampled: np.ndarray) -> tuple[float, float]:
    return float(sampled.mean()), float(sampled.std()) / len(sampled) ** 0.5
