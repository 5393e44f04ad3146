"""tfpolicies' DQN, measured like its peer.

Run by `benchmarks.learning.dqn`; by hand: `PYTHONPATH=. python benchmarks/learning/ours_dqn.py
learning --settings '{...}'`.
"""

import time
from typing import Any

from benchmarks import probe

probe.hush()

import keras  # noqa: E402

import tfpolicies  # noqa: E402
from tfpolicies import DQNConfig  # noqa: E402


def like_torch(space: Any, num_outputs: int, hidden: list[int]) -> keras.Model:
    """Returns a network whose weights are drawn as torch draws those of its linear layers."""
    inputs = x = keras.Input(space.shape)
    width = space.shape[0]
    for i, units in enumerate([*hidden, num_outputs]):
        kernel = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
        bias = keras.initializers.RandomUniform(-(width**-0.5), width**-0.5)
        activation = "relu" if i < len(hidden) else None
        x = keras.layers.Dense(units, activation, True, kernel, bias)(x)
        width = units
    return keras.Model(inputs, x)


def learning(request: probe.Request) -> probe.Figures:
    chosen = request.settings
    rows, updates = chosen["train_freq"] * chosen["num_envs"], chosen["gradient_steps"]
    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .rollouts(
            num_envs_per_worker=chosen["num_envs"], rollout_fragment_length=chosen["train_freq"]
        )
        .training(
            lr=chosen["lr"],
            gamma=chosen["gamma"],
            train_batch_size=chosen["batch"],
            training_intensity=updates * chosen["batch"] / rows,
            replay_buffer_config={
                "type": "MultiAgentReplayBuffer",
                "capacity": chosen["capacity"],
            },
            num_steps_sampled_before_learning_starts=chosen["learning_starts"],
            target_network_update_freq=chosen["target_interval"],
            grad_clip=chosen["grad_clip"],
            grad_clip_by="global_norm",
            double_q=False,
            dueling=False,
            hiddens=[],
            model={
                "custom_model": like_torch,
                "custom_model_config": {"hidden": chosen["hidden"]},
            },
        )
        .exploration(
            exploration_config={
                "final_epsilon": chosen["final_epsilon"],
                "epsilon_timesteps": chosen["epsilon_steps"],
            }
        )
        .reporting(min_sample_timesteps_per_iteration=0)
        .evaluation(evaluation_duration=chosen["episodes"], evaluation_config={"explore": False})
        .debugging(seed=request.seed, log_level="ERROR")
    )
    algo = config.build()

    def iterate() -> tuple[float, int]:
        """Some rounds of training, then greedy episodes."""
        for _ in range(chosen["rounds"]):
            steps = algo.train()["timesteps_total"]
        return algo.evaluate()["evaluation"]["episode_reward_mean"], steps

    figures = probe.learning_figures(iterate, request, time.time())
    algo.stop()
    return figures


if __name__ == "__main__":
    probe.serve(
        ["tensorflow", "keras", "onnxruntime", "gymnasium", "numpy"],
        {"learning": learning},
        {"tfpolicies": tfpolicies.__version__},
    )
