"""Stable-Baselines3's and SBX's side of the learning benchmark: one cell in its own process.

Run by `benchmarks.learning.run_cells` in the peer's interpreter, with the request as JSON. Weights
begin as ours do, unless `own_weights` are asked for, and Adam has the same epsilon.
"""

import argparse
import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import probe
from benchmarks.learning import greedy, peer_settings

probe.hush()

import gymnasium as gym  # noqa: E402
import stable_baselines3  # noqa: E402
import torch  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.noise import NormalActionNoise  # noqa: E402
from stable_baselines3.common.vec_env import VecNormalize  # noqa: E402

torch.set_num_threads(1)

POINTS = 50  # of a curve
_PACKAGES = {
    "sb3": ("stable-baselines3", "torch", "gymnasium", "numpy"),
    "sbx": ("sbx-rl", "stable-baselines3", "jax", "gymnasium", "numpy"),
}


class Curve(BaseCallback):
    """Notes the mean return of the last 100 training episodes."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.every = steps / POINTS
        self.points: list[tuple[float, float]] = []

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.every * (len(self.points) + 1):
            ended = [episode["r"] for episode in self.model.ep_info_buffer]
            self.points.append((self.num_timesteps, float(np.mean(ended)) if ended else np.nan))
        return True


def trained(request: dict[str, Any], library: str) -> dict[str, Any]:
    """Trains and plays greedy episodes."""
    model = model_of(request, library)
    curve = Curve(request["steps"])
    clock, cpu = time.perf_counter(), time.process_time()
    model.learn(request["steps"], callback=curve)
    wall, used = time.perf_counter() - clock, time.process_time() - cpu
    normaliser = model.get_vec_normalize_env()

    def act(obs: Any) -> Any:
        seen = obs if normaliser is None else normaliser.normalize_obs(obs)
        return model.predict(seen, deterministic=True)[0]

    returns = greedy.returns_of(gym.make(request["env"]), act)
    return {"wall_seconds": wall, "cpu_seconds": used, "curve": curve.points, "returns": returns}


def model_of(request: dict[str, Any], library: str) -> Any:
    """Returns the peer's algorithm, with weights as ours begin."""
    algorithm, settings = request["algorithm"], request["settings"]
    arguments = peer_settings.arguments(algorithm, settings, request["steps"])
    env = make_vec_env(
        request["env"], n_envs=settings.get("num_envs_per_worker", 1), seed=request["seed"]
    )
    if normalised := peer_settings.normalised(settings):
        env = VecNormalize(env, gamma=settings["gamma"], **normalised)
    if isinstance(arguments["learning_rate"], list):
        arguments["learning_rate"] = _falling(arguments["learning_rate"], request["steps"])
    if "action_noise" in arguments:
        size = np.full(env.action_space.shape, arguments["action_noise"])
        arguments["action_noise"] = NormalActionNoise(np.zeros_like(size), size)
    if library == "sbx":
        import peer_sbx_weights as weights

        return weights.model_of(algorithm, env, arguments, request["seed"])
    kinds = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "RMSprop": torch.optim.RMSprop}
    network = arguments["policy_kwargs"]
    for name in ("activation_fn", "optimizer_class"):
        if name in network:
            network[name] = kinds[network[name]]
    make = getattr(stable_baselines3, algorithm)
    model = make("MlpPolicy", env, seed=request["seed"], device="cpu", **arguments)
    if not (peer_settings.is_orthogonal(settings) or request["own_weights"]):
        draw_weights(model.policy, request["seed"])
    if algorithm == "SAC":  # which the arguments do not reach
        model.ent_coef_optimizer.param_groups[0]["eps"] = network["optimizer_kwargs"]["eps"]
    return model


def _falling(points: list[list[float]], steps: int) -> Any:
    """Returns the learning rate as a function of the share of steps that is left."""
    at, rates = zip(*points, strict=True)
    return lambda left: float(np.interp((1 - left) * steps, at, rates))


def draw_weights(policy: torch.nn.Module, seed: int) -> None:
    """Draws kernels with columns of one norm, 0.01 for outputs and 1 elsewhere; biases are 0."""
    generator = torch.Generator().manual_seed(seed)
    layers = {name: x for name, x in policy.named_modules() if isinstance(x, torch.nn.Linear)}
    with torch.no_grad():
        for name, layer in layers.items():
            torch.nn.init.normal_(layer.weight, generator=generator)
            norm = 0.01 if _is_output(name, list(layers)) else 1.0
            layer.weight.mul_(norm / layer.weight.norm(dim=1, keepdim=True))
            torch.nn.init.zeros_(layer.bias)
    for name, module in policy.named_children():
        if f"{name}_target" in dict(policy.named_children()):
            getattr(policy, f"{name}_target").load_state_dict(module.state_dict())


def _is_output(name: str, names: list[str]) -> bool:
    """Whether a layer is the last one of its network: a head, or the last of its `Sequential`."""
    if "mlp_extractor" in name or "latent" in name:
        return False
    network, _, place = name.rpartition(".")
    if not place.isdigit():
        return True
    rest = [int(n.rpartition(".")[2]) for n in names if n.rpartition(".")[0] == network]
    return int(place) == max(rest)


def main() -> None:
    """Trains the cell that the command line names and prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("request", type=json.loads)
    parser.add_argument("--folder", type=Path, help="unused: nothing is kept")
    parser.add_argument("--library", choices=sorted(_PACKAGES), default="sb3")
    options = parser.parse_args()
    figures = trained(options.request, options.library)
    versions = {name: metadata.version(name) for name in _PACKAGES[options.library]}
    json.dump({**figures, "versions": versions}, sys.stdout)


if __name__ == "__main__":
    main()
