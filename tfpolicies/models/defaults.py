"""The keys of the `model` config and their defaults."""

from __future__ import annotations

from typing import Any

MODEL_DEFAULTS: dict[str, Any] = {
    # Fully connected layers.
    "fcnet_hiddens": [256, 256],  # units of each hidden layer
    "fcnet_activation": "tanh",  # any Keras activation name
    "post_fcnet_hiddens": [],  # units of the layers behind them, or behind an image's convolutions
    "post_fcnet_activation": "relu",  # any Keras activation name
    "vf_share_layers": True,  # whether the value reads the actor's last hidden layer
    "free_log_std": False,  # Gaussians: one trained log standard deviation for all rows
    "no_final_linear": False,  # whether the output layer is the last hidden one, activated
    "ortho_init": False,  # orthogonal kernels, gains sqrt(2), 0.01 and 1; else normalised columns
    # Images.
    "conv_filters": None,  # [[channels, kernel, stride], ...]; None: by size; []: flatten images
    "conv_activation": "relu",  # any Keras activation name
    "channels_first": None,  # whether images are [channels, height, width]; None: by their shape
    # Memory: at most one of the three.
    "use_lstm": False,
    "use_gru": False,
    "use_attention": False,
    "max_seq_len": 20,  # steps of one sequence of a train batch
    "lstm_cell_size": 256,  # units of the LSTM or GRU
    "lstm_use_prev_action": False,  # whether the LSTM or GRU also reads the previous action
    "lstm_use_prev_reward": False,  # and the previous reward
    "_time_major": False,  # sequences are [B, T, ...]
    "attention_num_transformer_units": 1,
    "attention_dim": 64,  # units of the residual stream
    "attention_num_heads": 1,
    "attention_head_dim": 32,  # units of each head
    "attention_memory_inference": 50,  # earlier steps that can be attended to
    "attention_memory_training": 50,  # training reads the memory that acting had: always as above
    "attention_position_wise_mlp_dim": 32,  # hidden units behind each attention
    "attention_init_gru_gate_bias": 2.0,  # the larger, the more a new unit passes its input on
    "attention_use_n_prev_actions": 0,  # 0 or 1
    "attention_use_n_prev_rewards": 0,  # 0 or 1
    # Atari frames are prepared by environment wrappers: only these values are taken, and any `dim`.
    "framestack": True,
    "dim": 84,  # of no effect: images have the size that the environment gives them
    "grayscale": False,
    "zero_mean": True,
    # A model of the user's own.
    # a keras.Model, a factory f(observation_space, num_outputs, **config), or a registered name
    "custom_model": None,
    "custom_model_config": {},  # keyword arguments of the factory
    # what a Box of floats in the action space gets: None for "diag_gaussian", or
    # "squashed_gaussian", "deterministic", or a subclass of models.distributions.Distribution
    "custom_action_dist": None,
    "custom_preprocessor": None,  # only None: wrap the environment, or let the model do it
}
