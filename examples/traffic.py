"""Cars and traffic lights, three policies: two for the cars, one shared by the lights.

    python examples/traffic.py

samples a batch and prints the rows of each policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from traffic_grid import CAR_SPACE, KEEP_OR_SWITCH, LIGHT_SPACE, STAY_OR_GO, TrafficGrid

from tfpolicies import (
    AlgorithmConfig,
    MultiAgentBatch,
    MultiAgentEnv,
    PGTF2Policy,
    PolicySpec,
    RolloutWorker,
)

_CELL_PIXELS = 12


class MultiAgentTrafficGrid(MultiAgentEnv):
    """The town as a multi-agent environment: all agents act in every step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}

    def __init__(self, num_cars: int = 25, render_mode: str | None = None, **settings: int) -> None:
        self._grid, self.render_mode = TrafficGrid(num_cars, **settings), render_mode
        cars, lights = self._grid.cars, self._grid.lights
        self._agent_ids = {*cars, *lights}
        self.observation_space = spaces.Dict(
            {**dict.fromkeys(cars, CAR_SPACE), **dict.fromkeys(lights, LIGHT_SPACE)}
        )
        self.action_space = spaces.Dict(
            {**dict.fromkeys(cars, STAY_OR_GO), **dict.fromkeys(lights, KEEP_OR_SWITCH)}
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        return self._grid.reset(self.np_random), {}

    def step(self, action_dict: Mapping[str, Any]) -> Any:
        observations, rewards, over = self._grid.step(dict(action_dict))
        return observations, rewards, {"__all__": False}, {"__all__": over}, {}

    def render(self) -> np.ndarray:
        return self._grid.get_picture().repeat(_CELL_PIXELS, 0).repeat(_CELL_PIXELS, 1)


def make_worker(copies: int = 8, fragment: int = 50, seed: int = 0) -> RolloutWorker:
    model = {"fcnet_hiddens": [64, 64]}
    policies = {
        "car_policy1": PolicySpec(PGTF2Policy, CAR_SPACE, STAY_OR_GO, {"gamma": 0.99}),
        "car_policy2": PolicySpec(PGTF2Policy, CAR_SPACE, STAY_OR_GO, {"gamma": 0.95}),
        "traffic_light_policy": PolicySpec(PGTF2Policy, LIGHT_SPACE, KEEP_OR_SWITCH),
    }
    rng = np.random.default_rng(seed)

    def mapping(agent_id: str, episode: Any, **kwargs: Any) -> str:
        if agent_id.startswith("light_"):
            return "traffic_light_policy"
        return f"car_policy{rng.integers(1, 3)}"

    config = (
        AlgorithmConfig()
        .environment(MultiAgentTrafficGrid)
        .rollouts(num_envs_per_worker=copies, rollout_fragment_length=fragment)
        .training(model=model)
        .multi_agent(policies=policies, policy_mapping_fn=mapping)
        .debugging(seed=seed)
    )
    return RolloutWorker(config=config)


def main() -> MultiAgentBatch:
    batch = make_worker().sample()
    print(f"{batch.env_steps()} steps of the town, {batch.agent_steps()} of cars and lights")
    for policy_id, rows in batch.policy_batches.items():
        print(f"{policy_id}: {rows.count} rows of {', '.join(rows)}")
    return batch


if __name__ == "__main__":
    main()
