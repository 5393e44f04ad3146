"""Small policies and batches that several test files share."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies import PGTF1Policy, PGTF2Policy, PPOTF1Policy, PPOTF2Policy, SampleBatch

OBS = spaces.Box(-1.0, 1.0, (3,), np.float32)
TWO = spaces.Discrete(2)
PLANE = spaces.Box(-1.0, 1.0, (2,), np.float32)
GRAPH_CLASSES = {PPOTF2Policy: PPOTF1Policy, PGTF2Policy: PGTF1Policy}


def make(
    policy_class: Any = PPOTF2Policy, obs: Any = OBS, actions: Any = TWO, **config: Any
) -> Any:
    """Makes a policy of one hidden layer that acts through TensorFlow and learns without XLA.

    `inference="session"` makes the same policy in graph mode.
    """
    if config.get("inference") == "session":
        policy_class, config["inference"] = GRAPH_CLASSES[policy_class], "tf"
    quick = {"seed": 0, "inference": "tf", "jit_compile": False, "model": {"fcnet_hiddens": [4]}}
    return policy_class(obs, actions, {**quick, **config})


def rows_of(space: Any, rows: int, seed: int = 0) -> Any:
    """Returns a batch of random elements of a space, nested as the space is."""
    if isinstance(space, spaces.Dict):
        return {key: rows_of(part, rows, seed + i) for i, (key, part) in enumerate(space.items())}
    if isinstance(space, spaces.Tuple):
        return tuple(rows_of(part, rows, seed + i) for i, part in enumerate(space))
    if isinstance(space, spaces.Box) and space.dtype == np.float32:
        return np.random.default_rng(seed).normal(size=(rows, *space.shape)).astype(np.float32)
    space.seed(seed)
    return np.stack([np.asarray(space.sample()) for _ in range(rows)])


def trajectory(policy: Any, rows: int, seed: int = 0, *, terminated: bool = True) -> SampleBatch:
    """Returns one trajectory as a sampler would record it, before postprocessing."""
    rng = np.random.default_rng(seed)
    before = policy.get_state()["rng"]
    acting = policy.compute_actions(rows_of(policy.observation_space, rows, seed), explore=True)
    generator = policy.driver.acting.state.rng.bit_generator
    generator.state = before  # the batch leaves the policy's noise alone
    ends = np.zeros(rows, bool)
    ends[-1] = terminated
    return SampleBatch(
        obs=rows_of(policy.observation_space, rows, seed),
        new_obs=rows_of(policy.observation_space, rows, seed + 1),
        actions=acting.actions,
        rewards=rng.normal(size=rows).astype(np.float32),
        terminateds=ends,
        truncateds=np.zeros(rows, bool),
        **acting.extras,
    )


def varied(policy: Any, seed: int = 1) -> Any:
    """Gives a policy weights with which what it does depends on all of its inputs."""
    rng = np.random.default_rng(seed)
    weights = policy.get_weights()
    policy.set_weights({k: w + 0.4 * rng.normal(size=w.shape) for k, w in weights.items()})
    return policy


def batch_for(policy: Any, rows: int, seed: int = 0) -> SampleBatch:
    """Returns a postprocessed train batch of `rows` rows."""
    return policy.postprocess_trajectory(trajectory(policy, rows, seed))


def assert_equal(left: Any, right: Any) -> None:
    """Asserts that two dicts of arrays are equal to the bit."""
    assert list(left) == list(right)
    for key in left:
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


def assert_close(left: Any, right: Any, atol: float) -> None:
    """Asserts that two dicts of arrays are equal within `atol`."""
    assert list(left) == list(right)
    for key in left:
        np.testing.assert_allclose(left[key], right[key], rtol=0, atol=atol, err_msg=key)
