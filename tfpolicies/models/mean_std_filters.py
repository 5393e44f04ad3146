"""Filters that normalise observations and rewards by running mean and standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from gymnasium import Space, spaces
from numpy.typing import ArrayLike

from tfpolicies.base.type_aliases import Setting, Structure
from tfpolicies.errors import ConfigError, ObservationError, suggest_similar_names
from tfpolicies.models.running_filter import (
    CLIP,
    FILTER_NAMES,
    FILTER_RULE,
    RETURN_FILTER,
    RunningFilter,
    Scaling,
)
from tfpolicies.models.running_stat import RunningStat
from tfpolicies.models.spaces import MASK, batch_leaves, get_at_path, has_mask, leaves, unflatten

_EPSILON = 1e-8


def normalize(x: tf.Tensor, mean: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns `(x - mean) * scale`, clipped to `[-10, 10]`.

    Args:
        x: float32 `[B, *shape]`.
        mean: float32 `[*shape]`.
        scale: float32 `[*shape]`.
    """
    return tf.clip_by_value((x - mean) * scale, -CLIP, CLIP)


def get_filtered_leaves(observation_space: Space) -> tuple[int, ...]:
    """Returns the indices in `leaves(observation_space)` that a MeanStdFilter normalises.

    These are Boxes of numbers. Images (uint8), discrete leaves and an action mask are not changed.

    >>> get_filtered_leaves(spaces.Dict(n=spaces.Discrete(2), x=spaces.Box(-1, 1, (3,))))
    (1,)
    """
    has_action_mask = has_mask(observation_space)
    return tuple(
        i
        for i, leaf in enumerate(leaves(observation_space))
        if isinstance(leaf.space, spaces.Box)
        and leaf.dtype != np.uint8
        and leaf.space.dtype != bool
        and not (has_action_mask and leaf.path[0] == MASK)
    )


def make_filter(name: Setting, observation_space: Space) -> MeanStdFilter:
    """Returns the filter that the setting `observation_filter` names.

    `"NoFilter"` gives a filter that normalises no leaf; `"ConcurrentMeanStdFilter"` is the same as
    `"MeanStdFilter"`, which is always thread-safe.

    Raises:
        ConfigError: for any other name, or a callable.
    """
    check_filter_name(name)
    return MeanStdFilter(observation_space, () if name == "NoFilter" else None)


def make_reward_filter(name: str) -> RewardFilter | None:
    """Returns the filter that the setting `reward_filter` names; None for `"NoFilter"`."""
    if name == "NoFilter":
        return None
    return ReturnFilter() if name == RETURN_FILTER else RewardFilter()


def check_filter_name(name: Setting) -> None:
    if callable(name):
        raise ConfigError(
            f"`observation_filter` of a single policy must be {FILTER_RULE.description}, got "
            f"{name!r}. A callable is for the config of an algorithm or a worker, which apply its "
            "filter before the policy; to export a filter with a policy, make it a layer of its "
            "model."
        )
    if not FILTER_RULE.is_valid(name):
        raise ConfigError(
            f"`observation_filter` must be {FILTER_RULE.description}, got {name!r}."
            f"{suggest_similar_names(name, FILTER_NAMES)}"
        )


