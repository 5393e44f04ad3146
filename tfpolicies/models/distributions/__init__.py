"""Action distributions that transform noise.

A distribution is pure: it turns its inputs (a model's outputs) and noise into actions. The noise is
drawn by a NumPy generator that belongs to the policy, so one seed gives the same actions wherever
the distribution runs. Zero noise gives the mode, which is how greedy actions are computed.

Only operations of the Exp/Log/Abs class are used, so that every distribution converts to ONNX.
"""

from tfpolicies.models.distributions.action_distribution import (
    ActionDistribution as ActionDistribution,
)
from tfpolicies.models.distributions.action_distribution import (
    ProductDistribution as ProductDistribution,
)
from tfpolicies.models.distributions.base import MASKED_LOGIT as MASKED_LOGIT
from tfpolicies.models.distributions.base import Distribution as Distribution
from tfpolicies.models.distributions.base import WholeSpaceDistribution as WholeSpaceDistribution
from tfpolicies.models.distributions.base import (
    register_box_distribution as register_box_distribution,
)
from tfpolicies.models.distributions.categorical import Bernoulli as Bernoulli
from tfpolicies.models.distributions.categorical import Categorical as Categorical
from tfpolicies.models.distributions.categorical import MultiCategorical as MultiCategorical
from tfpolicies.models.distributions.gaussian import BoundedDeterministic as BoundedDeterministic
from tfpolicies.models.distributions.gaussian import Deterministic as Deterministic
from tfpolicies.models.distributions.gaussian import DiagGaussian as DiagGaussian
from tfpolicies.models.distributions.gaussian import SquashedDeterministic as SquashedDeterministic
from tfpolicies.models.distributions.gaussian import SquashedGaussian as SquashedGaussian
