"""Temporary."""
import numpy as np


class Exploration:
    key = ("StochasticSampling",)
    num_params = 0

    def __init__(self, dist_class):
        self.dist_class = dist_class
        self.noise_size = dist_class.noise_size

    def draw_noise(self, rng, rows, params):
        return self.dist_class.draw_noise(rng, rows)

    def apply(self, distribution, noise, params):
        actions = distribution.sample_leaves(noise)
        return actions, distribution.logp_leaves(actions)

    def params(self, timestep, explore):
        return np.zeros(0, np.float32)

    def state(self):
        return {}

    def set_state(self, state):
        pass


def make_exploration(config, dist_class, *, worker_index=0, num_workers=0):
    return Exploration(dist_class)
