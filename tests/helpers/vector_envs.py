"""Environments in the form of RLlib's `VectorEnv`."""

from __future__ import annotations

from helpers.environments import CountingEnv
from tfpolicies.compat import VectorEnv


class Counting(VectorEnv):
    """Counts in three environments, and records the calls of its methods."""

    kind = CountingEnv

    def __init__(self, context=None):
        self.parts = [self.kind(number) for number in range(3)]
        self.calls = []
        super().__init__(self.kind.observation_space, self.kind.action_space, 3)

    def vector_reset(self, *, seeds=None, options=None):
        self.calls.append(("vector_reset", seeds))
        results = [env.reset() for env in self.parts]
        return [obs for obs, _ in results], [info for _, info in results]

    def reset_at(self, index, *, seed=None, options=None):
        self.calls.append(("reset_at", index))
        return self.parts[index].reset(seed=seed, options=options)

    def restart_at(self, index):
        self.calls.append(("restart_at", index))
        self.parts[index] = self.kind(index + 10)

    def vector_step(self, actions):
        self.calls.append(("vector_step", len(actions)))
        results = [env.step(action) for env, action in zip(self.parts, actions, strict=True)]
        return tuple(list(part) for part in zip(*results, strict=True))

    def get_sub_environments(self):
        return self.parts
