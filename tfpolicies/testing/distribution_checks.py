"""Checks that an action distribution's densities, entropy and KL match its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.export.distribution import has_custom_sampling
from tfpolicies.models.distributions import MASKED_LOGIT
from tfpolicies.models.distributions.action_distribution import ActionDistribution
from tfpolicies.models.distributions.base import is_distribution
from tfpolicies.testing.policy_under_test import PolicyUnderTest, compare_arrays, flatten_arrays
from tfpolicies.testing.report import CheckFailed, NotApplicable

_MAX_DRAWS = 4096
_MAX_VALUES = 4_000_000  # maximal number of values in all draws
_HALVINGS = 24
_TOLERANCE = 2e-3
_ADVICE = (
    "Look at `sample`, `logp`, `sampled_logp`, `entropy` and `kl` of the distribution: over "
    "samples of p, the entropy is the mean of -log p, KL(p || q) that of log p - log q, and the "
    "mean of q / p is 1."
)


def distribution(subject: PolicyUnderTest) -> str:
    """Zero noise gives the mode; log-densities, entropy and KL match samples.

    The policy's class is tested with inputs in [-1, 1], near those of the policy: a trained
    policy may do some things too rarely to see them in samples.
    """
    subject.require_program("distributions need the outputs of a model")
    policy, rng = subject.make_copy(), subject.make_rng()
    dist_class = policy.dist_class
    if has_custom_sampling(policy.program.spec):
        raise NotApplicable("the class samples actions by a custom method")
    if not all(map(is_distribution, dist_class.leaf_classes)):
        raise NotApplicable("the distribution is one over all parts of an action at once")
    arrays = subject.act_as_arrays(policy, subject.draw_inputs(4, rng), explore=False)
    if "action_dist_inputs" not in arrays:
        raise NotApplicable("acting gives no 'action_dist_inputs'")
    dist_inputs = arrays["action_dist_inputs"][2:3]  # some of it may be masked
    row = np.where(dist_inputs > MASKED_LOGIT / 2, np.clip(dist_inputs, -1.0, 1.0), dist_inputs)
    draws = max(2, min(_MAX_DRAWS, _MAX_VALUES // dist_class.num_inputs))
    dist = _make_repeated(dist_class, row, draws)

    noiseless = dist.sample_leaves(tf.zeros([draws, dist_class.noise_size]))
    pair = noiseless, flatten_arrays(dist.deterministic_sample())
    actual, reference = (
        {f"leaf {i}": np.asarray(x)[:1] for i, x in enumerate(leaves)} for leaves in pair
    )
    compare_arrays(actual, reference, "zero noise to give `deterministic_sample`", _ADVICE)

    noise = tf.constant(dist_class.draw_noise(rng, draws))
    samples = dist.sample_leaves(noise)
    logp = _check_row_values("logp", dist.logp_leaves(samples), draws)
    sampled = _check_row_values("sampled_logp", dist.sampled_logp(noise), draws)
    gap = float(np.median(np.abs(sampled - logp)))  # few samples lose digits
    if not gap <= 1e-3 * max(1.0, float(np.median(np.abs(logp)))):
        raise CheckFailed(
            "`sampled_logp(noise)` to be `logp(sample(noise))`",
            f"a median difference of {gap:.3g}",
            _ADVICE,
        )
    direction = np.where(dist_inputs > MASKED_LOGIT / 2, rng.standard_normal(row.shape), 0.0)
    for halvings in range(_HALVINGS):  # until the two are near enough for a comparison
        other_dist = _make_repeated(dist_class, row + 0.5**halvings * direction, draws)
        ratio = logp - _check_row_values("logp", other_dist.logp_leaves(samples), draws)
        if ratio.mean() <= 0.1:
            break
    mean, error = _get_mean_and_error(np.exp(-ratio))
    if not abs(mean - 1.0) <= 6.0 * error + _TOLERANCE:
        raise CheckFailed(
            "the mean of q / p over samples of p to be 1, for densities that `logp` gives",
            f"{mean:.4g} (standard error {error:.2g})",
            _ADVICE,
        )
    entropy = _compare_to_samples("entropy", dist.entropy, -logp)
    return f"{entropy}, {_compare_to_samples('kl', lambda: dist.kl(other_dist), ratio)}"


def _make_repeated(dist_class: ActionDistribution, row: np.ndarray, draws: int) -> Any:
    return dist_class(tf.constant(np.repeat(row, draws, axis=0), tf.float32))


def _check_row_values(name: str, tensor: tf.Tensor, draws: int) -> np.ndarray:
    """Returns the result of a method as an array, if it has one number per row."""
    numbers = np.asarray(tensor)
    if numbers.shape != (draws,):
        description = f"the shape {list(numbers.shape)} for {draws} rows"
        raise CheckFailed(f"`{name}` to give one number for each row, [B]", description, _ADVICE)
    return numbers


def _compare_to_samples(name: str, compute: Callable[[], tf.Tensor], sampled: np.ndarray) -> str:
    try:
        value = float(_check_row_values(name, compute(), len(sampled))[0])
    except (ConfigError, NotImplementedError):
        return f"no {name} in closed form"
    mean, error = _get_mean_and_error(sampled)
    if not abs(value - mean) <= 6.0 * error + _TOLERANCE * max(1.0, abs(mean)):
        raise CheckFailed(
            f"`{name}` to be {mean:.4g} (standard error {error:.2g}), as samples show",
            f"{value:.4g}",
            _ADVICE,
        )
    return f"{name} {value:.3g}"


def _get_mean_and_error(sampled: np.ndarray) -> tuple[float, float]:
    return float(sampled.mean()), float(sampled.std()) / len(sampled) ** 0.5
