"""SBX's algorithms with weights as ours begin."""

from typing import Any

import jax
import numpy as np
import optax
import sbx


def model_of(algorithm: str, env: Any, arguments: dict[str, Any], seed: int) -> Any:
    """Returns an algorithm of SBX; `told` as for Stable-Baselines3."""
    network = arguments["policy_kwargs"]
    network["activation_fn"] = {"tanh": jax.nn.tanh, "relu": jax.nn.relu}[network["activation_fn"]]
    network["optimizer_class"] = optax.adam
    model = getattr(sbx, algorithm)("MlpPolicy", env, seed=seed, **arguments)
    rng = np.random.default_rng(seed)
    policy = model.policy
    policy.actor_state = _drawn(policy.actor_state, env.action_space.shape[0], rng)
    policy.qf_state = _drawn(policy.qf_state, 1, rng)
    return model


def _drawn(state: Any, outputs: int, rng: np.random.Generator) -> Any:
    """Returns a state with fresh weights, the same for its targets."""

    def draw(path: Any, old: Any) -> Any:
        if path[-1].key != "kernel":
            return np.zeros(old.shape, old.dtype)
        drawn = rng.standard_normal(old.shape, np.float32)
        norm = 0.01 if old.shape[-1] == outputs else 1.0
        return drawn * (norm / np.linalg.norm(drawn, axis=-2, keepdims=True))

    fresh = jax.tree.map(jax.numpy.asarray, jax.tree_util.tree_map_with_path(draw, state.params))
    targets = {"target_params": fresh} if hasattr(state, "target_params") else {}
    return state.replace(params=fresh, **targets)
