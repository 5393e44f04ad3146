"""Checkpoints of RLlib 2.10, with what their policies do on 200 observations.

Run by `import_rllib`; by hand: `RLLIB_PYTHON tools/peer_rllib_checkpoints.py mlp tf2 FOLDER`.
Writes `FOLDER/checkpoint` and `FOLDER/expected.npz`: observations, previous rewards, inputs of the
distribution, values and greedy actions, `[steps, rows, ...]` each, and critics' values of those.
Noisy networks act with their mean weights for it, which RLlib itself never does.
"""

import argparse
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import gymnasium as gym  # noqa: E402
from gymnasium import spaces  # noqa: E402
from ray.rllib.algorithms.dqn import DQNConfig  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.algorithms.sac import SACConfig  # noqa: E402
from ray.rllib.models.preprocessors import get_preprocessor  # noqa: E402
from ray.rllib.policy.sample_batch import SampleBatch  # noqa: E402

SMALL = {"fcnet_hiddens": [8, 6], "vf_share_layers": False}
VECTOR = spaces.Box(-5.0, 5.0, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (42, 42, 1), np.uint8)
FLOATS = spaces.Box(-2.0, 2.0, (2,), np.float32)
FILTERS = [[1, 4, 2], [1, 4, 2], [3, 11, 1]]
LSTM = {"use_lstm": True, "lstm_cell_size": 5, "max_seq_len": 5}
READS = {"lstm_use_prev_action": True, "lstm_use_prev_reward": True}
NESTED = spaces.Dict(b=spaces.Box(-1.0, 1.0, (2,)), a=spaces.Discrete(3))

DQN = {"algorithm": DQNConfig, "model": SMALL, "hiddens": [5]}
SAC = {
    "algorithm": SACConfig,
    "policy_model_config": {"fcnet_hiddens": [8, 6]},
    "q_model_config": {"fcnet_hiddens": [7], "fcnet_activation": "tanh"},
}

CASES: dict[str, dict[str, Any]] = {
    "mlp": {"model": SMALL, "observation_filter": "MeanStdFilter"},
    "cnn": {"obs": IMAGE, "model": {"conv_filters": FILTERS, "vf_share_layers": False}},
    "lstm": {"model": {"fcnet_hiddens": [6], **LSTM, **READS}},
    "shared": {"model": {**SMALL, "vf_share_layers": True}},
    "gaussian": {"act": FLOATS, "model": {**SMALL, "free_log_std": True}},
    "activated": {"model": {**SMALL, "no_final_linear": True, "vf_share_layers": True}},
    "posts": {"model": {**SMALL, "post_fcnet_hiddens": [5], "fcnet_activation": "relu"}},
    "nested": {"obs": NESTED, "act": spaces.MultiDiscrete([2, 3]), "model": SMALL},
    "cnn_posts": {
        "obs": IMAGE,
        "model": {"conv_filters": FILTERS, "post_fcnet_hiddens": [4, 5], "vf_share_layers": True},
    },
    "cnn_lstm": {
        "obs": IMAGE,
        "model": {
            "conv_filters": FILTERS,
            "post_fcnet_hiddens": [4],
            **LSTM,
            "vf_share_layers": True,
        },
    },
    "float_lstm": {"act": FLOATS, "model": {"fcnet_hiddens": [6], **LSTM, **READS}},
    "dqn": {**DQN, "observation_filter": "MeanStdFilter"},
    "dqn_rainbow": {**DQN, "num_atoms": 7, "noisy": True, "v_min": -3.0, "v_max": 3.0},
    "dqn_plain": {**DQN, "hiddens": [], "dueling": False},
    "dqn_parts": {**DQN, "obs": NESTED, "dueling": False, "model": {**SMALL, "fcnet_hiddens": []}},
    "dqn_shared": {**DQN, "model": {**SMALL, "vf_share_layers": True}},
    "dqn_posts": {**DQN, "model": {**SMALL, "post_fcnet_hiddens": [5]}},
    "dqn_cnn": {**DQN, "obs": IMAGE, "model": {"conv_filters": FILTERS}},
    "dqn_cnn_apart": {
        **DQN,
        "obs": IMAGE,
        "model": {"conv_filters": FILTERS, "vf_share_layers": False, "fcnet_hiddens": [6]},
    },
    "dqn_cnn_plain": {
        **DQN,
        "obs": IMAGE,
        "model": {"conv_filters": FILTERS},
        "hiddens": [],
        "dueling": False,
    },
    "sac": {**SAC, "act": FLOATS, "observation_filter": "MeanStdFilter"},
    "sac_single": {**SAC, "act": FLOATS, "twin_q": False, "normalize_actions": False},
    "sac_free": {**SAC, "act": FLOATS, "policy_model_config": {**SMALL, "free_log_std": True}},
    "sac_discrete": {**SAC, "obs": NESTED},
    "sac_cnn": {
        **SAC,
        "obs": IMAGE,
        "policy_model_config": {"conv_filters": FILTERS},
        "q_model_config": {"conv_filters": FILTERS, "post_fcnet_hiddens": [4]},
    },
}
"""By name: spaces, and settings."""

STEPS, ROWS = 20, 10


