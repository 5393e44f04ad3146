"""Stable-Baselines3's PPO on a robot (torch, CPU, one thread) in its own interpreter.

Run by `benchmarks.learning.robot`; by hand: `SB3_PYTHON benchmarks/learning/peer_sb3_robot.py
training --variant envpool --settings '{...}'`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import probe

probe.hush()

import torch  # noqa: E402
from stable_baselines3 import PPO  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.vec_env import VecEnv  # noqa: E402

torch.set_num_threads(1)


class EnvPoolVecEnv(VecEnv):
    """EnvPool's environments as Stable-Baselines3 steps them.

    The step behind the end of an episode only resets, in EnvPool; here it is done at once, so that
    the last observation is in `infos` and the first one of the next episode is returned.
    """

    def __init__(self, name: str, num_envs: int, seed: int) -> None:
        import envpool

        self.pool = envpool.make(
            name, env_type="gymnasium", num_envs=num_envs, num_threads=1, seed=seed
        )
        super().__init__(num_envs, self.pool.observation_space, self.pool.action_space)
        self.returns = np.zeros(num_envs)

    def reset(self) -> np.ndarray:
        return self.pool.reset()[0]

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        obs, rewards, terminated, truncated, _ = self.pool.step(self.actions)
        dones = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self.returns += rewards
        if dones.any():
            ended = np.flatnonzero(dones)
            for i in ended:
                infos[i] = {
                    "terminal_observation": obs[i].copy(),
                    "TimeLimit.truncated": bool(truncated[i] and not terminated[i]),
                    "episode": {"r": self.returns[i], "l": 0, "t": 0.0},
                }
            self.returns[ended] = 0.0
            obs[ended] = self.pool.reset(ended)[0]
        return obs, rewards, dones, infos

    def close(self) -> None:
        self.pool.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.pool, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(attr_name)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Sequence[bool]:
        return [False] * self.num_envs


def training(request: probe.Request) -> probe.Figures:
    chosen = request.settings
    name, count = chosen["env"], chosen["num_envs"]
    if request.variant == "gymnasium":
        env: Any = make_vec_env(name, n_envs=count, seed=request.seed)
    else:
        env = EnvPoolVecEnv(name, count, request.seed)
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=chosen["fragment"],
        batch_size=chosen["minibatch"],
        n_epochs=chosen["epochs"],
        learning_rate=chosen["lr"],
        gamma=chosen["gamma"],
        gae_lambda=chosen["lambda"],
        clip_range=chosen["clip"],
        max_grad_norm=chosen["grad_clip"],
        vf_coef=chosen["vf_loss_coeff"],
        policy_kwargs={"net_arch": chosen["hidden"], "activation_fn": torch.nn.Tanh},
        seed=request.seed,
        device="cpu",
    )
    _, callback = model._setup_learn(10**9)

    def iterate() -> int:
        """The body of the loop in `PPO.learn`, without logging."""
        model.collect_rollouts(model.env, callback, model.rollout_buffer, chosen["fragment"])
        model.train()
        return chosen["fragment"] * count

    return {"training": probe.rate(iterate, request.seconds)}


if __name__ == "__main__":
    probe.serve(
        ["stable-baselines3", "torch", "gymnasium", "envpool", "mujoco", "numpy"],
        {"training": training},
    )
