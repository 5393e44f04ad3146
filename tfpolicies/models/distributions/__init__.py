"""Action distributions that transform noise.

A distribution is pure: it turns its inputs (a model's outputs) and noise into actions. The noise is
drawn by a NumPy generator that belongs to the policy, so one seed gives the same actions wherever
the distribution runs. Zero noise gives the mode, which is how greedy actions are computed.

Only operations of the Exp/Log/Abs class are used, so that every distribution converts to ONNX.
"""

from tfpolicies.models.distributions.action_distribution import ActionDistribution
from tfpolicies.models.distributions.base import MASKED_LOGIT, Distribution
from tfpolicies.models.distributions.bernoulli import Bernoulli
from tfpolicies.models.distributions.categorical import Categorical, MultiCategorical
from tfpolicies.models.distributions.gaussian import Deterministic, DiagGaussian, SquashedGaussian
from tfpolicies.models.distributions.product import Product

__all__ = [
    "MASKED_LOGIT",
    "ActionDistribution",
    "Bernoulli",
    "Categorical",
    "Deterministic",
    "DiagGaussian",
    "Distribution",
    "MultiCategorical",
    "Product",
    "SquashedGaussian",
]