class Noise(gym.Env[Any, Any]):
    """Shows anything, for episodes of 20 steps."""

    def __init__(self, context: Any) -> None:
        self.observation_space, self.action_space = context["spaces"]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.now = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.now += 1
        ended = self.now == 20
        return self.observation_space.sample(), float(self.now % 3), ended, False, {}


def algorithm_of(case: str, framework: str) -> Any:
    """Returns an algorithm that has trained a little."""
    settings = dict(CASES[case])
    seen, acted = settings.pop("obs", VECTOR), settings.pop("act", spaces.Discrete(3))
    kind = settings.pop("algorithm", PPOConfig)
    config = kind().environment(
        Noise,
        env_config={"spaces": (seen, acted)},
        normalize_actions=settings.pop("normalize_actions", True),
    )
    config.framework(framework).rollouts(
        num_rollout_workers=0,
        rollout_fragment_length=40,
        observation_filter=settings.pop("observation_filter", "NoFilter"),
    )
    if kind is PPOConfig:
        settings |= {"sgd_minibatch_size": 20, "num_sgd_iter": 1}
    else:
        settings["num_steps_sampled_before_learning_starts"] = 0
    config.training(train_batch_size=40, lr=1e-3, **settings)
    config.debugging(seed=0, log_level="ERROR").experimental(_enable_new_api_stack=False)
    made = config.build()
    made.train()
    return made


def played(policy: Any, space: Any) -> dict[str, np.ndarray]:
    """Returns what a policy does in so many sequences, step by step."""
    space.seed(1)
    rng = np.random.default_rng(1)
    encoded = get_preprocessor(space)(space)
    state = [np.stack([part] * ROWS) for part in policy.get_initial_state()]
    action_shape = policy.action_space.shape
    actions = np.zeros((ROWS, *action_shape), policy.action_space.dtype)
    results: dict[str, list[Any]] = {}
    for _ in range(STEPS):
        shown = [space.sample() for _ in range(ROWS)]
        rewards = rng.normal(size=ROWS).astype(np.float32)
        batch = np.stack([filtered(policy, encoded.transform(obs)) for obs in shown])
        actions, state, extras = acted(policy, batch, state, actions, rewards)
        row = {"prev_rewards": rewards, "actions": actions}
        row |= {name: extras[name] for name in ("action_dist_inputs", "vf_preds") if name in extras}
        row |= valued(policy, batch, actions)
        named = shown[0] if isinstance(shown[0], dict) else {"": None}
        row |= {
            f"obs_{key}".rstrip("_"): np.stack([obs[key] if key else obs for obs in shown])
            for key in named
        }
        for name, value in row.items():
            results.setdefault(name, []).append(np.asarray(value))
    return {name: np.stack(values) for name, values in results.items()}


def valued(policy: Any, obs: Any, actions: Any) -> dict[str, np.ndarray]:
    """Returns what the critics of SAC, in eager mode, make of actions: `critic_values`."""
    model = policy.model
    if not hasattr(model, "get_twin_q_values") or policy.config["framework"] == "tf":
        return {}
    inputs = [obs.astype(np.float32)] + ([] if model.discrete else [actions])
    values = [model.get_q_values(*inputs)[0]]
    if model.twin_q_net:
        values.append(model.get_twin_q_values(*inputs)[0])
    stacked = np.stack(values, axis=-1)
    return {"critic_values": stacked if model.discrete else stacked[:, 0]}


def to_mean_weights(policy: Any) -> None:
    """Takes the noise from a policy's noisy layers."""
    weights, named = policy.get_weights(), [x.name for x in policy.variables()]
    keys = [*weights] if isinstance(weights, dict) else range(len(weights))
    for key, name in zip(keys, named, strict=True):
        weights[key] = weights[key] * ("_sigma_" not in name)
    policy.set_weights(weights)


def acted(policy: Any, obs: Any, state: Any, actions: Any, rewards: Any) -> Any:
    """Returns what a policy does; an eager one loses a memory that `compute_actions` is given."""
    if policy.config["framework"] == "tf":
        before = {"prev_action_batch": actions, "prev_reward_batch": rewards}
        return policy.compute_actions(obs, state, **before, explore=False)
    inputs = SampleBatch(obs=obs, prev_actions=actions, prev_rewards=rewards)
    for i, part in enumerate(state):
        inputs[f"state_in_{i}"] = part
    return policy.compute_actions_from_input_dict(inputs, explore=False)


def filtered(policy: Any, obs: Any) -> Any:
    """Returns an observation as the policy's connectors show it to the model."""
    for connector in policy.agent_connectors.connectors:
        if hasattr(connector, "filter"):
            obs = connector.filter(obs, update=False)
    return obs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("framework", choices=("tf", "tf2"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    algorithm = algorithm_of(options.case, options.framework)
    algorithm.save(str(options.folder / "checkpoint"))
    space = CASES[options.case].get("obs", VECTOR)
    if algorithm.config.get("noisy"):
        to_mean_weights(algorithm.get_policy())
    np.savez_compressed(options.folder / "expected.npz", **played(algorithm.get_policy(), space))
    print(json.dumps({"case": options.case, "framework": options.framework}))


if __name__ == "__main__":
    main()
