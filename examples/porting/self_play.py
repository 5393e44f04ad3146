"""Self-play with a league: "main" learns against frozen copies of itself, in the game of Nim.

    python examples/porting/self_play.py --win-rate-threshold 0.75

Written in the style of RLlib: a callback reads the win rate after each iteration; above the
threshold it adds a frozen copy of "main" and changes the mapping, so that the copy also plays.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np

from tfpolicies import DefaultCallbacks, MultiAgentEnv, Policy, PolicySpec, PPOConfig
from tfpolicies.compat import register_env

HEAP = 9


class Nim(MultiAgentEnv):
    """Two players take one to three sticks in turn; the player who takes the last one wins."""

    def __init__(self, config=None):
        super().__init__()
        self._agent_ids = {0, 1}
        self.observation_space = gym.spaces.Discrete(HEAP + 1)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.heap, self.player = int(self.np_random.integers(4, HEAP + 1)), 0
        return {self.player: self.heap}, {}

    def step(self, action_dict):
        self.heap = max(0, self.heap - 1 - int(action_dict[self.player]))
        mover, self.player = self.player, 1 - self.player
        over = self.heap == 0
        rewards = {mover: 1.0, self.player: -1.0} if over else {}
        obs = {0: self.heap, 1: self.heap} if over else {self.player: self.heap}
        return obs, rewards, {"__all__": over}, {"__all__": False}, {}


class RandomPolicy(Policy):
    """The first opponent: it plays uniformly random actions."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rng = np.random.default_rng(self.config["seed"])

    def compute_actions(self, obs_batch, state_batches=None, *args, **kwargs):
        return self.rng.integers(self.action_space.n, size=len(obs_batch)), [], {}

    def get_weights(self):
        return {}

    def set_weights(self, weights):
        pass


def play_against(opponents):
    """Returns a mapping of "main" to one agent, and of an opponent per episode to the other."""

    def policy_mapping_fn(agent_id, episode, worker, **kwargs):
        number = episode.episode_id
        return "main" if number % 2 == agent_id else opponents[number // 2 % len(opponents)]

    return policy_mapping_fn


class SelfPlayCallback(DefaultCallbacks):
    """Adds a frozen copy of "main" whenever it wins often enough."""

    win_rate_threshold = 0.75

    def __init__(self):
        super().__init__()
        self.opponents = ["random"]

    def on_train_result(self, *, algorithm, result, **kwargs):
        rewards = np.array(result["hist_stats"]["policy_main_reward"])
        win_rate = float((rewards > 0).mean())
        result["win_rate"] = win_rate
        result["league_size"] = len(self.opponents) + 1
        if win_rate <= self.win_rate_threshold:
            return
        new_id = f"main_v{len(self.opponents)}"
        self.opponents = [*self.opponents, new_id]
        main_policy = algorithm.get_policy("main")
        new_policy = algorithm.add_policy(
            policy_id=new_id,
            policy_cls=type(main_policy),
            policy_mapping_fn=play_against(self.opponents),
        )
        new_policy.set_state(main_policy.get_state())
        algorithm.workers.sync_weights()  # updates the copies in other processes, if any


def main(iterations: int = 15, win_rate_threshold: float = 0.75) -> dict[str, float]:
    register_env("nim", lambda config: Nim(config))
    SelfPlayCallback.win_rate_threshold = win_rate_threshold
    config = (
        PPOConfig()
        .environment("nim")
        .callbacks(SelfPlayCallback)
        .rollouts(num_rollout_workers=0, num_envs_per_worker=8)
        .training(lr=3e-3, train_batch_size=800, num_sgd_iter=6, model={"fcnet_hiddens": [32]})
        .multi_agent(
            policies={"main": PolicySpec(), "random": PolicySpec(policy_class=RandomPolicy)},
            policy_mapping_fn=play_against(["random"]),
            policies_to_train=["main"],
        )
        .reporting(metrics_num_episodes_for_smoothing=1)  # win rates only of the last iteration
        .debugging(seed=0)
    )
    algo = config.build()
    for i in range(iterations):
        result = algo.train()
        print(
            f"iteration {i + 1}: main wins {result['win_rate']:.0%} against "
            f"{result['league_size'] - 1} opponent(s)"
        )
    for sticks in range(1, HEAP + 1):
        action = algo.compute_single_action(sticks, policy_id="main", explore=False)
        print(f"{sticks} left: main takes {min(sticks, int(action) + 1)}")
    summary = {"win_rate": result["win_rate"], "league_size": result["league_size"]}
    algo.stop()
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop-iters", type=int, default=15)
    parser.add_argument("--win-rate-threshold", type=float, default=0.75)
    args = parser.parse_args()
    main(args.stop_iters, args.win_rate_threshold)
