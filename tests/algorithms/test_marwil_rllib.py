"""MARWIL and BC compute the losses, the moving average and the updates of RLlib 2.10.

`marwil_rllib.npz` was recorded with RLlib 2.10.0 (TensorFlow 2.15, framework "tf2"): initial
weights, three batches of 16 rows, and for each case the statistics of three updates and the weights
after them. RLlib's framework "tf" differs only in Adam's epsilon.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import (
    BCTF1Policy,
    BCTF2Policy,
    MARWILTF1Policy,
    MARWILTF2Policy,
    SampleBatch,
)

pytestmark = pytest.mark.usefixtures("kept_programs")

RECORDED = np.load(Path(__file__).parent / "marwil_rllib.npz")
STATS = (
    *("policy_loss", "total_loss", "vf_loss", "vf_explained_var"),
    "moving_average_sqd_adv_norm",
)
AVERAGE = "advantage_norm/layer_0/average"
ROLES = ("fc_1", "fc_value_1", "fc_2", "fc_value_2", "fc_out", "value_out")
OBS = spaces.Box(-np.inf, np.inf, (4,), np.float32)
ACTIONS = {"disc": spaces.Discrete(3), "box": spaces.Box(-1.0, 1.0, (2,), np.float32)}
CASES = [name.removesuffix("/stats") for name in RECORDED.files if name.endswith("/stats")]
PATTERN = re.compile(r"(\w+?)_beta(.+)_coeff(.+)_rate(.+)_clip(.+)_vf(.+)")


def make_policy(policy_class, case):
    kind, beta, coeff, rate, clip, vf_coeff = PATTERN.fullmatch(case).groups()
    model = {"fcnet_hiddens": [8, 8], "fcnet_activation": "tanh", "vf_share_layers": False}
    config = {
        "model": model if kind == "disc" else {**model, "custom_action_dist": "diag_gaussian"},
        "beta": float(beta),
        "bc_logstd_coeff": float(coeff),
        "vf_coeff": float(vf_coeff),
        "moving_average_sqd_adv_norm_update_rate": float(rate),
        "grad_clip": None if clip == "None" else float(clip),
        "lr": 1e-3,
        "seed": 0,
        "inference": "tf",
    }
    return kind, policy_class(OBS, ACTIONS[kind], config)


def get_roles(policy):
    """Returns RLlib's names of the weights, by name here; there is no critic if beta is 0."""
    has_critic = AVERAGE in policy.get_weights()
    roles = [role for role in ROLES if has_critic or "value" not in role]
    return {
        f"layer_{i}/{part}": f"{role}/{part}"
        for i, role in enumerate(roles)
        for part in ("kernel", "bias")
    }


CHOICES = [(case, x) for case in CASES for x in (MARWILTF2Policy, MARWILTF1Policy)] + [
    (case, x) for case in CASES if "_beta0_" in case for x in (BCTF2Policy, BCTF1Policy)
]


@pytest.mark.parametrize(("case", "policy_class"), CHOICES)
def test_three_updates_are_those_of_rllib(case, policy_class):
    kind, policy = make_policy(policy_class, case)
    roles = get_roles(policy)
    weights = {name: RECORDED[f"{kind}/weights/{role}"] for name, role in roles.items()}
    policy.set_weights({**policy.get_weights(), **weights})
    for i in range(3):
        columns = ("obs", "actions", "advantages")
        batch = SampleBatch({name: RECORDED[f"{kind}/batch/{i}/{name}"] for name in columns})
        stats = policy.learn_on_batch(batch)["learner_stats"]
        for name, expected in zip(STATS, RECORDED[f"{case}/stats"][i], strict=True):
            if not np.isnan(expected):
                np.testing.assert_allclose(stats[name], expected, rtol=1e-5, err_msg=name)
    new = policy.get_weights()
    for name, role in roles.items():
        expected = RECORDED[f"{case}/weights/{role}"]
        np.testing.assert_allclose(new[name], expected, rtol=0, atol=3e-7, err_msg=role)
