"""A town of crossing ring roads with cars and traffic lights: the simulation of `traffic.py`.

It only needs NumPy and Gymnasium's spaces, so that other frameworks can use it as well.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

CAR_SPACE = gym.spaces.Box(0.0, 1.0, (5,), np.float32)
LIGHT_SPACE = gym.spaces.Box(0.0, 1.0, (4,), np.float32)
STAY_OR_GO = gym.spaces.Discrete(2)  # for cars
KEEP_OR_SWITCH = gym.spaces.Discrete(2)  # for lights

_VIEW_CELLS = 4  # cells that a car sees ahead
_ROAD, _GRASS = (90, 92, 98), (196, 214, 186)
_MOVING, _WAITING, _GREEN, _RED = (70, 140, 220), (240, 150, 60), (70, 190, 90), (215, 70, 60)


class TrafficGrid:
    """`blocks` x `blocks` crossings of one-way ring roads, one light and `num_cars` cars.

    A car observes the distance to the next crossing, whether its light is green, the number of
    free cells ahead, whether it moved in the last step, and the time. Its reward is 1 for moving a
    cell, -0.1 for waiting, and -1 for trying to pass a red light or another car (it does not move).
    A light observes the number of waiting cars on both roads, its phase and the phase's age; its
    reward is -0.5 for each waiting car.
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
        self._ahead = np.arange(1, _VIEW_CELLS + 1)

    def reset(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Places the cars randomly, but not on crossings; returns the observations."""
        self._road, self._cell = np.divmod(
            rng.choice(self._free_cells, self.num_cars, replace=False), self.ring
        )
        self._is_first_direction = self._road < self.blocks  # roads of the first kind
        self._is_green = rng.integers(2, size=len(self.lights)) == 1  # for roads of the first kind
        self._age = np.zeros(len(self.lights))
        self._moved = np.zeros(self.num_cars, bool)
        self._time = 0
        self._update_views()
        return self._observations()

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, bool]:
        """Executes a step; returns observations, rewards, and whether the episode is over."""
        flags = np.array([actions[name] for name in (*self.cars, *self.lights)], bool)
        moves, switches = flags[: self.num_cars], flags[self.num_cars :]
        self._age = np.where(switches, 0.0, self._age + 1.0)
        self._is_green = self._is_green ^ switches
        red = self._to_crossing == 1
        red &= self._is_green[self._light] != self._is_first_direction
        self._moved = moves & ~red & (self._free_ahead > 0)
        self._cell = (self._cell + self._moved) % self.ring
        self._time += 1
        self._update_views()
        cars = np.where(self._moved, 1.0, np.where(moves, -1.0, -0.1))
        lights = -0.5 * self._queues.sum(axis=0)
        rewards = dict(zip(self.cars, cars.tolist(), strict=True))
        rewards.update(zip(self.lights, lights.tolist(), strict=True))
        return self._observations(), rewards, self._time >= self.steps

    def get_picture(self) -> np.ndarray:
        """Returns the colours of all cells, uint8 `[ring, ring, 3]`.

        Cars are blue if they moved in the last step, otherwise orange. A crossing has the light of
        its road from left to right.
        """
        lines = self.block * np.arange(self.blocks)
        picture = np.full((self.ring, self.ring, 3), _GRASS, np.uint8)
        picture[lines], picture[:, lines] = _ROAD, _ROAD
        crossings = np.where(self._is_green[:, None], _GREEN, _RED)
        picture[np.ix_(lines, lines)] = crossings.reshape(self.blocks, self.blocks, 3)
        line = lines[self._road % self.blocks]
        rows = np.where(self._is_first_direction, line, self._cell)
        columns = np.where(self._is_first_direction, self._cell, line)
        picture[rows, columns] = np.where(self._moved[:, None], _MOVING, _WAITING)
        return np.roll(picture, self.block // 2, axis=(0, 1))  # roads away from the border

    def _update_views(self) -> None:
        """Updates each car's next light, distance to it and free cells ahead, and the queues."""
        block, other = self._cell // self.block, self._road % self.blocks
        self._to_crossing = (block + 1) * self.block - self._cell
        number = (block + 1) % self.blocks
        rows, columns = np.where(self._is_first_direction, (other, number), (number, other))
        self._light = rows * self.blocks + columns
        occupied = np.zeros((2 * self.blocks, self.ring), bool)
        occupied[self._road, self._cell] = True
        occupied_ahead = occupied[
            self._road[:, None], (self._cell[:, None] + self._ahead) % self.ring
        ]
        self._free_ahead = np.where(
            occupied_ahead.any(axis=1), occupied_ahead.argmax(axis=1), _VIEW_CELLS
        )
        is_waiting = ~self._moved & (self._to_crossing <= _VIEW_CELLS)
        queue = self._light[is_waiting] + len(self.lights) * self._is_first_direction[is_waiting]
        self._queues = np.bincount(queue, minlength=2 * len(self.lights)).reshape(2, -1)

    def _observations(self) -> dict[str, np.ndarray]:
        cars = np.empty((self.num_cars, 5), np.float32)
        cars[:, 0] = self._to_crossing / self.block
        cars[:, 1] = self._is_green[self._light] == self._is_first_direction
        cars[:, 2] = self._free_ahead / _VIEW_CELLS
        cars[:, 3] = self._moved
        cars[:, 4] = self._time / self.steps
        lights = np.empty((len(self.lights), 4), np.float32)
        lights[:, :2] = np.minimum(self._queues.T / _VIEW_CELLS, 1.0)
        lights[:, 2] = self._is_green
        lights[:, 3] = np.minimum(self._age / 10.0, 1.0)
        observations = dict(zip(self.cars, cars, strict=True))
        observations.update(zip(self.lights, lights, strict=True))
        return observations
