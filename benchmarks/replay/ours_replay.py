"""tfpolicies' SAC and DQN, a training step at a time, measured like their peers.

Run by `benchmarks.replay.training_steps`; by hand: `PYTHONPATH=. python
benchmarks/replay/ours_replay.py sac`, then a number of steps per line.
"""

from collections.abc import Callable
from typing import Any

from benchmarks import probe

probe.hush()

from tfpolicies import DQNConfig, SACConfig  # noqa: E402

FIRST = 1000


def sac(seed: int, updates: int = 1) -> Callable[[int], None]:
    """Returns what does steps of Pendulum-v1, each with so many updates of 256 rows."""
    network = {"fcnet_hiddens": [256, 256], "fcnet_activation": "relu"}
    config = SACConfig().environment("Pendulum-v1")
    config.rollouts(num_envs_per_worker=1, rollout_fragment_length=1).training(
        model=network,
        q_model_config=network,
        train_batch_size=256,
        training_intensity=256 * updates,
        replay_buffer_config={"type": "MultiAgentReplayBuffer", "capacity": 100_000},
        num_steps_sampled_before_learning_starts=FIRST,
        target_network_update_freq=0,
    )
    return _runs(config, seed)


def dqn(seed: int) -> Callable[[int], None]:
    """Returns what does steps of CartPole-v1 with the Zoo's settings: 256, then 128 updates."""
    config = DQNConfig().environment("CartPole-v1")
    config.rollouts(num_envs_per_worker=1, rollout_fragment_length=256).training(
        lr=2.3e-3,
        train_batch_size=64,
        training_intensity=32,
        replay_buffer_config={"type": "MultiAgentReplayBuffer", "capacity": 100_000},
        num_steps_sampled_before_learning_starts=FIRST,
        target_network_update_freq=10,
        grad_clip=10.0,
        grad_clip_by="global_norm",
        double_q=False,
        dueling=False,
        hiddens=[],
        model={"fcnet_hiddens": [256, 256], "fcnet_activation": "relu"},
    )
    return _runs(config, seed)


def _runs(config: Any, seed: int) -> Callable[[int], None]:
    config.reporting(min_time_s_per_iteration=None, min_sample_timesteps_per_iteration=256)
    algorithm = config.debugging(seed=seed, log_level="ERROR").build()
    done = algorithm.counters

    def run(steps: int) -> None:
        end = done["num_env_steps_sampled"] + steps
        while done["num_env_steps_sampled"] < end:
            algorithm.train()

    run(FIRST + 256)
    return run


if __name__ == "__main__":
    probe.serve_stretches(
        ["tensorflow", "keras", "onnxruntime", "gymnasium", "numpy"],
        {"sac": sac, "sac8": lambda seed: sac(seed, 8), "dqn": dqn},
    )