class MeanStdFilter(RunningFilter):
    """Observations with mean 0 and standard deviation 1, leaf by leaf and component by component.

    The scalings are those of `normalize`: the running mean, and 1 / (std + 1e-8) with the unbiased
    std; 0 and 1 while there are fewer than two observations.

    Args:
        observation_space: the environment's, possibly nested.
        filtered: the indices of the leaves to normalise; those of `get_filtered_leaves` if None.

    Attributes:
        filtered: the indices of the normalised leaves.

    >>> two = MeanStdFilter(spaces.Box(-9, 9, (1,)))
    >>> two.observe([np.array([[0.0], [1.0], [2.0], [3.0]])])
    >>> two.flush()
    >>> two.get_scalings()[0]
    Scaling(mean=array([1.5], dtype=float32), scale=array([0.7745967], dtype=float32))
    """

    def __init__(self, observation_space: Space, filtered: Sequence[int] | None = None) -> None:
        if filtered is None:
            filtered = get_filtered_leaves(observation_space)
        self.filtered = tuple(filtered)
        self._space = observation_space
        self._leaves = leaves(observation_space)
        super().__init__([self._leaves[i].shape for i in self.filtered])

    def observe(self, batches: Sequence[np.ndarray]) -> None:
        """Adds observations to the pending ones; the result of `tensors` does not change.

        One call with all rows of a fragment is cheaper than one per step. Evaluation never calls
        this.

        Args:
            batches: one array `[B, *leaf.shape]` per leaf of the space, in the order of `leaves`;
                leaves that are not filtered are not read.

        Raises:
            ObservationError: if shapes differ or values are not finite; then nothing has changed.
        """
        if len(batches) != len(self._leaves):
            raise ObservationError(
                f"A filter observes one array per leaf of the space, so {len(self._leaves)}, but "
                f"got {len(batches)}. Use `batch_leaves(leaves(space), obs, 'obs')`."
            )
        self._observe([batches[i] for i in self.filtered])

    def __call__(self, x: Structure, update: bool = False) -> Any:
        """Returns observations as the model sees them: normalised by the frozen scalings, float32.

        Args:
            x: one observation or a batch, nested as the space is.
            update: whether to also add them to the pending ones.

        Raises:
            ObservationError: if they do not fit the space; then nothing has changed.
        """
        first_leaf = self._leaves[0]
        is_single = np.ndim(get_at_path(x, first_leaf.path)) == len(first_leaf.shape)
        if is_single:
            x = unflatten(
                self._space, [np.asarray(get_at_path(x, leaf.path))[None] for leaf in self._leaves]
            )
        rows = batch_leaves(self._leaves, x, "x")
        if update:
            self.observe(rows)
        normalized = self.normalize_leaves(rows)
        return unflatten(
            self._space, [array[0] for array in normalized] if is_single else normalized
        )

    def normalize_leaves(self, obs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns observation leaves `[..., *shape]` normalised by the frozen scalings."""
        arrays = list(obs)
        for i, (mean, scale) in zip(self.filtered, self.get_scalings(), strict=True):
            arrays[i] = np.clip((arrays[i] - mean) * scale, -CLIP, CLIP)
        return arrays

    def get_scalings(self) -> tuple[Scaling, ...]:
        """Returns mean and scale of each filtered leaf: inputs of acting and learning.

        The arrays stay the same until `flush`, `apply_changes`, `sync` or `set_state` replace them;
        they are never modified.
        """
        return self._scalings

    def _compute_scaling(self, stat: RunningStat) -> Scaling:
        if stat.count < 2:
            return Scaling.from_arrays(np.zeros(stat.shape), np.ones(stat.shape))
        return Scaling.from_arrays(stat.mean, 1.0 / (stat.std + _EPSILON))

    def _get_label(self, index: int) -> str:
        return self._leaves[self.filtered[index]].name("obs")


class RewardFilter(RunningFilter):
    """Rewards with standard deviation 1, for learning.

    They keep their sign: subtracting the mean would change the optimal policy if episodes
    differ in length. Rewards that do not vary (a std below a millionth of their mean) are not
    scaled. Scaled rewards are clipped to `[-10, 10]`.

    >>> rewards = RewardFilter()
    >>> rewards.observe([-2.0, 0.0, 2.0])
    >>> rewards.flush()
    >>> rewards([-2.0, 1.0, 100.0])
    array([-1. ,  0.5, 10. ], dtype=float32)
    """

    def __init__(self) -> None:
        super().__init__([()])

    def observe(self, rewards: ArrayLike) -> None:
        """Adds raw rewards, of any shape, to the pending ones.

        Raises:
            ObservationError: if one of them is not finite; then nothing has changed.
        """
        self._observe([np.ravel(rewards)])

    def __call__(self, rewards: ArrayLike, update: bool = False) -> np.ndarray:
        """Returns rewards scaled by the frozen statistics, float32, of the same shape.

        Args:
            rewards: raw rewards.
            update: whether to also add them to the pending ones.
        """
        if update:
            self.observe(rewards)
        ((_, scale),) = self._scalings
        return np.clip(np.asarray(rewards, np.float32) * scale, -CLIP, CLIP)

    def _compute_scaling(self, stat: RunningStat) -> Scaling:
        varies = stat.count >= 2 and bool(stat.std > 1e-6 * abs(stat.mean))
        scale = 1.0 / (stat.std + _EPSILON) if varies else np.ones(())
        return Scaling.from_arrays(np.zeros(()), scale)

    def _get_label(self, index: int) -> str:
        return "rewards"


class ReturnFilter(RewardFilter):
    """Rewards divided by the standard deviation of discounted returns.

    `observe` takes the returns so far (`running_returns`), one for each reward. If rewards are
    sparse or mostly of one sign, returns vary more than rewards, and so do the values that a critic
    learns: this filter scales them to about 1. Engstrom et al. 2020 (arXiv:2005.12729), section 2.

    >>> rewards = ReturnFilter()
    >>> rewards.observe([1.0, 3.0, 5.0])
    >>> rewards.flush()
    >>> rewards([1.0, -4.0])
    array([ 0.5, -2. ], dtype=float32)
    """
