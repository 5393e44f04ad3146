"""Public base classes and functions for custom algorithms, policies and exploration strategies.

`docs/howto/extending/index.md` shows how to use them. These names are stable; the modules that they
come from may change.
"""

from __future__ import annotations

from tfpolicies.algorithms.actor_critic_base import (
    ActorCriticConfig,
    ActorCriticTFPolicy,
    ActorCriticTrainingSettings,
)
from tfpolicies.algorithms.off_policy import (
    OffPolicyAlgorithm,
    OffPolicyConfig,
    OffPolicyTFPolicy,
    OffPolicyTrainingSettings,
)
from tfpolicies.algorithms.tuned_hyperparameters import register_tuned
from tfpolicies.base.extensions import Extension, register_extension
from tfpolicies.base.validators import (
    BOOL,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    POSITIVE_INT,
    Validator,
    function,
    int_at_least,
    one_of,
)
from tfpolicies.batch.postprocessing import (
    discounted_returns,
    generalized_advantages,
    n_step_returns,
)
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.sections import SCHEDULE, TrainingSettings
from tfpolicies.config.setting import setting
from tfpolicies.exploration.exploration import (
    Exploration,
    ExplorationContext,
    ScheduledExploration,
)
from tfpolicies.exploration.transform import AdditiveNoise, Greedy, Sample, Transform
from tfpolicies.models.distributions import Distribution, register_box_distribution
from tfpolicies.models.losses import explained_variance, huber, masked_mean
from tfpolicies.policy.fragments import Fragments
from tfpolicies.program.networks import NetworkPlan

__all__ = [
    "BOOL",
    "FRACTION",
    "NON_NEGATIVE",
    "POSITIVE",
    "POSITIVE_INT",
    "SCHEDULE",
    "ActorCriticConfig",
    "ActorCriticTFPolicy",
    "ActorCriticTrainingSettings",
    "AdditiveNoise",
    "Distribution",
    "Exploration",
    "ExplorationContext",
    "Extension",
    "Fragments",
    "Greedy",
    "NetworkPlan",
    "OffPolicyAlgorithm",
    "OffPolicyConfig",
    "OffPolicyTFPolicy",
    "OffPolicyTrainingSettings",
    "Sample",
    "ScheduledExploration",
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
