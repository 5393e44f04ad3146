"""The models a policy gets when the user brings none, built from the `model` config.

`build.py` puts together what the other files know: `initializers.py` (fresh weights), `layers.py`
(small layers, noisy ones, outputs), `encoders.py` (an observation as one vector: MLP and CNN),
`q_network.py` (values of all actions, or of one),
`memory.py` (a memory behind that, or around a model of the user's), `recurrent.py` (LSTM and GRU),
`attention.py` (attention over the last steps), `inspection.py` (what memory a model has).
"""

from tfpolicies.models.catalog.build import build_model as build_model
from tfpolicies.models.catalog.initializers import NormalizedColumns as NormalizedColumns
from tfpolicies.models.catalog.initializers import initializer_of as initializer_of
from tfpolicies.models.catalog.inspection import extra_inputs as extra_inputs
from tfpolicies.models.catalog.inspection import memory_of as memory_of
from tfpolicies.models.catalog.layers import FreeLogStd as FreeLogStd
from tfpolicies.models.catalog.layers import NoisyDense as NoisyDense
from tfpolicies.models.catalog.memory import RememberingModel as RememberingModel
from tfpolicies.models.catalog.memory import build_remembering as build_remembering
from tfpolicies.models.catalog.q_network import ACTIONS as ACTIONS
from tfpolicies.models.catalog.q_network import QHeads as QHeads
from tfpolicies.models.catalog.q_network import build_critic as build_critic
from tfpolicies.models.catalog.q_network import build_q_model as build_q_model
from tfpolicies.models.catalog.q_network import q_noise_size as q_noise_size
from tfpolicies.models.settings import model_settings as model_settings
