"""What is wrong with a run, in words: from the numbers that each iteration gives anyway.

Each thing is said once in a run, with the number that shows it and the setting that changes it. It
must hold in several iterations one after the other, so that the beginning of a run, or a single
odd batch, says nothing.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.models.spaces import action_leaves, cell_sizes, is_float_box
from tfpolicies.rollout.episode import RolloutMetrics

logger = logging.getLogger("tfpolicies")

_IN_A_ROW = 3  # iterations in which something holds before it is said
_MOST_ROWS = 0.5  # share of the rows of a batch that counts as most of them
_FAR = 10  # times the target that a KL divergence is far over it
_LITTLE = 0.01  # of the largest entropy of discrete actions
_NARROW = 0.01  # standard deviation of a continuous action, in units of the policy
_WITHOUT_REWARD = 100  # episodes without any reward that are worth a word
_WITHOUT_END = 10_000  # steps of each environment in which no episode ended
_STEPS_PER_UPDATE = 8  # with replay: so few updates hardly learn
_START = "num_steps_sampled_before_learning_starts"


class Trained(NamedTuple):
    """What an iteration says of one policy."""

    policy_id: str
    stats: Mapping[str, Any]  # `learner_stats`
    config: Mapping[str, Any]  # the policy's own
    action_space: gym.Space
    result: Mapping[str, Any]  # of the iteration

    def number(self, name: str) -> float:
        """Returns a statistic; NaN, which no comparison holds for, if there is none."""
        value = self.stats.get(name)
        return float(value) if isinstance(value, int | float) else math.nan


class Sampled(NamedTuple):
    """What an iteration says of the whole run."""

    result: Mapping[str, Any]
    config: AlgorithmConfig
    episodes: Sequence[RolloutMetrics]  # the last ones
    num_envs: int  # of all workers

    def amount(self, name: str) -> int:
        """Returns what was sampled or trained in this iteration, in the unit of the run."""
        return int(self.result[f"num_{self.config.count_steps_by}_{name}_this_iter"])


class Diagnosis:
    """Says what is wrong with a run as soon as results show it."""

    def __init__(self) -> None:
        self._in_a_row: Counter[tuple[str, str]] = Counter()
        self._told: set[str] = set()

    def look(self, sampled: Sampled, trained: Iterable[Trained]) -> None:
        """Looks at an iteration, and logs a warning for each new thing that is wrong.

        Args:
            sampled: the whole run.
            trained: the policies that learned in it.
        """
        for name, (check_run, needed) in _OF_THE_RUN.items():
            if name not in self._told:
                self._meet(name, "", check_run(sampled), needed)
        for one in trained:
            for name, check_policy in _OF_A_POLICY.items():
                if name not in self._told:
                    self._meet(name, one.policy_id, check_policy(one), _IN_A_ROW)

    def _meet(self, name: str, policy_id: str, found: str | None, needed: int) -> None:
        key = name, policy_id
        if found is None:
            self._in_a_row.pop(key, None)
            return
        self._in_a_row[key] += 1
        if self._in_a_row[key] >= needed:
            self._told.add(name)
            logger.warning("%s%s", f"Policy {policy_id!r}: " if policy_id else "", found)


# -- of one policy ----------------------------------------------------------------------------


def _value_errors_are_clipped(trained: Trained) -> str | None:
    share = trained.number("vf_clipped")
    if not share > _MOST_ROWS:
        return None
    of_policies = trained.result.get("policy_reward_mean", {})  # where there are several
    of_all = trained.result.get("episode_reward_mean", math.nan)
    mean = of_policies.get(trained.policy_id, of_all)
    returns = f" (the mean return is {mean:.4g})" if math.isfinite(mean) else ""
    return (
        f"in {share:.0%} of the rows the estimated value is so far from the return{returns} that "
        f"its squared error is above vf_clip_param={trained.config.get('vf_clip_param', 0):g}. The "
        "value function learns nothing from such rows. Set training(vf_clip_param=float('inf')), "
        "on the command line --set vf_clip_param=inf, or scale the rewards down."
    )


def _entropy_is_gone(trained: Trained) -> str | None:
    most, components = 0.0, 0
    for leaf in action_leaves(trained.action_space):
        if is_float_box(leaf.space):
            components += math.prod(leaf.shape)
        elif isinstance(leaf.space, gym.spaces.Discrete):
            most += math.log(leaf.space.n)
        elif isinstance(leaf.space, gym.spaces.MultiBinary):
            most += math.prod(leaf.shape) * math.log(2)
        else:
            most += sum(map(math.log, cell_sizes(leaf.space)))
    narrow = 0.5 * math.log(2 * math.pi * math.e) + math.log(_NARROW)
    entropy, limit = trained.number("entropy"), _LITTLE * most + components * narrow
    if not entropy < limit:
        return None
    return (
        f"the entropy is {entropy:.2g} nats, so the policy nearly always takes the same action in "
        "the same place and explores no more. If returns are not high enough yet, raise "
        f"entropy_coeff (now {trained.config.get('entropy_coeff', 0.0):g}) or lower lr (now "
        f"{trained.number('cur_lr'):.2g})."
    )


def _kl_is_far_over_target(trained: Trained) -> str | None:
    kl, target = trained.number("kl"), trained.config.get("kl_target") or math.nan
    if not (kl > _FAR * target and trained.number("cur_kl_coeff") > 0):
        return None
    return (
        f"an iteration changes the policy by a KL divergence of {kl:.2g}, far over "
        f"kl_target={target:g}. Lower lr (now {trained.number('cur_lr'):.2g}) or num_sgd_iter (now "
        f"{trained.config.get('num_sgd_iter')})."
    )


def _advantages_are_zero(trained: Trained) -> str | None:
    if trained.number("policy_loss") != 0.0:
        return None
    return (
        "policy_loss is exactly 0, since all advantages are 0: the rewards make no difference "
        "between actions, and nothing is trained. Look at the rewards of the environment, and at "
        "clip_rewards."
    )


_OF_A_POLICY: dict[str, Callable[[Trained], str | None]] = {
    "value errors": _value_errors_are_clipped,
    "entropy": _entropy_is_gone,
    "KL": _kl_is_far_over_target,
    "advantages": _advantages_are_zero,
}


# -- of the whole run -------------------------------------------------------------------------


def _no_reward_was_seen(sampled: Sampled) -> str | None:
    total = sampled.result["episodes_total"]
    if total < _WITHOUT_REWARD or any(
        episode.episode_reward or any(episode.agent_rewards.values())
        for episode in sampled.episodes
    ):
        return None
    return (
        f"The return was 0 in each of the last {len(sampled.episodes)} episodes, so there is "
        "nothing to learn from. Give rewards on the way to the goal, or explore more "
        "(entropy_coeff, exploration_config)."
    )


def _no_episode_ends(sampled: Sampled) -> str | None:
    steps = sampled.result["num_env_steps_sampled"] // max(1, sampled.num_envs)
    if sampled.result["episodes_total"] or steps < _WITHOUT_END:
        return None
    return (
        f"No episode has ended after {steps:,} steps of each environment, so the mean return is "
        "nan. If episodes never end, give the environment a time limit: "
        "gymnasium.wrappers.TimeLimit(env, max_episode_steps=1000)."
    )


def _nothing_is_trained(sampled: Sampled) -> str | None:
    waits = sampled.result["num_env_steps_sampled"] <= sampled.config.get(_START, 0)
    if sampled.result["info"]["learner"] or not sampled.amount("sampled") or waits:
        return None
    return (
        f"An iteration sampled {sampled.amount('sampled')} steps, but updated no policy. Look at "
        "policies_to_train, and at the policies that policy_mapping_fn gives to agents."
    )


def _updates_are_few(sampled: Sampled) -> str | None:
    config = sampled.config
    updates = sampled.amount("trained") / config.train_batch_size
    if config.get("training_intensity", 0) is not None or not updates:
        return None
    steps = sampled.amount("sampled") / updates
    if steps < _STEPS_PER_UPDATE:
        return None
    return (
        f"There is one update per {steps:.0f} sampled steps, since {sampled.num_envs} environments "
        "step between two updates. For one update per step set training_intensity="
        f"{config.train_batch_size}, or step fewer environments (num_envs_per_worker, --num-envs)."
    )


_OF_THE_RUN: dict[str, tuple[Callable[[Sampled], str | None], int]] = {
    "rewards": (_no_reward_was_seen, 1),
    "ends": (_no_episode_ends, 1),
    "updates": (_nothing_is_trained, _IN_A_ROW),
    "intensity": (_updates_are_few, _IN_A_ROW),
}
"""By name, each with how many iterations it must hold in."""


# -- of its length ----------------------------------------------------------------------------


def too_short(config: AlgorithmConfig, steps: float) -> str | None:
    """Says that learning does not start in so many steps; None if it does.

    Args:
        config: of the run.
        steps: environment steps that it samples from its beginning to its end.
    """
    start = config.get(_START, 0)
    if not start or steps > start:
        return None
    return (
        f"learning starts after {_START}={start} steps, and the run has {steps:.0f}. Train for "
        f"more steps, or set training({_START}=N), on the command line --set {_START}=N."
    )
