"""Stable-Baselines3's PPO (torch, CPU, one thread) in its own interpreter.

Run by `main_job`; by hand: `SB3_PYTHON benchmarks/overview/peer_sb3.py acting`.
"""

import time
from typing import Any

import numpy as np

from benchmarks import probe

probe.hush()

import torch  # noqa: E402
from stable_baselines3 import PPO  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402

torch.set_num_threads(1)


def _build(num_envs: int, n_steps: int = probe.FRAGMENT, **options: Any) -> PPO:
    """Returns a PPO with 2x64 tanh networks on CartPole, ready for `collect_rollouts`."""
    settings = {"batch_size": probe.MINIBATCH, "n_epochs": probe.EPOCHS, "seed": 0} | options
    env = make_vec_env("CartPole-v1", n_envs=num_envs, seed=settings["seed"])
    network = {"net_arch": probe.HIDDEN, "activation_fn": torch.nn.Tanh}
    return PPO("MlpPolicy", env, n_steps=n_steps, device="cpu", policy_kwargs=network, **settings)


def acting(request: probe.Request) -> probe.Figures:
    policy = _build(1).policy

    def figure(batch: int) -> float:
        obs = probe.observations(batch)
        return probe.microseconds(lambda: policy.predict(obs), request.seconds)

    return {str(batch): figure(batch) for batch in probe.BATCH_SIZES}


def sampling(request: probe.Request) -> probe.Figures:
    def figure(num_envs: int) -> float:
        model = _build(num_envs, batch_size=probe.FRAGMENT)
        _, callback = model._setup_learn(10**9)

        def rollout() -> int:
            model.collect_rollouts(
                model.env, callback, model.rollout_buffer, n_rollout_steps=probe.FRAGMENT
            )
            return probe.FRAGMENT * num_envs

        return probe.rate(rollout, request.seconds)

    return {str(num_envs): figure(num_envs) for num_envs in probe.ENV_COUNTS}


def update(request: probe.Request) -> probe.Figures:
    num_envs = 8
    model = _build(num_envs, probe.ROWS // num_envs)
    model._setup_learn(10**9)

    def one() -> float:
        _fill(model.rollout_buffer, num_envs)
        before = time.perf_counter()
        model.train()
        return time.perf_counter() - before

    return probe.update_figures(one, request.seconds)


def _fill(buffer: Any, num_envs: int) -> None:
    """Puts the rows that all contestants learn from into SB3's `[steps, envs]` arrays."""
    rows = probe.training_rows()
    names = {
        "observations": "obs",
        "actions": "actions",
        "rewards": "rewards",
        "values": "vf_preds",
        "log_probs": "action_logp",
        "advantages": "advantages",
        "returns": "value_targets",
    }
    buffer.reset()
    for theirs, name in names.items():
        array = getattr(buffer, theirs)
        array[...] = rows[name].reshape(-1, num_envs, *array.shape[2:])
    buffer.full = True


def learning(request: probe.Request) -> probe.Figures:
    chosen = request.settings
    model = _build(
        chosen["num_envs"],
        chosen["fragment"],
        batch_size=chosen["minibatch"],
        n_epochs=chosen["epochs"],
        learning_rate=chosen["lr"],
        gamma=chosen["gamma"],
        gae_lambda=chosen["lambda"],
        clip_range=chosen["clip"],
        ent_coef=chosen["entropy_coeff"],
        vf_coef=chosen["vf_loss_coeff"],
        max_grad_norm=chosen["grad_clip"],
        seed=request.seed,
    )
    _, callback = model._setup_learn(chosen["max_steps"])

    def iterate() -> tuple[float, int]:
        """The body of the loop in `PPO.learn`, without logging."""
        model.collect_rollouts(model.env, callback, model.rollout_buffer, chosen["fragment"])
        model._update_current_progress_remaining(model.num_timesteps, chosen["max_steps"])
        model.train()
        returns = [episode["r"] for episode in model.ep_info_buffer]
        return (np.mean(returns) if len(returns) == 100 else np.nan), model.num_timesteps

    return probe.learning_figures(iterate, request, time.time())


if __name__ == "__main__":
    probe.serve(
        ["stable-baselines3", "torch", "gymnasium", "numpy"],
        {"acting": acting, "sampling": sampling, "update": update, "learning": learning},
    )
