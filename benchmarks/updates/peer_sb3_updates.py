"""Updates of Stable-Baselines3's SAC on given rows, from given weights, with actions without noise.

Run by `sac_updates` in the peer's interpreter: `peer_sb3_updates.py FILE [--together]`. Prints the
losses of each update as JSON. `--together` takes the gradients of actor and critics from the same
weights, as ours are, where Stable-Baselines3 updates the critics first.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import probe

probe.hush()

import gymnasium as gym  # noqa: E402
import torch  # noqa: E402
from stable_baselines3 import SAC  # noqa: E402
from stable_baselines3.common.logger import configure  # noqa: E402
from stable_baselines3.common.type_aliases import ReplayBufferSamples  # noqa: E402
from stable_baselines3.common.utils import polyak_update  # noqa: E402

torch.set_num_threads(1)
torch.distributions.Normal.rsample = lambda self, sample_shape=(): self.loc  # type: ignore[method-assign]

LOSSES = {"actor_loss": 1.0, "critic_loss": 0.5, "ent_coef_loss": 1.0}  # ours: critics' mean


def model_of(values: Any) -> SAC:
    """Returns the algorithm with given weights, and buffers that draw given rows."""
    result = json.loads(str(values["arguments"]))
    result["policy_kwargs"]["activation_fn"] = torch.nn.ReLU
    model = SAC("MlpPolicy", gym.make(str(values["env"])), device="cpu", seed=0, **result)
    epsilon = result["policy_kwargs"]["optimizer_kwargs"]["eps"]
    model.ent_coef_optimizer.param_groups[0]["eps"] = epsilon
    model.set_logger(configure(None, []))
    actor, size = model.actor, model.action_space.shape[0]
    linears = [x for x in actor.latent_pi if isinstance(x, torch.nn.Linear)]
    for i, linear in enumerate(linears):
        put(values, f"layer_{i}", linear)
    put(values, f"layer_{len(linears)}", actor.mu, slice(size))
    put(values, f"layer_{len(linears)}", actor.log_std, slice(size, None))
    for critic, suffix in zip(model.critic.q_networks, ("", "#1"), strict=True):
        for i, linear in enumerate(x for x in critic if isinstance(x, torch.nn.Linear)):
            put(values, f"critic/layer_{i}", linear, suffix=suffix)
    model.critic_target.load_state_dict(model.critic.state_dict())
    rows = iter(values["drawn"])
    model.replay_buffer = SimpleNamespace(sample=lambda n, env=None: samples(values, next(rows)))
    return model


def put(
    values: Any, layer: str, linear: Any, columns: slice = slice(None), suffix: str = ""
) -> None:
    """Puts the weights of a layer of ours into a linear one."""
    kernel, bias = (values[f"weights/{layer}/{role}{suffix}"] for role in ("kernel", "bias"))
    with torch.no_grad():
        linear.weight.copy_(torch.as_tensor(kernel[:, columns].T))
        linear.bias.copy_(torch.as_tensor(bias[columns]))


def samples(values: Any, drawn: np.ndarray) -> ReplayBufferSamples:
    """Returns rows as a replay buffer gives them."""
    columns = [np.float32(values[f"rows/{name}"][drawn]) for name in
               ("obs", "actions", "new_obs", "terminateds", "rewards")]  # fmt: skip
    columns[3:] = [x[:, None] for x in columns[3:]]
    return ReplayBufferSamples(*map(torch.as_tensor, columns))


def updated_together(model: SAC, rows: int) -> None:
    """Does an update whose critics move, and their targets, behind the actor's gradients."""
    critic, target = model.critic, model.critic_target
    step, parameters = critic.optimizer.step, list(critic.parameters())
    gradients: list[Any] = []
    before = {name: x.clone() for name, x in target.state_dict().items()}
    critic.optimizer.step = lambda: gradients.extend(x.grad.clone() for x in parameters)
    model.train(1, rows)
    target.load_state_dict(before)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    critic.optimizer.step = step
    step()
    polyak_update(critic.parameters(), target.parameters(), model.tau)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--together", action="store_true")
    options = parser.parse_args()
    data = np.load(options.file)
    model = model_of(data)
    losses = []
    for drawn in data["drawn"]:
        if options.together:
            updated_together(model, len(drawn))
        else:
            model.train(1, len(drawn))
        result = model.logger.name_to_value
        losses.append([float(result[f"train/{name}"]) * scale for name, scale in LOSSES.items()])
        result.clear()
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
