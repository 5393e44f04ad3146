"""RLlib's action distributions, implemented by those of `tfpolicies.models.distributions`.

They are constructed from `(inputs, model)` and sample eagerly or in a graph. Formulas are
the core's; only missing ones are implemented here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.compat.action_dist import ActionDistribution, RLlibDistribution
from tfpolicies.compat.distribution_noise import sample_gamma, sample_noise
from tfpolicies.errors import ConfigError
from tfpolicies.models import distributions as own
from tfpolicies.models.distributions.base import BOX_DISTRIBUTIONS, MIN_LOG_PROB, softplus
from tfpolicies.models.spaces import choices_per_cell, get_at_path, leaves, unflatten

_TINY = 1e-7


def _count_choices(action_space: gym.Space, model_config: object) -> int:
    return sum(choices_per_cell(action_space))


def _count_entries(action_space: gym.Space, model_config: object) -> int:
    return math.prod(action_space.shape or ())


def _count_two_per_entry(action_space: gym.Space, model_config: object) -> int:
    return 2 * _count_entries(action_space, model_config)


class TFActionDistribution(ActionDistribution):
    """A distribution that samples once: repeated calls of `sample` return the same actions.

    A subclass overrides `_build_sample_op` instead of `sample`.

    Attributes:
        sample_op: the sample, drawn on first use.
        sampled_action_logp_op: its log-probability, float32 `[B]`.
    """

    def _build_sample_op(self) -> Any:
        raise self._make_missing_method_error("_build_sample_op(self)")

    @functools.cached_property
    def sample_op(self) -> Any:
        return self._build_sample_op()

    @functools.cached_property
    def sampled_action_logp_op(self) -> tf.Tensor:
        return self.logp(self.sample_op)

    def sample(self) -> Any:
        return self.sample_op

    def sampled_action_logp(self) -> tf.Tensor:
        return self.sampled_action_logp_op


class WrappedDistribution(TFActionDistribution):
    """A distribution of the core in RLlib's form.

    Args:
        inputs: `[B, n]`, a tensor or an array.
        model: the model that computed them; stored.
        kind: the class in the core.
        space: its action space.
    """

    def __init__(
        self, inputs: Any, model: Any = None, *, kind: type[own.Distribution], space: gym.Space
    ) -> None:
        super().__init__(_to_float(inputs), model)
        self._distribution = kind(self.inputs, space)

    def _build_sample_op(self) -> Any:
        size = self._distribution.noise_size(self._distribution.space)
        return self._distribution.sample(
            sample_noise(self.inputs, self._distribution.noise_kind, size)
        )

    def deterministic_sample(self) -> Any:
        return self._distribution.deterministic_sample()

    def logp(self, x: Any) -> tf.Tensor:
        return self._distribution.logp(x)

    def entropy(self) -> tf.Tensor:
        return self._distribution.entropy()

    def kl(self, other: Any) -> tf.Tensor:
        return self._distribution.kl(other._distribution)


class Categorical(WrappedDistribution):
    """One of n actions, from n logits.

    Args:
        inputs: logits `[B, n]`.
        model: stored.
        temperature: a positive divisor of the logits; None: the class's own.

    Raises:
        ConfigError: if the temperature is not positive.

    >>> Categorical(np.array([[1.0, 3.0, 2.0]])).deterministic_sample().numpy()
    array([1])
    """

    temperature: ClassVar[float] = 1.0

    def __init__(self, inputs: Any, model: Any = None, temperature: float | None = None) -> None:
        divisor = self.temperature if temperature is None else temperature
        logits = _to_float(inputs) / _require_positive("temperature", divisor)
        super().__init__(
            logits, model, kind=own.Categorical, space=spaces.Discrete(logits.shape[-1])
        )

    def logp(self, x: Any) -> tf.Tensor:
        return super().logp(tf.reshape(x, [-1]))

    required_model_output_shape = staticmethod(_count_choices)


def get_categorical_class_with_temperature(t: float) -> type[Categorical]:
    """Returns a `Categorical` whose logits are divided by `t`, a positive number."""
    return type("CategoricalWithTemperature", (Categorical,), {"temperature": t})


class MultiCategorical(WrappedDistribution):
    """An independent choice in each cell, from the concatenated logits of all cells.

    Args:
        inputs: logits `[B, n]`.
        model: stored.
        input_lens: the number of actions of each cell.
        action_space: a MultiDiscrete or a Box of integers with these cells; None for one row.
    """

    def __init__(
        self, inputs: Any, model: Any, input_lens: Sequence[int], action_space: Any = None
    ) -> None:
        space = spaces.MultiDiscrete(np.array(input_lens)) if action_space is None else action_space
        super().__init__(inputs, model, kind=own.MultiCategorical, space=space)
        self.action_space = space
        self.input_lens = [int(n) for n in input_lens]

    @staticmethod
    def _get_arguments(space: gym.Space) -> dict[str, Any]:
        return _get_cell_arguments(space)

    @functools.cached_property
    def cats(self) -> list[Categorical]:
        """The distribution of each cell."""
        parts = tf.split(self.inputs, self.input_lens, axis=-1)
        return [Categorical(logits, self.model) for logits in parts]

    def logp(self, x: Any) -> tf.Tensor:
        """Returns the log-probability of actions, float32 `[B]`.

        Args:
            x: a tensor `[B, *shape]`, or a list or array by cell, `[cells, B]`.
        """
        by_cell = not tf.is_tensor(x) and len(x) == len(self.input_lens)
        return super().logp(tf.stack(list(x), axis=1) if by_cell else x)

    def multi_entropy(self) -> tf.Tensor:
        """Returns the entropy of each cell, float32 `[B, cells]`."""
        return tf.stack([cat.entropy() for cat in self.cats], axis=1)

    def multi_kl(self, other: Any) -> tf.Tensor:
        """Returns KL(self || other) of each cell, float32 `[B, cells]`."""
        pairs = zip(self.cats, other.cats, strict=True)
        return tf.stack([cat.kl(its) for cat, its in pairs], axis=1)

    required_model_output_shape = staticmethod(_count_choices)


class DiagGaussian(WrappedDistribution):
    """Independent normals, from k means and k logarithms of standard deviations, concatenated.

    Args:
        inputs: `[B, 2k]`.
        model: stored.
        action_space: a Box of k numbers, which defines the actions' shape; None for `[B, k]`.

    Attributes:
        mean: `[B, k]`.
        log_std: `[B, k]`.
        std: `[B, k]`.
    """

    def __init__(self, inputs: Any, model: Any = None, *, action_space: Any = None) -> None:
        space = _make_box(inputs) if action_space is None else action_space
        super().__init__(inputs, model, kind=own.DiagGaussian, space=space)
        self.mean, self.log_std = tf.split(self.inputs, 2, axis=-1)
        self.std = tf.exp(self.log_std)

    required_model_output_shape = staticmethod(_count_two_per_entry)


class Deterministic(WrappedDistribution):
    """The inputs `[B, k]` are the actions; log-probability and entropy are 0."""

    def __init__(self, inputs: Any, model: Any = None) -> None:
        space = _make_box(inputs, parts=1)
        super().__init__(inputs, model, kind=own.Deterministic, space=space)

    required_model_output_shape = staticmethod(_count_entries)


class _ActionRange:
    """Scales numbers from one range to [low, high], and back.

    Log-probabilities and entropies are computed before scaling, as in RLlib.

    Args:
        range_low: the lower end of the range.
        range_high: its upper end.
        low: a number or an array.
        high: a number or an array.

    Raises:
        ConfigError: if `low` is not less than `high`.
    """

    def __init__(self, range_low: float, range_high: float, low: Any, high: Any) -> None:
        if not np.all(np.less(low, high)):
            raise ConfigError(f"low must be less than high; got low={low!r}, high={high!r}.")
        self._range_low, self._low, self._high = range_low, low, high
        self._scale = np.asarray((np.asarray(high) - low) / (range_high - range_low), np.float32)

    def scale(self, x: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(
            (x - self._range_low) * self._scale + self._low, self._low, self._high
        )

    def unscale(self, x: Any) -> tf.Tensor:
        return (tf.cast(x, tf.float32) - self._low) / self._scale + self._range_low


class SquashedGaussian(WrappedDistribution):
    """Normals squashed by tanh and scaled to [low, high], without entropy or KL in closed form.

    Args:
        inputs: `[B, 2k]`, k means and k logarithms of standard deviations, which are clipped.
        model: stored.
        low: lower bounds of actions.
        high: upper bounds of actions.

    Raises:
        ConfigError: if `low` is not less than `high`.
    """

    required_model_output_shape = staticmethod(_count_two_per_entry)

    def __init__(self, inputs: Any, model: Any = None, low: Any = -1.0, high: Any = 1.0) -> None:
        super().__init__(inputs, model, kind=own.SquashedGaussian, space=_make_box(inputs))
        self.low, self.high, self._range = low, high, _ActionRange(-1.0, 1.0, low, high)

    def _build_sample_op(self) -> tf.Tensor:
        return self._range.scale(super()._build_sample_op())

    def deterministic_sample(self) -> tf.Tensor:
        return self._range.scale(super().deterministic_sample())

    def logp(self, x: Any) -> tf.Tensor:
        return tf.maximum(super().logp(self._range.unscale(x)), MIN_LOG_PROB)


class GumbelSoftmax(TFActionDistribution):
    """Nearly one-hot, differentiable samples (Jang et al. 2017, arXiv:1611.01144).

    Args:
        inputs: logits `[B, n]`.
        model: stored.
        temperature: a positive number; lower values give samples closer to one-hot.

    Raises:
        ConfigError: if the temperature is not positive.
    """

    def __init__(self, inputs: Any, model: Any = None, temperature: float = 1.0) -> None:
        super().__init__(_to_float(inputs), model)
        self.temperature = _require_positive("temperature", temperature)
        self.probs = tf.nn.softmax(self.inputs)

    def _build_sample_op(self) -> tf.Tensor:
        noise = sample_noise(self.inputs, "gumbel", self.inputs.shape[-1])
        return tf.nn.softmax((self.inputs + noise) / self.temperature)

    def deterministic_sample(self) -> tf.Tensor:
        return self.probs

    def logp(self, x: Any) -> tf.Tensor:
        """Returns the categorical log-probability of vectors `[B, n]` or indices `[B]`."""
        x = tf.convert_to_tensor(x)
        if x.shape.rank == 1:
            x = tf.one_hot(tf.cast(x, tf.int32), self.inputs.shape[-1])
        return tf.reduce_sum(x * tf.nn.log_softmax(self.inputs), axis=-1)

    required_model_output_shape = staticmethod(_count_choices)


class _DirichletBase(TFActionDistribution):
    """Dirichlet distributions over the last axis of `_concentration`, summed over axes before it.

    The density is prod(x ** (a - 1)) / B(a), and E[log x] = digamma(a) - digamma(sum(a)).
    """

    _concentration: tf.Tensor

    def _sample_proportions(self) -> tf.Tensor:
        samples = sample_gamma(self._concentration)
        return samples / tf.reduce_sum(samples, axis=-1, keepdims=True)

    def _compute_log_density(self, x: tf.Tensor) -> tf.Tensor:
        terms = tf.reduce_sum((self._concentration - 1.0) * tf.math.log(x), axis=-1)
        return _sum_per_row(terms - tf.math.lbeta(self._concentration))

    def entropy(self) -> tf.Tensor:
        a = self._concentration
        terms = tf.reduce_sum((a - 1.0) * self._compute_mean_logs(), axis=-1)
        return _sum_per_row(tf.math.lbeta(a) - terms)

    def kl(self, other: Any) -> tf.Tensor:
        a, b = self._concentration, other._concentration
        terms = tf.reduce_sum((a - b) * self._compute_mean_logs(), axis=-1)
        return _sum_per_row(tf.math.lbeta(b) - tf.math.lbeta(a) + terms)

    def _compute_mean_logs(self) -> tf.Tensor:
        a = self._concentration
        return tf.math.digamma(a) - tf.math.digamma(tf.reduce_sum(a, axis=-1, keepdims=True))


class Beta(_DirichletBase):
    """Independent beta distributions, scaled to [low, high].

    Args:
        inputs: `[B, 2k]`; alpha and beta are log(exp(x) + 1) + 1 of its halves.
        model: stored.
        low: the lower bound.
        high: the upper bound.

    Attributes:
        inputs: alpha and beta, `[B, 2k]`.

    Raises:
        ConfigError: if `low` is not less than `high`.
    """

    def __init__(self, inputs: Any, model: Any = None, low: Any = 0.0, high: Any = 1.0) -> None:
        bound = -math.log(1e-6)
        super().__init__(softplus(tf.clip_by_value(_to_float(inputs), -bound, bound)) + 1.0, model)
        self.low, self.high, self._range = low, high, _ActionRange(0.0, 1.0, low, high)
        self._concentration = tf.stack(tf.split(self.inputs, 2, axis=-1), axis=-1)

    def _build_sample_op(self) -> tf.Tensor:
        return self._range.scale(self._sample_proportions()[..., 0])

    def deterministic_sample(self) -> tf.Tensor:
        """Returns the means."""
        alpha, total = self._concentration[..., 0], tf.reduce_sum(self._concentration, axis=-1)
        return self._range.scale(alpha / total)

    def logp(self, x: Any) -> tf.Tensor:
        share = tf.clip_by_value(self._range.unscale(x), _TINY, 1.0 - _TINY)
        return self._compute_log_density(tf.stack([share, 1.0 - share], axis=-1))

    required_model_output_shape = staticmethod(_count_two_per_entry)


class Dirichlet(_DirichletBase):
    """Fractions that sum to 1, from `[B, k]` logarithms of concentrations.

    Attributes:
        inputs: the concentrations, `[B, k]`.
    """

    def __init__(self, inputs: Any, model: Any = None) -> None:
        super().__init__(tf.exp(_to_float(inputs)) + _TINY, model)
        self._concentration = self.inputs

    def _build_sample_op(self) -> tf.Tensor:
        return self._sample_proportions()

    def deterministic_sample(self) -> tf.Tensor:
        return tf.nn.softmax(self.inputs)

    def logp(self, x: Any) -> tf.Tensor:
        shares = tf.maximum(tf.cast(x, tf.float32), _TINY)
        return self._compute_log_density(shares / tf.reduce_sum(shares, axis=-1, keepdims=True))

    required_model_output_shape = staticmethod(_count_entries)


class MultiActionDistribution(TFActionDistribution):
    """Independent distributions of the parts of a Dict or Tuple.

    Args:
        inputs: `[B, n]`.
        model: passed to each part.
        child_distributions: a class for each part, in the order of the space.
        input_lens: the number of inputs of each part.
        action_space: the nested space.
        **kwargs: arguments of all classes.

    Attributes:
        flat_child_distributions: the distributions.
    """

    def __init__(
        self,
        inputs: Any,
        model: Any,
        *,
        child_distributions: Sequence[Callable[..., Any]],
        input_lens: Sequence[int],
        action_space: gym.Space,
        **kwargs: Any,
    ) -> None:
        super().__init__(_to_float(inputs), model)
        self.action_space = action_space
        self.input_lens = [int(n) for n in input_lens]
        pairs = zip(
            child_distributions, tf.split(self.inputs, self.input_lens, axis=-1), strict=True
        )
        self.flat_child_distributions = [kind(part, model, **kwargs) for kind, part in pairs]

    @staticmethod
    def _get_arguments(space: gym.Space) -> dict[str, Any]:
        return _get_child_arguments(space)

    def _build_sample_op(self) -> Any:
        return unflatten(
            self.action_space, [child.sample() for child in self.flat_child_distributions]
        )

    def deterministic_sample(self) -> Any:
        modes = [child.deterministic_sample() for child in self.flat_child_distributions]
        return unflatten(self.action_space, modes)

    def sampled_action_logp(self) -> tf.Tensor:
        return tf.add_n([child.sampled_action_logp() for child in self.flat_child_distributions])

    def logp(self, x: Any) -> tf.Tensor:
        """Returns the log-probability of actions: nested, a list by part, or `[B, k]`."""
        pairs = zip(self.flat_child_distributions, self._split_actions(x), strict=True)
        return tf.add_n([child.logp(part) for child, part in pairs])

    def entropy(self) -> tf.Tensor:
        return tf.add_n([child.entropy() for child in self.flat_child_distributions])

    def kl(self, other: Any) -> tf.Tensor:
        pairs = zip(self.flat_child_distributions, other.flat_child_distributions, strict=True)
        return tf.add_n([child.kl(its) for child, its in pairs])

    @staticmethod
    def required_model_output_shape(action_space: gym.Space, model_config: Any) -> int:
        return sum(_get_child_arguments(action_space)["input_lens"])

    def _split_actions(self, x: Any) -> list[Any]:
        if tf.is_tensor(x) or isinstance(x, np.ndarray):
            modes = [child.deterministic_sample() for child in self.flat_child_distributions]
            return list(tf.split(x, [math.prod(mode.shape[1:]) for mode in modes], axis=-1))
        if isinstance(x, list | tuple) and not any(isinstance(y, Mapping | tuple) for y in x):
            return list(x)
        return [get_at_path(x, leaf.path) for leaf in leaves(self.action_space)]


_BY_TYPE = {"deterministic": Deterministic, "gumbel_softmax": GumbelSoftmax}


def find_distribution_class(
    space: gym.Space, settings: Mapping[str, Any], dist_type: Any = None
) -> Any:
    """Returns a space's class in RLlib's catalog, or a partial of one, and its number of inputs.

    Args:
        space: the action space.
        settings: the `model` config; only `custom_action_dist` is read.
        dist_type: None, "deterministic" or "gumbel_softmax".
    """
    custom = settings.get("custom_action_dist")
    custom = BOX_DISTRIBUTIONS.find(custom) or custom
    if custom is None and dist_type is not None:
        custom = _BY_TYPE.get(dist_type, dist_type)
        if custom not in (*_BY_TYPE.values(), MultiActionDistribution):
            raise ConfigError(f"dist_type must be one of {sorted(_BY_TYPE)}; got {dist_type!r}.")
    if custom is None and isinstance(space, spaces.Dict | spaces.Tuple):
        custom = MultiActionDistribution
    if custom is None:
        return _find_default_class(space)
    distribution = own.ActionDistribution.for_space(space, custom, settings)
    if not isinstance(distribution, RLlibDistribution):
        return distribution, distribution.num_inputs
    arguments = distribution.arguments
    return functools.partial(custom, **arguments) if arguments else custom, distribution.num_inputs


def _find_default_class(space: Any) -> tuple[Any, int]:
    """Returns the class for a leaf, or a partial of one, and its number of inputs."""
    distribution = own.ActionDistribution.for_space(space)
    (kind,) = distribution.leaf_classes
    classes: dict[Any, Any] = {
        own.Categorical: Categorical,
        own.DiagGaussian: functools.partial(DiagGaussian, action_space=space),
    }
    if kind is own.MultiCategorical:
        classes[kind] = functools.partial(MultiCategorical, **_get_cell_arguments(space))
    default = functools.partial(WrappedDistribution, kind=kind, space=space)
    return classes.get(kind, default), distribution.num_inputs


def _get_cell_arguments(space: gym.Space) -> dict[str, Any]:
    return {"input_lens": choices_per_cell(space), "action_space": space}


def _get_child_arguments(space: gym.Space) -> dict[str, Any]:
    pairs = [_find_default_class(leaf.space) for leaf in leaves(space)]
    kinds, sizes = zip(*pairs, strict=True)
    return {"child_distributions": kinds, "input_lens": sizes, "action_space": space}


def _to_float(inputs: Any) -> tf.Tensor:
    return tf.cast(inputs, tf.float32)


def _make_box(inputs: Any, parts: int = 2) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (inputs.shape[-1] // parts,), np.float32)


def _sum_per_row(terms: tf.Tensor) -> tf.Tensor:
    """Sums terms `[B, ...]` to `[B]`."""
    return tf.reduce_sum(terms, axis=list(range(1, terms.shape.rank)))


def _require_positive(name: str, value: Any) -> Any:
    if not value > 0.0:
        raise ConfigError(f"{name} must be a positive number, got {value!r}.")
    return value
