"""Stable-Baselines3's DQN (torch, CPU, one thread) in its own interpreter.

Run by `benchmarks.learning.dqn`; by hand: `SB3_PYTHON benchmarks/learning/peer_sb3_dqn.py learning
--settings '{...}'`.
"""

import time

from benchmarks import probe

probe.hush()

import torch  # noqa: E402
from stable_baselines3 import DQN  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402

torch.set_num_threads(1)


def learning(request: probe.Request) -> probe.Figures:
    chosen = request.settings
    model = DQN(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=chosen["num_envs"], seed=request.seed),
        learning_rate=chosen["lr"],
        gamma=chosen["gamma"],
        batch_size=chosen["batch"],
        train_freq=chosen["train_freq"],
        gradient_steps=chosen["gradient_steps"],
        buffer_size=chosen["capacity"],
        learning_starts=chosen["learning_starts"],
        target_update_interval=chosen["target_interval"],
        max_grad_norm=chosen["grad_clip"],
        exploration_fraction=chosen["epsilon_steps"] / chosen["max_steps"],
        exploration_final_eps=chosen["final_epsilon"],
        policy_kwargs={"net_arch": chosen["hidden"]},
        seed=request.seed,
        device="cpu",
    )
    evaluated = make_vec_env("CartPole-v1", n_envs=chosen["episodes"], seed=request.seed + 10_000)
    _, callback = model._setup_learn(chosen["max_steps"])

    def iterate() -> tuple[float, int]:
        """Some rounds of the loop in `OffPolicyAlgorithm.learn`, then greedy episodes."""
        for _ in range(chosen["rounds"]):
            model.collect_rollouts(
                model.env,
                callback,
                model.train_freq,
                model.replay_buffer,
                learning_starts=model.learning_starts,
            )
            if model.num_timesteps > model.learning_starts:
                model.train(batch_size=model.batch_size, gradient_steps=chosen["gradient_steps"])
        mean, _ = evaluate_policy(model, evaluated, chosen["episodes"], deterministic=True)
        return float(mean), model.num_timesteps

    return probe.learning_figures(iterate, request, time.time())


if __name__ == "__main__":
    probe.serve(
        ["stable-baselines3", "torch", "gymnasium", "numpy"],
        {"learning": learning},
    )
