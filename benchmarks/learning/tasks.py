"""What the learning benchmark trains: its tasks, with the settings that drive every library.

A task begins with this package's tuned settings; a peer gets the same ones, as `learning_peer.py`
translates them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfpolicies.algorithms.tuned_hyperparameters import (
    find_tuned,
    get_tuned_settings,
    require_tuned,
)

LIBRARIES = ("ours", "sb3", "sbx")
NAMES = {"ours": "ours", "sb3": "Stable-Baselines3", "sbx": "SBX"}


@dataclass(frozen=True)
class Task:
    """One algorithm in one environment.

    Attributes:
        algorithm: its name in all libraries.
        env: the environment's registered name.
        steps: of the environment.
        seeds: how many seeds each library has.
        part: what is different from the tuned settings, in one word; "" if nothing is.
        changes: those settings.
        own_weights: whether peers begin with their own initial weights, not with ours.
    """

    algorithm: str
    env: str
    steps: int
    seeds: Mapping[str, int] = field(hash=False)
    part: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    own_weights: bool = False

    @property
    def name(self) -> str:
        """The task in one word, by which `--task` and the CSV name it."""
        part = f"-{self.part}" if self.part else ""
        return f"{self.algorithm}-{self.env.replace(':', '-').replace('/', '-')}{part}-" + (
            f"{self.steps // 1000}k"
        )

    def settings(self) -> dict[str, Any]:
        """Returns the settings of this package's config."""
        return get_tuned_settings(self.algorithm, self.env) | dict(self.changes)

    def threshold(self) -> float | None:
        """Returns the return that the source of the settings reports, if for no more steps."""
        entry = require_tuned(self.algorithm, self.env)
        return entry.threshold if self.steps >= entry.steps and not self.part else None

    def digest(self) -> str:
        """Returns eight characters that change with the settings and the steps."""
        own = ["own weights"] if self.own_weights else []
        text = json.dumps([self.settings(), self.steps, *own], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


class Cell(NamedTuple):
    """One run: a process of its own."""

    task: Task
    library: str
    seed: int

    @property
    def name(self) -> str:
        """The cell in one word, as files are called."""
        return f"{self.task.name}-{self.library}-{self.seed}"


_PRIORITIES = {"type": "MultiAgentPrioritizedReplayBuffer", "capacity": 100_000}
_RAINBOW: dict[str, dict[str, Any]] = {
    "double": {"double_q": True},
    "dueling": {"dueling": True, "hiddens": [256]},
    "prioritised": {"replay_buffer_config": _PRIORITIES},
    "n-step": {"n_step": 3},
    "distributional": {"num_atoms": 51, "v_min": 0.0, "v_max": 100.0},
    "noisy": {
        "noisy": True,
        "exploration_config": {
            "type": "EpsilonGreedy",
            "initial_epsilon": 0.0,
            "final_epsilon": 0.0,
            "epsilon_timesteps": 1,
        },
    },
}
"""The parts of Rainbow, each alone; discounted returns of CartPole are from 0 to 100."""

_FIVE = {"ours": 5, "sb3": 5}
_WITH_SBX = {"ours": 5, "sb3": 5, "sbx": 5}
_FIVE_OF_OURS = {"ours": 5}
_LONG = {"ours": 1}

TASKS = (
    Task("SAC", "Pendulum-v1", 20_000, _WITH_SBX),
    Task("TD3", "Pendulum-v1", 20_000, _WITH_SBX),
    Task("PPO", "CartPole-v1", 100_000, _FIVE),
    Task("DQN", "CartPole-v1", 50_000, _FIVE),
    Task("A2C", "CartPole-v1", 500_000, _FIVE),
    *(
        Task("DQN", "CartPole-v1", 50_000, _FIVE_OF_OURS, part, changes)
        for part, changes in _RAINBOW.items()
    ),
    Task("PPO", "Acrobot-v1", 100_000, _FIVE),
    Task("DQN", "Acrobot-v1", 100_000, _FIVE),
    Task("PPO", "LunarLander-v3", 300_000, _FIVE),
    Task("DQN", "LunarLander-v3", 300_000, _FIVE),
    Task("SAC", "HalfCheetah-v5", 100_000, _WITH_SBX),
    Task("TD3", "Hopper-v5", 100_000, _WITH_SBX),
    Task("SAC", "LunarLanderContinuous-v3", 100_000, _FIVE),
    Task(
        "SAC",
        "LunarLanderContinuous-v3",
        100_000,
        _FIVE_OF_OURS,
        "critics-first",
        {"update_order": "critics_first"},
    ),
    Task("DQN", "MinAtar/Breakout-v1", 300_000, _FIVE_OF_OURS),
    Task(
        "DQN",
        "MinAtar/Breakout-v1",
        300_000,
        _FIVE_OF_OURS,
        "distributional",
        {"num_atoms": 51, "v_min": 0.0, "v_max": 20.0},
    ),
    Task("SAC", "HalfCheetah-v5", 300_000, _LONG),
    Task("PPO", "HalfCheetah-v5", 1_000_000, _FIVE),
    Task("PPO", "envpool:Pong-v5", 2_000_000, _LONG),
    *(
        Task(algo, env, steps, {"sb3": 5}, "own-weights", own_weights=True)
        for algo, env, steps in (
            ("SAC", "Pendulum-v1", 20_000),
            ("TD3", "Pendulum-v1", 20_000),
            ("DQN", "CartPole-v1", 50_000),
        )
    ),
)
"""The tasks in the order of the page; 2e6 steps of Pong are 8e6 frames.

A task that takes less than half an hour a seed on one core has five seeds of each library. The last
ones show what the peers' initial weights do, which are ours elsewhere.
"""


def cells(
    tasks: Iterable[Task] = TASKS, libraries: Iterable[str] = LIBRARIES, seeds: int | None = None
) -> Iterator[Cell]:
    """Yields the cells of tasks, one seed of each library after the other.

    So the libraries share what else the machine does.

    Args:
        tasks: in this order.
        libraries: which of them.
        seeds: the most that each library has; None: as many as the task says.
    """
    chosen = list(libraries)
    for task in tasks:
        most = max(task.seeds.values())
        for seed in range(1, 1 + min(most, most if seeds is None else seeds)):
            turn = LIBRARIES[seed % 3 :] + LIBRARIES[: seed % 3]
            yield from (
                Cell(task, library, seed)
                for library in turn
                if library in chosen and seed <= task.seeds.get(library, 0)
            )


def source(task: Task) -> str:
    """Returns where the settings of a task are from."""
    entry = find_tuned(task.algorithm, task.env)
    return "" if entry is None else entry.source
