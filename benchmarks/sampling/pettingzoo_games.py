"""Samples PettingZoo's environments with trained policies, and states the steps per second.

`python -m benchmarks.sampling.pettingzoo_games` needs `pip install "pettingzoo[classic,butterfly]"
mpe2`; what is not installed is named and left out. Each environment is checked by `check_env`,
stepped alone with random actions, sampled with fresh policies, and again after they learned once.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import probe

NAMES = [
    "pettingzoo:classic/connect_four_v3",
    "pettingzoo:classic/tictactoe_v3",
    "pettingzoo:classic/leduc_holdem_v4",
    "pettingzoo:classic/texas_holdem_v4",
    "pettingzoo:classic/chess_v6",
    "pettingzoo:classic/rps_v2",
    "pettingzoo:butterfly/pistonball_v6",
    "pettingzoo:butterfly/knights_archers_zombies_v11",
    "mpe2:simple_spread_v3",
    "mpe2:simple_tag_v3",
]
_NO_IMAGES = {"conv_filters": [], "fcnet_hiddens": probe.HIDDEN}
_IMAGES = {"conv_filters": [[8, 8, 8], [16, 4, 4]], "fcnet_hiddens": probe.HIDDEN}


def main() -> int:
    """Runs what the command line asks for; returns 1 if an environment failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling.pettingzoo_games")
    parser.add_argument("names", nargs="*", default=NAMES, help="environments; all by default")
    parser.add_argument("--copies", type=int, default=4, help="stepped together")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    options = parser.parse_args()
    probe.hush()
    warnings.filterwarnings("ignore")
    table = Table("environment", "alone, steps/s", "sampled, steps/s", "after learning, steps/s")
    failed = 0
    for name in options.names:
        try:
            figures = measure(name, options.copies, options.seconds)
            table.add_row(name, *(f"{figure:,.0f}" for figure in figures))
        except Exception as error:
            failed += 1
            table.add_row(name, escape(f"{type(error).__name__}: {error}"))
    Console(width=120).print(table)
    return 1 if failed else 0


def measure(name: str, copies: int, seconds: float) -> tuple[float, float, float]:
    """Returns the steps/s of one environment alone, and sampled before and after learning."""
    from tfpolicies import PPOTF2Policy
    from tfpolicies.envs import check_env
    from tfpolicies.envs.env_factory import EnvContext, make_any_environments
    from tfpolicies.rollout.multi_agent_sampler import MultiAgentSampler

    envs: Any = make_any_environments(name, copies, EnvContext({}))
    check_env(envs.envs[0], steps=100)
    alone = _rate(lambda: _play_alone(envs.envs[0], 50), seconds)
    spaces = {
        agent: (envs.envs[0].get_observation_space(agent), envs.envs[0].get_action_space(agent))
        for agent in sorted(envs.envs[0].get_agent_ids(), key=str)
    }
    kinds: list[Any] = []
    for pair in spaces.values():
        if pair not in kinds:
            kinds.append(pair)
    policies = {
        f"policy_{i}": PPOTF2Policy(*pair, {"model": _model_for(pair[0]), "seed": 0})
        for i, pair in enumerate(kinds)
    }

    def mapping(agent: Any, episode: Any, **kwargs: Any) -> str:
        return f"policy_{kinds.index(spaces[agent])}"

    sampler = MultiAgentSampler(
        envs,
        policies,
        SimpleNamespace(policy_mapping_fn=mapping),
        fragment_length=50,
        rng=np.random.default_rng(0),
    )
    sampler.reset(list(range(copies)))
    fresh = _rate(lambda: sampler.sample().env_steps(), seconds)
    for policy_id, batch in sampler.sample().policy_batches.items():
        policies[policy_id].learn_epochs(batch, 1, 256)
    trained = _rate(lambda: sampler.sample().env_steps(), seconds)
    envs.close()
    return alone, fresh, trained


def _model_for(space: Any) -> dict[str, Any]:
    shape = getattr(space, "shape", None) or ()
    return _IMAGES if len(shape) == 3 and min(shape[:2]) >= 80 else _NO_IMAGES


def _play_alone(env: Any, steps: int) -> int:
    from tfpolicies.envs.env_checker import random_action

    obs, _ = env.reset()
    for _ in range(steps):
        actions = {a: random_action(env.get_action_space(a), x) for a, x in obs.items()}
        obs, _, terminateds, truncateds, _ = env.step(actions)
        obs = {a: x for a, x in obs.items() if not (terminateds.get(a) or truncateds.get(a))}
        if terminateds["__all__"] or truncateds["__all__"]:
            obs, _ = env.reset()
    return steps


def _rate(work: Callable[[], int], seconds: float) -> float:
    work()
    started, units = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        units += work()
    return units / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
