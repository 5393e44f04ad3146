"""tfpolicies' DQN, measured like its peer.

Run by `benchmarks.dqn`; by hand: `PYTHONPATH=. python benchmarks/ours_dqn.py learning --settings
'{...}'`.
"""

import time

import probe

probe.hush()

import tfpolicies  # noqa: E402
from tfpolicies import DQNConfig  # noqa: E402


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
            replay_buffer_config={"capacity": chosen["capacity"]},
            num_steps_sampled_before_learning_starts=chosen["learning_starts"],
            target_network_update_freq=chosen["target_interval"],
            grad_clip=chosen["grad_clip"],
            grad_clip_by="global_norm",
            double_q=False,
            dueling=False,
            hiddens=[],
            model={"fcnet_hiddens": chosen["hidden"], "fcnet_activation": "relu"},
        )
        .exploration(
            exploration_config={
                "final_epsilon": chosen["final_epsilon"],
                "epsilon_timesteps": chosen["epsilon_steps"],
            }
        )
        .reporting(min_sample_timesteps_per_iteration=0)
        .debugging(seed=request.seed, log_level="ERROR")
    )
    algo = config.build()

    def iterate() -> tuple[float, int]:
        result = algo.train()
        enough = result["episodes_total"] >= 100
        mean = result["episode_reward_mean"] if enough else float("nan")
        return mean, result["timesteps_total"]

    figures = probe.learning_figures(iterate, request, time.time())
    algo.stop()
    return figures


if __name__ == "__main__":
    probe.serve(
        ["tensorflow", "keras", "onnxruntime", "gymnasium", "numpy"],
        {"learning": learning},
        {"tfpolicies": tfpolicies.__version__},
    )
