"""Public base classes and functions for custom algorithms, policies and exploration strategies.

`docs/extending.md` shows how to use them. These names are stable; the modules that they come from
may change.
"""

from __future__ import annotations

from tfpolicies.algorithms.actor_critic import (
    ActorCriticConfig,
    ActorCriticTFPolicy,
    ActorCriticTraining,
)
from tfpolicies.algorithms.off_policy import (
    OffPolicyAlgorithm,
    OffPolicyConfig,
    OffPolicyTFPolicy,
    OffPolicyTraining,
)
from tfpolicies.algorithms.tuned import register_tuned
from tfpolicies.batch.postprocessing import (
    discounted_returns,
    generalized_advantages,
    n_step_returns,
)
from tfpolicies.config.later import later
from tfpolicies.config.sections import SCHEDULE, Training
from tfpolicies.config.setting import setting
from tfpolicies.exploration.exploration import Exploration, Scheduled
from tfpolicies.exploration.exploration import Setting as ExplorationSetting
from tfpolicies.exploration.transform import Disturb, Greedy, Sample, Transform
from tfpolicies.extensions import Extension, register_extension
from tfpolicies.models.distributions import Distribution, register_box_distribution
from tfpolicies.models.losses import explained_variance, huber, masked_mean
from tfpolicies.policy.fragments import Fragments
from tfpolicies.program.networks import NetworkPlan
from tfpolicies.rules import AMOUNT, BOOL, COUNT, POSITIVE, UNIT, Rule, count, function, one_of

__all__ = [
    "AMOUNT",
    "BOOL",
    "COUNT",
    "POSITIVE",
    "SCHEDULE",
    "UNIT",
    "ActorCriticConfig",
    "ActorCriticTFPolicy",
    "ActorCriticTraining",
    "Distribution",
    "Disturb",
    "Exploration",
    "ExplorationSetting",
    "Extension",
    "Fragments",
    "Greedy",
    "NetworkPlan",
    "OffPolicyAlgorithm",
    "OffPolicyConfig",
    "OffPolicyTFPolicy",
    "OffPolicyTraining",
    "Rule",
    "Sample",
    "Scheduled",
    "Training",
    "Transform",
    "count",
    "discounted_returns",
    "explained_variance",
    "function",
    "generalized_advantages",
    "huber",
    "later",
    "masked_mean",
    "n_step_returns",
    "one_of",
    "register_box_distribution",
    "register_extension",
    "register_tuned",
    "setting",
]
