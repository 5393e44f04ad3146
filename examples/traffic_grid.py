"""A town of crossing ring roads with cars and traffic lights: the world behind `traffic.py`.

It knows NumPy only, so that other frameworks can play in the same town.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

CAR_SPACE = gym.spaces.Box(0.0, 1.0, (5,), np.float32)
LIGHT_SPACE = gym.spaces.Box(0.0, 1.0, (4,), np.float32)
STAY_OR_GO = gym.spaces.Discrete(2)  # for cars
KEEP_OR_SWITCH = gym.spaces.Discrete(2)  # for lights

_VIEW = 4  # cells that a car sees ahead


class TrafficGrid:
    """`blocks` x `blocks` crossings of one-way ring roads, one light and `num_cars` cars.

    A car sees how far the next crossing is, whether its light is green, how many cells ahead are
    free, whether it moved last, and the time. It earns 1 for each cell; standing costs 0.1, driving
    at a red light or at another car costs 1 (and it stays). A light sees how many cars wait for it
    on both roads, its phase and for how long; it pays 0.5 for each car that stands at it.
    """

    def __init__(self, num_cars: int = 25, blocks: int = 2, block: int = 12, steps: int = 200):
        self.num_cars, self.blocks, self.block, self.steps = num_cars, blocks, block, steps
        self.ring = blocks * block  # cells of a road; its crossings are at multiples of `block`
        self.cars = [f"car_{i}" for i in range(num_cars)]
        self.lights = [f"light_{i}" for i in range(blocks * blocks)]
        # Roads 0 .. blocks-1 go one way, the others cross them.
        cells = np.arange(2 * blocks * self.ring)
        self._free_cells = cells[cells % self.ring % block != 0]
        if num_cars > len(self._free_cells) // 2:
            raise ValueError(f"{num_cars} cars are too many for {len(self._free_cells)} cells.")
        self._ahead = np.arange(1, _VIEW + 1)

    def reset(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Puts the cars anywhere but on crossings; returns the observations."""
        self._road, self._cell = np.divmod(
            rng.choice(self._free_cells, self.num_cars, replace=False), self.ring
        )
        self._green = rng.integers(2, size=len(self.lights))  # for roads of the first kind, or not
        self._age = np.zeros(len(self.lights))
        self._moved = np.zeros(self.num_cars, bool)
        self._now = 0
        return self._observations()

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, bool]:
        """Moves the town; returns observations, rewards, and whether the time is over."""
        chosen = np.array([actions[name] for name in (*self.cars, *self.lights)])
        goes, switches = chosen[: self.num_cars] == 1, chosen[self.num_cars :] == 1
        self._age = np.where(switches, 0.0, self._age + 1.0)
        self._green = np.where(switches, 1 - self._green, self._green)
        _, red, free = self._view()
        blocked = red | (free == 0)
        self._moved = goes & ~blocked
        self._cell = (self._cell + self._moved) % self.ring
        self._now += 1
        cars = np.where(self._moved, 1.0, np.where(goes, -1.0, -0.1))
        queues = self._queues()
        lights = -0.5 * queues.sum(axis=0)
        rewards = dict(zip(self.cars, cars.tolist(), strict=True))
        rewards.update(zip(self.lights, lights.tolist(), strict=True))
        return self._observations(), rewards, self._now >= self.steps

    def _view(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns, for each car, the crossing it comes to, whether it is red, the free cells."""
        occupied = np.zeros((2 * self.blocks, self.ring), bool)
        occupied[self._road, self._cell] = True
        ahead = (self._cell[:, None] + self._ahead) % self.ring
        seen = occupied[self._road[:, None], ahead]
        free = np.where(seen.any(axis=1), seen.argmax(axis=1), _VIEW)
        light, first = self._next_light()
        at_it = (self._cell + 1) % self.block == 0
        return light, at_it & (self._green[light] != first), free

    def _next_light(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the light of each car's next crossing, and whether its road is of the first."""
        first = self._road < self.blocks
        number = (self._cell // self.block + 1) % self.blocks
        other = self._road % self.blocks
        light = np.where(first, other * self.blocks + number, number * self.blocks + other)
        return light, first.astype(np.int64)

    def _queues(self) -> np.ndarray:
        """Returns the cars that stand near each light, on roads of both kinds, `[2, lights]`."""
        light, first = self._next_light()
        near = ~self._moved & (self._cell % self.block >= self.block - _VIEW)
        counts = np.bincount(
            light[near] + len(self.lights) * first[near], minlength=2 * len(self.lights)
        )
        return counts.reshape(2, -1)

    def _observations(self) -> dict[str, np.ndarray]:
        light, first = self._next_light()
        _, _, free = self._view()
        now = self._now / self.steps
        cars = np.empty((self.num_cars, 5), np.float32)
        cars[:, 0] = 1.0 - self._cell % self.block / self.block
        cars[:, 1] = self._green[light] == first
        cars[:, 2] = free / _VIEW
        cars[:, 3] = self._moved
        cars[:, 4] = now
        lights = np.empty((len(self.lights), 4), np.float32)
        lights[:, :2] = np.minimum(self._queues().T / _VIEW, 1.0)
        lights[:, 2] = self._green
        lights[:, 3] = np.minimum(self._age / 10.0, 1.0)
        observations = dict(zip(self.cars, cars, strict=True))
        observations.update(zip(self.lights, lights, strict=True))
        return observations
