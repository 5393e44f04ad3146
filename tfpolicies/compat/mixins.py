"""Bases that ported policy classes name: what RLlib's mixins kept in variables is in the config.

Their constructors may be called as before and do nothing.
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
    """A base for policies on traced functions whose model estimates values, as RLlib's all do.

    A class that trains with PPO's settings derives from `PPOTF2Policy` instead; or it says
    `config_class = PPOConfig`, and names in `hyperparameters` and `static_keys` what it reads.
    """

    @classmethod
    def wants_value(cls, static: Mapping[str, Any]) -> bool:
        """Values are always estimated."""
        del static
        return True


class DynamicTFPolicyV2(EagerTFPolicyV2):
    """The same in graph mode."""

    runtime = "session"


def _do_nothing(mixin: object, *arguments: Any, **named: Any) -> None:
    """Does nothing; the constructors of mixins."""


class LearningRateSchedule:
    """Says nothing new: `lr_schedule` is a setting, and `cur_lr` of every policy is in force."""

    __init__ = _do_nothing


class EntropyCoeffSchedule:
    """Gives a policy whose hyper-parameters have `entropy_coeff` that as an attribute."""

    __init__ = _do_nothing

    @property
    def entropy_coeff(self: Any) -> Any:
        """The coefficient in force; a tensor in traced code."""
        return self._in_force("entropy_coeff")


class KLCoeffMixin:
    """Gives a policy whose hyper-parameters have `kl_coeff` that as an attribute."""

    __init__ = _do_nothing

    @property
    def kl_coeff(self: Any) -> Any:
        """The coefficient in force; a tensor in traced code."""
        return self._in_force("kl_coeff")


class ValueNetworkMixin:
    """Says nothing new: `compute_gae_for_sample_batch` asks the model for values itself."""

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
        policy: whose trajectory it is; its model estimates values.
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
        following = Fragments.of_trajectory(policy, sample_batch).next_values()[0]
        sample_batch[SampleBatch.VALUES_BOOTSTRAPPED] = following.astype(np.float32)
        last_r = float(following[-1])
    return compute_advantages(
        sample_batch,
        last_r,
        policy.hyper("gamma"),
        config.get("lambda", 1.0),
        use_gae=config.get("use_gae", True),
        use_critic=config.get("use_critic", True),
    )
