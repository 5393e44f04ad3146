"""Trains the policies of `traffic.py` with PPO, and draws the town as a GIF.

    python examples/traffic_video.py

writes `traffic.gif`: cars are blue if they move and orange if they wait; crossings show the light
of the road from left to right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from traffic import MultiAgentTrafficGrid
from traffic_grid import CAR_SPACE, KEEP_OR_SWITCH, LIGHT_SPACE, STAY_OR_GO, TrafficGrid

from tfpolicies import Algorithm, PolicySpec, PPOConfig

CELL = 11  # pixels
ROAD, GRASS = (90, 92, 98), (196, 214, 186)
MOVING, WAITING, GREEN, RED = (70, 140, 220), (240, 150, 60), (70, 190, 90), (215, 70, 60)


def map_agents(agent_id: str, episode: Any, worker: Any, **kwargs: Any) -> str:
    """Returns the policy of an agent: one for all cars, one for all lights."""
    return agent_id.partition("_")[0]


def train(steps: int) -> Algorithm:
    """Returns the trained algorithm."""
    policies = {
        "car": PolicySpec(None, CAR_SPACE, STAY_OR_GO),
        "light": PolicySpec(None, LIGHT_SPACE, KEEP_OR_SWITCH),
    }
    config = (
        PPOConfig()
        .environment(MultiAgentTrafficGrid)
        .rollouts(num_envs_per_worker=8)
        .training(lr=1e-3, train_batch_size=1600, sgd_minibatch_size=1600, num_sgd_iter=4)
        .training(gamma=0.95, entropy_coeff=0.005, model={"fcnet_hiddens": [32, 32]})
        .multi_agent(policies=policies, policy_mapping_fn=map_agents)
        .debugging(seed=0)
    )
    algorithm = config.build()
    algorithm.learn(steps)
    return algorithm


def draw(town: TrafficGrid) -> Image.Image:
    """Returns a picture of the town; roads of the first kind lead from left to right."""
    picture = np.full((town.ring, town.ring, 3), GRASS, np.uint8)
    lines = [town.block * number for number in range(town.blocks)]
    picture[lines], picture[:, lines] = ROAD, ROAD
    for number, is_green in enumerate(town._is_green):
        row, column = divmod(number, town.blocks)
        picture[lines[row], lines[column]] = GREEN if is_green else RED
    for road, cell, moved in zip(town._road, town._cell, town._moved, strict=True):
        line = lines[road % town.blocks]
        place = (line, cell) if road < town.blocks else (cell, line)
        picture[place] = MOVING if moved else WAITING
    picture = np.roll(picture, town.block // 2, axis=(0, 1))  # roads away from the border
    return Image.fromarray(picture.repeat(CELL, 0).repeat(CELL, 1))


def record(algorithm: Algorithm, path: Path, steps: int) -> float:
    """Writes a GIF of greedy actions; returns the share of cars that move in a step."""
    env = MultiAgentTrafficGrid()
    observations, _ = env.reset(seed=0)
    pictures, moving = [], []
    for _ in range(steps):
        actions = {}
        for policy_id in ("car", "light"):
            agents = [name for name in observations if name.startswith(policy_id)]
            batch = np.stack([observations[name] for name in agents])
            chosen = algorithm.get_policy(policy_id).predict(batch)
            actions.update(zip(agents, chosen.tolist(), strict=True))
        observations = env.step(actions)[0]
        pictures.append(draw(env._grid).quantize(16))
        moving.append(env._grid._moved.mean())
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=150, loop=0)
    return float(np.mean(moving))


def main(folder: str = ".", steps: int = 60_000, pictures: int = 100) -> float:
    """Trains and draws; returns the share of cars that move in a step."""
    algorithm = train(steps)
    share = record(algorithm, Path(folder) / "traffic.gif", pictures)
    print(f"{share:.0%} of the cars move in a step.")
    algorithm.stop()
    return share


if __name__ == "__main__":
    main()
