"""Public base classes and functions for custom algorithms, policies and exploration strategies.

`docs/extending.md` shows how to use them. These names are stable; the modules that they come from
may change.
"""

from __future__ import annotations

from tfpolicies.algorithms.actor_critic import (
    ActorCriticConfig,
    ActorCriticTFPolicy,
)
from tfpolicies.algorithms.off_policy import (
    OffPolicyAlgorithm,
    OffPolicyConfig,
    OffPolicyTFPolicy,
)
from tfpolicies.algorithms.tuned import register_tuned
from tfpolicies.batch.postprocessing import (
    discounted_returns,
    generalized_advantages,
    n_step_returns,
)
from tfpolicies.config.later import lazy_class
from tfpolicies.config.sections import SCHEDULE, TrainingSettings
from tfpolicies.config.setting import setting
from tfpolicies.exploration.exploration import Exploration
from tfpolicies.exploration.exploration import ExplorationContext as ExplorationSetting
from tfpolicies.exploration.transform import Greedy, Sample, Transform
from tfpolicies.extensions import Extension, register_extension
from tfpolicies.models.distributions import Distribution, register_box_distribution
from tfpolicies.models.losses import explained_variance, huber, masked_mean
from tfpolicies.policy.fragments import Fragments
from tfpolicies.program.networks import NetworkPlan
from tfpolicies.rules import (
    BOOL,
    FRACTION,
    POSITIVE,
    Validator,
    function,
    int_at_least,
    one_of,
)

__all__ = [
    "AMOUNT",
    "BOOL",
    "COUNT",
    "FRACTION",
    "POSITIVE",
    "SCHEDULE",
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
    "Sample",
    "Scheduled",
    "TrainingSettings",
    "Transform",
    "Validator",
    "discounted_returns",
    "explained_variance",
    "function",
    "generalized_advantages",
    "huber",
    "int_at_least",
    "lazy_class",
    "masked_mean",
    "n_step_returns",
    "one_of",
    "register_box_distribution",
    "register_extension",
    "register_tuned",
    "setting",
]
