"""An environment, transitions, weights and updates for tests of algorithms with critics."""

from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from helpers.factories import assert_close, rows_of
from tfpolicies import SampleBatch


class AimEnv(gym.Env):
    """One step: the closer the action is to the observation, the better."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.aim = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.aim, {}

    def step(self, action):
        reward = -abs(float(action[0]) - float(self.aim[0]))
        return self.aim, reward, True, False, {}

    def get_state(self):
        return {"aim": self.aim, "rng": self.np_random.bit_generator.state}

    def set_state(self, state):
        self.aim = np.asarray(state["aim"], np.float32)
        self.np_random.bit_generator.state = state["rng"]


def shaken(policy, seed=1):
    """Gives all networks weights that matter, and targets others; returns the policy."""
    rng = np.random.default_rng(seed)
    state = policy.get_state()
    for part in ("weights", "target_weights"):
        state[part] = {
            key: (w + 0.4 * rng.normal(size=w.shape)).astype(np.float32)
            for key, w in state[part].items()
        }
    policy.set_state(state)
    return policy


def transitions(policy, rows=6, seed=0):
    """Returns random transitions, the last third of them terminated."""
    rng = np.random.default_rng(seed)
    space, actions = policy.observation_space, policy.action_space
    return SampleBatch(
        obs=rows_of(space, rows, seed),
        new_obs=rows_of(space, rows, seed + 100),
        actions=rng.integers(actions.n, size=rows)
        if isinstance(actions, spaces.Discrete)
        else rng.uniform(-1, 1, (rows, *actions.shape)).astype(np.float32),
        rewards=rng.normal(scale=2.0, size=rows).astype(np.float32),
        terminateds=np.arange(rows) >= rows - rows // 3,
        weights=np.linspace(0.5, 1.5, rows).astype(np.float32),
    )


def mlp(weights, x):
    """Returns what rectified layers and a linear one give, `weights` being kernels and biases."""
    for i in range(0, len(weights), 2):
        x = x @ weights[i] + weights[i + 1]
        if i < len(weights) - 2:
            x = np.maximum(x, 0)
    return x


def assert_updates_agree(together, apart):
    """Asserts that five updates in one call give what five calls of one update give.

    The two policies must be equal. Targets move after each update but the second.
    """
    batch, moves_targets = transitions(together, 20), np.array([True, False, True, True, True])
    together.driver.learning.replay(batch, 4, moves_targets)
    for i, start in enumerate(range(0, 20, 4)):
        apart.driver.learning.replay(batch[start : start + 4], 4, moves_targets[i : i + 1])
    assert together.num_grad_updates == apart.num_grad_updates == 5
    assert together.program.functions.traces["learn_epochs"] == 1
    left, right = together.get_state(), apart.get_state()
    for part in ("weights", "target_weights"):
        assert_close(left[part], right[part], 2e-5)
    assert left.get("learning_rng") == right.get("learning_rng")


def measure_weight_files(export_dir: Path) -> list[int]:
    """Returns the bytes of each file of weights in an export; asserts that there is one."""
    sizes = [
        path.stat().st_size
        for path in export_dir.rglob("*")
        if path.is_file() and (path.name.startswith("variables.data") or path.suffix == ".onnx")
    ]
    assert sizes
    return sizes
