"""Default models of policies, built from the `model` config.

`build.py` combines the other modules: `initializers.py` (initial weights), `layers.py` (small
layers, noisy layers, outputs), `encoders.py` (an observation as one vector: MLP and CNN),
`q_network.py` (values of all actions, or of one), `memory.py` (LSTM and GRU, a memory after an
encoder or around a user's model), `attention.py` (attention over the last steps), `inspection.py`
(the inputs and states of a model).
"""
