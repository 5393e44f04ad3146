"""Settings that are known to learn well, by algorithm and environment: the one table of them.

`tfpolicies train` begins with these; in a script:

>>> from tfpolicies import PPOConfig
>>> PPOConfig().update_from_dict(tuned_settings("PPO", "CartPole-v1")).num_envs_per_worker
8
"""

from __future__ import annotations

import copy
from typing import Any

_TUNED: dict[tuple[str, str], dict[str, Any]] = {
    ("PPO", "CartPole-v1"): {
        "num_envs_per_worker": 8,
        "train_batch_size": 256,
        "sgd_minibatch_size": 256,
        "num_sgd_iter": 20,
        "lr": 1e-3,
        "gamma": 0.98,
        "lambda": 0.8,
        "clip_param": 0.2,
        "kl_coeff": 0.0,
        "vf_loss_coeff": 0.5,
        "vf_clip_param": float("inf"),
        "grad_clip": 0.5,
        "model": {"fcnet_hiddens": [64, 64]},
    },
}


def tuned_settings(algo: str, env: str) -> dict[str, Any]:
    """Returns tuned settings, for the caller to keep; none if nobody tuned that pair.

    Args:
        algo: the algorithm's name, such as `"PPO"`.
        env: the environment's registered name.
    """
    return copy.deepcopy(_TUNED.get((algo, env), {}))
