"""A custom `Policy` in a `RolloutWorker`: tabular Q-learning, in NumPy.

    python examples/porting/hand_written_policy.py

learns FrozenLake-v1, and prints the share of episodes that reach the goal.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np

from tfpolicies import Policy, RolloutWorker, SampleBatch


class TabularQPolicy(Policy):
    """Q-learning (Watkins 1989): Q(s, a) += lr * (r + gamma * max Q(s', .) - Q(s, a))."""

    def __init__(self, observation_space, action_space, config):
        super().__init__(observation_space, action_space, config)
        self.q = np.zeros((observation_space.n, action_space.n))
        self.rng = np.random.default_rng(config["seed"])
        self.epsilon = 1.0

    def compute_actions(self, obs_batch, state_batches=None, *args, explore=None, **kwargs):
        values = self.q[obs_batch]
        best = np.argmax(values + 1e-6 * self.rng.random(values.shape), axis=-1)
        if explore is False:
            return best, [], {}
        random = self.rng.integers(self.action_space.n, size=len(best))
        return np.where(self.rng.random(len(best)) < self.epsilon, random, best), [], {}

    def learn_on_batch(self, samples):
        errors = []
        for row in samples.rows():
            after = 0.0 if row[SampleBatch.TERMINATEDS] else self.q[row["new_obs"]].max()
            at = row[SampleBatch.OBS], row[SampleBatch.ACTIONS]
            error = row[SampleBatch.REWARDS] + self.config["gamma"] * after - self.q[at]
            self.q[at] += self.config["lr"] * error
            errors.append(error)
        self.epsilon = max(0.1, 0.95 * self.epsilon)
        return {"learner_stats": {"mean_td_error": float(np.mean(np.abs(errors)))}}

    def get_weights(self):
        return {"q": self.q.copy()}

    def set_weights(self, weights):
        self.q[:] = weights["q"]


def main(iterations: int = 60) -> float:
    worker = RolloutWorker(
        env_creator=lambda env_context: gym.make("FrozenLake-v1", is_slippery=False),
        default_policy_class=TabularQPolicy,
        config={
            "num_envs_per_worker": 4,
            "rollout_fragment_length": 50,
            "lr": 0.5,
            "gamma": 0.95,
            "seed": 0,
        },
    )
    for i in range(iterations):
        batch = worker.sample()
        stats = worker.learn_on_batch(batch)["default_policy"]["learner_stats"]
        episodes = worker.get_metrics()
        if (i + 1) % 10 == 0:
            reached = np.mean([episode.episode_reward for episode in episodes])
            error = stats["mean_td_error"]
            print(f"{(i + 1) * batch.count} steps: {reached:.0%} there, TD error {error:.4f}")
    worker.get_policy().epsilon = 0.0
    worker.sample()  # completes episodes that began with exploration
    worker.get_metrics()
    worker.sample()
    share = float(np.mean([episode.episode_reward for episode in worker.get_metrics()]))
    print(f"without exploration: {share:.0%} there")
    worker.stop()
    return share


if __name__ == "__main__":
    main()
