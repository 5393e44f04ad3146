"""The models a policy gets when the user brings none, built from the `model` config.

`build.py` puts together what the other files know: `initializers.py` (fresh weights), `layers.py`
(small layers), `noisy.py` (noisy ones), `heads.py` (outputs), `encoders.py` (an observation as one
vector: MLP and CNN), `q_network.py` (values of all actions), `critic.py` (the value of one),
`memory.py` (a memory behind that, or around a model of the user's), `recurrent.py` (LSTM and GRU),
`attention.py` (attention over the last steps), `inspection.py` (what memory a model has).
"""

from tfpolicies.models.catalog.build import build_model
from tfpolicies.models.catalog.critic import ACTIONS, build_critic
from tfpolicies.models.catalog.initializers import NormalizedColumns, initializer_of
from tfpolicies.models.catalog.inspection import extra_inputs, memory_of
from tfpolicies.models.catalog.layers import FreeLogStd
from tfpolicies.models.catalog.memory import RememberingModel, build_remembering
from tfpolicies.models.catalog.noisy import NoisyDense
from tfpolicies.models.catalog.q_network import QHeads, build_q_model, q_noise_size
from tfpolicies.models.settings import model_settings

__all__ = [
    "ACTIONS",
    "FreeLogStd",
    "NoisyDense",
    "NormalizedColumns",
    "QHeads",
    "RememberingModel",
    "build_critic",
    "build_model",
    "build_q_model",
    "build_remembering",
    "extra_inputs",
    "initializer_of",
    "memory_of",
    "model_settings",
    "q_noise_size",
]
