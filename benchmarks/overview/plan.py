"""What is measured, with whom: the measurements, their contestants and the settings of learning."""

from dataclasses import dataclass
from typing import Any

# The set with which Stable-Baselines3 reached the goal fastest and on every seed (see README.md).
LEARNING: dict[str, Any] = {
    "goal": 475.0,
    "max_steps": 500_000,
    "num_envs": 32,
    "fragment": 32,
    "minibatch": 256,
    "epochs": 10,
    "lr": 2e-3,
    "gamma": 0.98,
    "lambda": 0.9,
    "clip": 0.2,
    "entropy_coeff": 0.0,
    "vf_loss_coeff": 0.5,
    "grad_clip": 0.5,
    "first_seed": 10,  # the set was chosen on seeds 0 to 9
}


@dataclass(frozen=True)
class Contestant:
    """One of those who are measured, and one of the ways it works.

    Attributes:
        label: How tables and charts call it.
        interpreter: Whose Python runs it: "ours", "sb3" or "rllib".
        script: The measuring script, relative to `benchmarks`.
        variant: The way it is to work, as the script names it.
        limit_of: Variant of ours that cannot be faster than this one, for the bare environment.
    """

    label: str
    interpreter: str
    script: str
    variant: str = ""
    limit_of: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether this is a way of tfpolicies."""
        return self.script.startswith("ours")


@dataclass(frozen=True)
class Cell:
    """One figure of a measurement: its key in a script's answer, its name, its unit."""

    key: str
    label: str
    unit: str
    higher_is_better: bool = False


@dataclass(frozen=True)
class Measurement:
    """One thing that is measured, its figures and its contestants (ours first).

    Where start-up counts, each contestant has one run beforehand that does not count: it fills
    the caches of Python and of the system, as they are on a machine where it has run before.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    contestants: tuple[Contestant, ...]
    startup_counts: bool = False


def _ours(variant: str = "") -> Contestant:
    return Contestant(
        f"ours, {variant}" if variant else "ours", "ours", "overview/ours.py", variant
    )


def _rllib(variant: str) -> Contestant:
    return Contestant(f"RLlib, {variant}", "rllib", "overview/peer_rllib.py", variant)


_SB3 = Contestant("SB3", "sb3", "overview/peer_sb3.py")

MEASUREMENTS = (
    Measurement(
        "acting",
        "Acting: one compute_actions call",
        tuple(Cell(str(batch), f"batch {batch}", "µs") for batch in (1, 32, 256)),
        (_ours("onnx"), _ours("tf"), _ours("graph"), _SB3, _rllib("tf2"), _rllib("tf1")),
    ),
    Measurement(
        "one_update",
        "One learn_on_batch call: a single gradient step on all rows",
        tuple(Cell(str(rows), f"{rows} rows", "ms") for rows in (128, 2048)),
        (_ours("tf"), _ours("graph"), _rllib("tf2"), _rllib("tf1")),
    ),
    Measurement(
        "sampling",
        "Sampling: rollouts with values and advantages",
        tuple(
            Cell(str(count), f"{count} env{'s' * (count > 1)}", "steps/s", higher_is_better=True)
            for count in (1, 8, 32)
        ),
        (
            _ours("vector"),
            _ours("instances"),
            _SB3,
            _rllib("tf2"),
            Contestant(
                "bare env, vector", "ours", "overview/bare_env.py", "vector", limit_of="vector"
            ),
            Contestant(
                "bare env, instances",
                "ours",
                "overview/bare_env.py",
                "instances",
                limit_of="instances",
            ),
        ),
    ),
    Measurement(
        "update",
        "One PPO update: 2048 rows, 10 epochs, minibatch 256",
        (Cell("update", "one update", "ms"), Cell("first", "first, compiling", "ms")),
        (
            _ours("xla"),
            _ours("plain"),
            _ours("graph"),
            _SB3,
            _rllib("tf2"),
            _rllib("tf1"),
        ),
    ),
    Measurement(
        "league",
        "A PolicyMap with 20 policies of one kind, one row acted on",
        (
            Cell("add", "adding a policy", "ms"),
            Cell("snapshot", "adding a copy of one", "ms"),
            Cell("evicted", "acting, capacity 5", "µs"),
            Cell("memory", "acting, all in memory", "µs"),
            Cell("bare", "acting without the map", "µs"),
        ),
        (_ours(), _rllib("tf2, swappable"), _rllib("tf2")),
    ),
    Measurement(
        "learning",
        "Learning CartPole-v1 to a mean return of 475",
        (
            Cell("seconds", "time from process start", "s"),
            Cell("setup", "of which start-up", "s"),
            Cell("steps", "environment steps", "steps"),
        ),
        (_ours(), _SB3),
        startup_counts=True,
    ),
)
