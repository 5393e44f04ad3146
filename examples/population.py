"""Population-based training of 16 policies (arXiv:1711.09846).

    python examples/population.py

All are in one `PolicyMap` and share one Program, so each only needs memory for its weights. They
start with different learning rates. Every few rounds the worst quarter become copies of the best
quarter, with a perturbed learning rate. Writes `population.png`: the learning curves of all, and
marks where a policy became a copy of another one.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from tfpolicies import PolicyMap, PPOConfig, PPOTF2Policy, RolloutWorker

ROWS, EPOCHS, MINIBATCH = 1024, 6, 128  # of one member in one round


class Member:
    """One policy with its environments.

    Attributes:
        returns: the mean return of its last 50 episodes, after each round.
        rates: its learning rate in each round.
        copy_rounds: the rounds after which it became a copy of another one.
    """

    def __init__(self, index: int, lr: float) -> None:
        config = (
            PPOConfig()
            .environment("CartPole-v1")
            .rollouts(num_envs_per_worker=8, rollout_fragment_length=ROWS // 8)
            .training(lr=lr, gamma=0.98, lambda_=0.9, kl_coeff=0.0)
            .debugging(seed=index)
        )
        self.worker = RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
        self.policy = self.worker.get_policy()
        self.episodes: deque[float] = deque(maxlen=50)
        self.returns: list[float] = []
        self.rates: list[float] = []
        self.copy_rounds: list[int] = []

    def train(self) -> None:
        """Samples once and learns from it."""
        self.policy.learn_epochs(self.worker.sample(), EPOCHS, MINIBATCH)
        self.episodes.extend(m.episode_reward for m in self.worker.get_metrics())
        self.returns.append(float(np.mean(self.episodes)) if self.episodes else 0.0)
        self.rates.append(self.policy.get_hyperparameter("lr"))


def learn_from_the_best(population: PolicyMap, members: dict[str, Member], round_: int) -> None:
    """Makes the worst quarter copies of the best, with perturbed learning rates."""
    ranked = sorted(members, key=lambda name: members[name].returns[-1])
    quarter = len(members) // 4
    for worst, best in zip(ranked[:quarter], reversed(ranked), strict=False):
        population.copy_policy(best, worst)  # `worst` stays the same object, also in its worker
        population.perturb(worst, "lr", factors=(0.8, 1.25))
        members[worst].episodes = deque(members[best].episodes, maxlen=50)
        members[worst].copy_rounds.append(round_)


def train(size: int, rounds: int, exchange: int) -> tuple[dict[str, Member], float]:
    """Trains a population; returns its members by name, and the seconds of all rounds."""
    rates = np.geomspace(1e-4, 1e-2, size)
    members = {f"member_{i:02d}": Member(i, float(lr)) for i, lr in enumerate(rates)}
    population = PolicyMap(capacity=size)
    population.update({name: member.policy for name, member in members.items()})
    for member in members.values():
        member.policy.driver.learning.warm_up(ROWS, EPOCHS, MINIBATCH)
    start = time.perf_counter()
    for round_ in range(rounds):
        for member in members.values():
            member.train()
        if size >= 4 and (round_ + 1) % exchange == 0 and round_ + 1 < rounds:
            learn_from_the_best(population, members, round_)
    return members, time.perf_counter() - start


def draw(members: dict[str, Member], path: Path) -> None:
    """Draws the curves of all members, coloured by their learning rates."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = ScalarMappable(LogNorm(1e-4, 1e-2), "viridis")
    for member in members.values():
        steps = ROWS * np.arange(1, len(member.returns) + 1)
        for i in range(len(steps) - 1):
            colour = colours.to_rgba(member.rates[i + 1])
            axes.plot(steps[i : i + 2], member.returns[i : i + 2], color=colour, linewidth=1.4)
        marks = member.copy_rounds
        axes.plot(steps[marks], np.array(member.returns)[marks], "o", ms=4, mfc="w", mec="0.3")
    axes.plot([], [], "o", ms=4, mfc="w", mec="0.3", label="becomes a copy of one of the best")
    axes.set(xlabel="environment steps of each member", ylabel="mean return of 50 episodes")
    axes.set_title(f"CartPole-v1: a population of {len(members)}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
    figure.colorbar(colours, ax=axes, label="learning rate")
    figure.savefig(path, dpi=120)


def main(folder: str = ".", size: int = 16, rounds: int = 30, exchange: int = 5) -> list[float]:
    """Trains one policy, then a population; returns the last mean returns of the population."""
    _, single_seconds = train(1, rounds, exchange)
    members, population_seconds = train(size, rounds, exchange)
    path = Path(folder) / "population.png"
    draw(members, path)
    print(f"{'member':>9} {'first rate':>10} {'last rate':>10} {'return':>7}  copied after round")
    for name, member in members.items():
        print(
            f"{name:>9} {member.rates[0]:10.2g} {member.rates[-1]:10.2g} {member.returns[-1]:7.1f}"
            f"  {', '.join(str(round_ + 1) for round_ in member.copy_rounds)}"
        )
    print(
        f"One policy alone: {single_seconds:.2f} s; {size} together: {population_seconds:.2f} s, "
        f"{population_seconds / size:.2f} s each, "
        f"{population_seconds / size / single_seconds:.2f} times one alone."
    )
    print(f"Written: {path}")
    return [member.returns[-1] for member in members.values()]


if __name__ == "__main__":
    main()
