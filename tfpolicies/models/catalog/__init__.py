"""The models a policy gets when the user brings none, built from the `model` config.

`build.py` puts together what the other files know: `initializers.py` (fresh weights), `layers.py`
(small layers, noisy ones, outputs), `encoders.py` (an observation as one vector: MLP and CNN),
`q_network.py` (values of all actions, or of one),
`memory.py` (LSTM and GRU, a memory behind that or around a model of the user's),
`attention.py` (attention over the last steps), `inspection.py` (what memory a model has).
"""
