"""Base classes of ported policies. The config holds the values that RLlib's mixins hold.

Their constructors may still be called and do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfpolicies.batch.postprocessing import compute_advantages
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.tf_policy import TFPolicy


class EagerTFPolicyV2(TFPolicy):
    """Base class of policies on traced functions whose model estimates values, as in RLlib.

    A class that trains with PPO's settings should derive from `PPOTF2Policy` instead; or set
    `config_class = PPOConfig`, and list the settings that it reads in `hyperparameters` and
    `static_keys`.
    """

    @classmethod
    def wants_value(cls, static: Mapping[str, Any]) -> bool:
        """Returns True: values are always estimated."""
        del static
        return True


class DynamicTFPolicyV2(EagerTFPolicyV2):
    """An `EagerTFPolicyV2` in graph mode."""

    runtime = "session"


def _do_nothing(mixin: object, *arguments: Any, **kwargs: Any) -> None:
    """Replaces the constructors of mixins."""


class LearningRateSchedule:
    """Does nothing: `lr_schedule` is a setting, and each policy's `cur_lr` is the current value."""

    __init__ = _do_nothing


class EntropyCoeffSchedule:
    """Adds the attribute `entropy_coeff` to a policy that has this hyperparameter."""

    __init__ = _do_nothing

    @property
    def entropy_coeff(self: Any) -> Any:
        """The current coefficient; a tensor in traced code."""
        return self._get_current_hyperparameter("entropy_coeff")


class KLCoeffMixin:
    """Adds the attribute `kl_coeff` to a policy that has this hyperparameter."""

    __init__ = _do_nothing

    @property
    def kl_coeff(self: Any) -> Any:
        """The current coefficient; a tensor in traced code."""
        return self._get_current_hyperparameter("kl_coeff")


class ValueNetworkMixin:
    """Does nothing: `compute_gae_for_sample_batch` computes values with the model."""

    __init__ = _do_nothing


def compute_gae_for_sample_batch(
    policy: TFPolicy,
    sample_batch: SampleBatch,
    other_agent_batches: Any = None,
    episode: Any = None,
) -> SampleBatch:
    """Adds `advantages`, `value_targets` and `values_bootstrapped` to one trajectory, in place.

    The last row is bootstrapped with the model's value of its `new_obs`, unless it terminated. See
    `compute_advantages` for the formulas; `gamma`, `lambda`, `use_gae` and `use_critic` are the
    policy's.

    Args:
        policy: the trajectory's policy; its model estimates values.
        sample_batch: the rows, with `rewards`, `vf_preds`, `new_obs` and `terminateds`.
        other_agent_batches: unused.
        episode: unused.

    Returns:
        `sample_batch` itself.
    """
    del other_agent_batches, episode
    config = policy.config
    last_r = 0.0
    if config.get("use_critic", True):
        next_values = Fragments.from_trajectory(policy, sample_batch).get_next_values()[0]
        sample_batch[SampleBatch.VALUES_BOOTSTRAPPED] = next_values.astype(np.float32)
        last_r = float(next_values[-1])
    return compute_advantages(
        sample_batch,
        last_r,
        policy.get_hyperparameter("gamma"),
        config.get("lambda", 1.0),
        use_gae=config.get("use_gae", True),
        use_critic=config.get("use_critic", True),
    )
