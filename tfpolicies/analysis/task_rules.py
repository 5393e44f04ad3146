"""Rules about the task of a run: policies, exploration, rewards, actions and data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfpolicies.algorithms.health_rules import (
    FILTER_ADVICE,
    LEARNING_START,
    SATURATION,
    Finding,
)
from tfpolicies.algorithms.health_stats import NORMAL_ENTROPY, to_float
from tfpolicies.analysis.history_rule import (
    MIN_ROWS,
    HistoryRule,
    Located,
    divide,
    get_end,
    get_extremes,
    mean,
    median,
)
from tfpolicies.analysis.run_history import RunHistory
from tfpolicies.exploration.schedules import piecewise_linear
from tfpolicies.models.spaces import action_leaves, is_float_box, leaves

_MIN_EXPLORATION = 0.1  # epsilon below which actions are nearly greedy
_MAX_EXPLORATION = 0.3  # epsilon at the end above which most returns are those of random actions
_SHORT_SHARE = 0.01  # share of a run that is too short for exploration
_MAX_START_SHARE = 0.5  # share of a run that may pass before learning starts
_EPSILON_DEFAULTS = {
    "warmup_timesteps": 0,
    "epsilon_timesteps": 100_000,
    "initial_epsilon": 1.0,
    "final_epsilon": 0.05,
}
_LARGE_BOUND, _UNBOUNDED = 300.0, 1e9  # bounds of observations
_LARGE_ACTION, _SMALL_ACTION = 5.0, 0.1  # bounds, in standard deviations of a first action
_GUESSING_SHARE = 0.95  # of the loss of guessing
_WEIGHTED_GUESSING_SHARE = 0.8  # the same, of a loss that advantages weight
_MIN_IMITATION_LR = 1e-5
_MIN_LOSS_FALL = 0.05  # of the first loss of imitation
_MAX_BONUS_FACTOR = 10.0  # multiple of the rewards that entropy may be worth
_MAX_GAP_SHARE = 0.5  # of the improvement, by which evaluations may differ from training


def find_untrained_policies(history: RunHistory) -> Iterator[Located]:
    policies = history.settings.get("policies")
    if not isinstance(policies, Mapping) or len(policies) < 2:
        return
    to_train = history.settings.get("policies_to_train")
    for policy_id, spec in policies.items():
        is_default = isinstance(spec, list) and bool(spec) and spec[0] is None
        if history.has_learned(policy_id) or not is_default:
            continue  # a policy of its own class may be meant to stay as it is
        mean = history.get_column(policy_id, "return_mean")
        returns = (
            f" (the mean return of its agents is {mean[-1]:.4g})"
            if np.isfinite(mean[-1:]).any()
            else ""
        )
        reason = "no agent was mapped to it while the run trained"
        advice = "Check policy_mapping_fn."
        if isinstance(to_train, list) and policy_id not in to_train:
            if history.judged_policy and history.has_improved():
                continue  # it is the opponent of the others
            reason = f"policies_to_train={to_train} leaves it out"
            advice = f"Add {policy_id!r} to policies_to_train, or set it to None for all policies."
        yield Located(
            Finding(
                evidence=f"The policy was never updated{returns}: {reason}, so it acts with its "
                "first, random weights.",
                advice=advice,
                settings={"policies_to_train": to_train},
            ),
            policy_id,
        )


def find_unequal_progress(history: RunHistory) -> Iterator[Located]:
    """Finds a policy whose returns do not grow, while those of another one do."""
    curves = {pid: history.get_column(pid, "return_mean") for pid in history.policy_ids}
    curves = {pid: x[np.isfinite(x)] for pid, x in curves.items()}
    curves = {pid: x for pid, x in curves.items() if len(x) >= MIN_ROWS}
    if len(curves) < 2 or history.judged_policy or _is_zero_sum(history, curves):
        return
    gains = {pid: float(get_end(x).mean() - x[0]) for pid, x in curves.items()}
    largest = max(gains.values())
    for policy_id, gain in gains.items():
        if largest > 0 and gain < 0.1 * largest and history.has_learned(policy_id):
            yield Located(
                Finding(
                    evidence=f"The mean return of its agents went from {curves[policy_id][0]:.4g} "
                    f"to {get_end(curves[policy_id]).mean():.4g}, while another policy gained "
                    f"{largest:.4g}.",
                    advice="Compare its columns with those of the other policy: learning rate, "
                    "entropy, and the rewards of its agents.",
                    figures={"return_mean": float(curves[policy_id][-1])},
                ),
                policy_id,
            )


def _is_zero_sum(history: RunHistory, curves: Mapping[str, np.ndarray]) -> bool:
    """Returns whether returns add up to 0 on average, in each iteration."""
    _, total = get_extremes(np.abs(history.record.get_column("episode_reward_mean")))
    return bool(total < 0.01 * max(float(np.abs(x).max()) for x in curves.values()))


def find_exploration(history: RunHistory) -> Iterator[Located]:
    settings = history.settings
    if history.reads_data:
        return
    if settings.get("explore") is False:
        yield Located(
            Finding(
                title="Training does not explore",
                evidence="explore=False: training acts greedily, so it never tries other actions.",
                advice="Set exploration(explore=True); evaluation_config={'explore': False} acts "
                "greedily in evaluations only.",
                settings={"explore": False},
            )
        )
        return
    config = settings.get("exploration_config")
    if not isinstance(config, Mapping):
        return
    random_steps = to_float(config.get("random_timesteps"))
    is_random = random_steps > _MAX_START_SHARE * history.last_step
    if is_random and history.is_stuck() and not history.is_training:
        yield Located(
            Finding(
                title="Actions are random for too long",
                evidence=f"Actions are random in the first {random_steps:,.0f} of "
                f"{history.last_step:,} steps (random_timesteps).",
                advice="Lower exploration_config's random_timesteps, or train for more steps.",
                settings={"exploration_config.random_timesteps": random_steps},
            )
        )
    kind = config.get("type", "")
    if kind == "EpsilonGreedy" and not settings.get("noisy"):
        yield from _find_epsilon(history, config)
    elif kind in ("GaussianNoise", "OrnsteinUhlenbeckNoise"):
        yield from _find_noise(history, config)


def _find_epsilon(history: RunHistory, config: Mapping[str, Any]) -> Iterator[Located]:
    warmup, duration, initial, final = (
        to_float(config.get(name, default)) for name, default in _EPSILON_DEFAULTS.items()
    )
    schedule = config.get("epsilon_schedule")
    if isinstance(schedule, Mapping) or math.isnan(warmup + duration + initial + final):
        return  # a function that only the training process has
    points = [(0, initial), (warmup, initial), (warmup + duration, final)]
    points = [(0, schedule)] if isinstance(schedule, float | int) else schedule or points

    def get_epsilon(step: float) -> float:
        return float(piecewise_linear(points, step))

    settings = {
        f"exploration_config.{name}": config.get(name)
        for name in ("initial_epsilon", "final_epsilon", "epsilon_timesteps", "epsilon_schedule")
        if name in config
    }
    start = int(
        max(0.0, to_float(history.settings.get(LEARNING_START)), _SHORT_SHARE * history.last_step)
    )
    if get_epsilon(0) <= _MIN_EXPLORATION and history.is_flat():
        yield Located(
            Finding(
                title="Exploration never began",
                evidence=f"epsilon is {get_epsilon(0):g} from the first step on, so there is no "
                "exploration: the run keeps to the first rewards that it finds.",
                advice="Start with exploration_config={'initial_epsilon': 1.0}, and let it fall "
                "over a tenth of the steps or more (epsilon_timesteps).",
                figures={"epsilon": get_epsilon(0)},
                settings=settings,
            )
        )
    elif get_epsilon(start) <= _MIN_EXPLORATION and history.is_stuck():
        yield Located(
            Finding(
                title="Exploration ended too early",
                evidence=f"epsilon is {get_epsilon(start):g} already after {start:,} of "
                f"{history.last_step:,} steps, so exploration ended before learning had begun.",
                advice="Raise exploration_config's epsilon_timesteps to a tenth of the steps or "
                "more.",
                figures={"epsilon": get_epsilon(start)},
                settings=settings,
            )
        )
    elif (
        get_epsilon(history.last_step) > _MAX_EXPLORATION
        and history.is_stuck()
        and not (history.is_short() or history.is_training)
    ):
        epsilon = get_epsilon(history.last_step)
        yield Located(
            Finding(
                title="Exploration has not ended",
                evidence=f"epsilon is still {epsilon:.2g} after {history.last_step:,} steps: "
                f"{epsilon:.0%} of the actions are random, and so are most returns.",
                advice="Lower exploration_config's epsilon_timesteps or final_epsilon, or train "
                "for more steps; evaluations (--eval-every) act greedily.",
                figures={"epsilon": epsilon},
                settings=settings,
            )
        )


def _find_noise(history: RunHistory, config: Mapping[str, Any]) -> Iterator[Located]:
    name = "stddev" if config.get("type") == "GaussianNoise" else "ou_base_scale"
    size = to_float(config.get(name, 0.1))
    scales = [to_float(config.get(f"{x}_scale", 1.0)) for x in ("initial", "final")]
    if config.get("scale_schedule") is not None or not history.is_stuck():
        return
    if size * max(scales) < 1e-3:
        evidence = f"The noise of actions is {size * max(scales):g}, so there is no exploration."
        advice = f"Set exploration_config={{{name!r}: 0.1, 'initial_scale': 1.0}}."
    elif size * scales[1] >= 1.0:
        evidence = (
            f"The noise of actions is still {size * scales[1]:g} at the end, as wide as all "
            "actions, so they are practically random."
        )
        advice = f"Set exploration_config={{{name!r}: 0.1}}."
    else:
        return
    yield Located(
        Finding(
            evidence=evidence,
            advice=advice,
            settings={f"exploration_config.{name}": size},
        )
    )


def find_clipped_rewards(history: RunHistory) -> Iterator[Located]:
    """Finds clipping that makes all rewards equal."""
    clip = history.settings.get("clip_rewards")
    limit = 1.0 if clip is True else to_float(clip)
    lowest, _ = get_extremes(history.record.get_column("episode_reward_min"))
    _, highest = get_extremes(history.record.get_column("episode_reward_max"))
    is_negative, is_positive = highest < 0, lowest > 0
    if history.judged_policy or not (limit > 0 and (is_negative or is_positive)):
        return
    length = mean(history.record.get_column("episode_len_mean"))
    reward = divide(abs(mean(history.record.get_column("episode_reward_mean"))), length)
    is_clipped = abs(reward - limit) > 0.01 * limit if clip is True else reward > limit
    if not is_clipped:
        return
    sign = "negative" if is_negative else "positive"
    yield Located(
        Finding(
            evidence=f"clip_rewards={clip} replaces the rewards, which are all {sign} (on average "
            f"{reward:.3g} per step), by {'-' if is_negative else ''}{limit:g}: learning "
            "sees the same reward for all actions.",
            advice="Set clip_rewards=None; scale the rewards in the environment, or by "
            "reward_filter='ReturnStdFilter'.",
            figures={"mean_absolute_reward": reward},
            settings={"clip_rewards": clip},
        )
    )


def find_unscaled_actions(history: RunHistory) -> Iterator[Located]:
    """Finds action bounds that do not fit the actions of a policy, which are near 0 +- 1."""
    for policy_id in history.policy_ids:
        settings = history.get_policy_settings(policy_id)
        if settings.get("normalize_actions", True):
            continue
        space = history.get_action_space(policy_id)
        bounds = [
            float(max(abs(leaf.space.low).max(), abs(leaf.space.high).max()))
            for leaf in (() if space is None else action_leaves(space))
            if is_float_box(leaf.space)
        ]
        bound = max(bounds, default=math.nan)
        if _SMALL_ACTION <= bound <= _LARGE_ACTION or (space is not None and not bounds):
            continue
        size = "" if math.isnan(bound) else f" are as large as {bound:g}, and"
        yield Located(
            Finding(
                evidence=f"normalize_actions=False: the bounds of actions{size} are not mapped to "
                "the range of the policy, whose first actions are near 0, with standard "
                "deviation 1. It reaches only a small part of the actions, or mostly those beyond "
                "the bounds.",
                advice="Set environment(normalize_actions=True).",
                figures={} if math.isnan(bound) else {"action_bound": bound},
                settings={"normalize_actions": False},
            ),
            policy_id,
        )


def find_large_bounds(history: RunHistory) -> Iterator[Located]:
    """Finds bounds of observations that are far from 1, in a run that did not measure them."""
    for policy_id in history.policy_ids:
        settings = history.get_policy_settings(policy_id)
        is_filtered = settings.get("observation_filter", "NoFilter") != "NoFilter"
        is_measured = f"policy/{policy_id}/obs_magnitude" in history.record.columns
        space = history.get_observation_space(policy_id)
        if is_filtered or is_measured or space is None:
            continue
        bounds = [
            float(np.abs(np.concatenate([leaf.space.low.ravel(), leaf.space.high.ravel()])).max())
            for leaf in leaves(space)
            if is_float_box(leaf.space)
        ]
        bound = max((x for x in bounds if x < _UNBOUNDED), default=0.0)
        if bound > _LARGE_BOUND:
            yield Located(
                Finding(
                    evidence=f"The bounds of observations are as large as {bound:.2g}, but "
                    f"{SATURATION}.",
                    advice=FILTER_ADVICE,
                    figures={"observation_bound": bound},
                    settings={"observation_filter": "NoFilter"},
                ),
                policy_id,
            )


def find_rare_rewards(history: RunHistory) -> Iterator[Located]:
    std = history.record.get_column("recent_returns/std")
    _, best = get_extremes(history.record.get_column("episode_reward_max"))
    is_known, is_equal = np.isfinite(std), (std == 0) & ~_find_constant_sums(history)
    share = mean(is_equal[is_known])
    if is_known.sum() >= MIN_ROWS and share > 0.5:
        yield Located(
            Finding(
                evidence=f"In {share:.0%} of the iterations all recent episodes have the same "
                f"return; the best return so far is {best:.4g}. Rewards are too rare to "
                "learn from.",
                advice="Add intermediate rewards, or explore more (entropy_coeff, "
                "exploration_config).",
                figures={"recent_returns/std": 0.0, "episode_reward_max": best},
            )
        )


def _find_constant_sums(history: RunHistory) -> np.ndarray:
    """Returns in which iterations all returns are the same, though those of policies differ."""

    def differs(prefix: str) -> np.ndarray:
        low, high = (history.record.get_column(f"{prefix}{x}") for x in ("min", "max"))
        is_different: np.ndarray = low < high
        return is_different

    policies = [differs(f"policy/{pid}/return_") for pid in history.policy_ids]
    is_constant: np.ndarray = np.any(policies, axis=0) & ~differs("episode_reward_")
    return is_constant


def find_high_temperature(history: RunHistory) -> Iterator[Located]:
    """Finds an entropy (SAC) that is worth more than the rewards."""
    length = mean(history.record.get_column("episode_len_mean"))
    for policy_id in history.policy_ids:
        alpha = mean(get_end(history.get_column(policy_id, "alpha_value")))
        target = mean(history.get_column(policy_id, "target_entropy"))
        facts = history.get_action_facts(policy_id)
        limit = facts.max_entropy + facts.components * math.log(2)  # uniform in [-1, 1]
        if target >= limit:
            yield Located(
                Finding(
                    evidence=f"target_entropy is {target:.3g}, but random actions have only "
                    f"{limit:.3g} nats, so the temperature rises (alpha is {alpha:.3g}) and the "
                    "policy is trained to act at random.",
                    advice="Set target_entropy=None, minus the number of components of an action.",
                    figures={"alpha_value": alpha, "target_entropy": target},
                    settings={"target_entropy": history.settings.get("target_entropy")},
                ),
                policy_id,
            )
            continue
        has_returns = np.isfinite(history.get_column(policy_id, "return_min")).any()
        prefix = f"policy/{policy_id}/return_" if has_returns else "episode_reward_"
        bounds = [history.record.get_column(f"{prefix}{x}") for x in ("min", "max")]
        reward = divide(get_extremes(np.abs(bounds))[1], length)
        bonus = alpha * max(1.0, abs(target))
        if bonus > _MAX_BONUS_FACTOR * reward:
            yield Located(
                Finding(
                    evidence=f"The temperature (alpha is {alpha:.3g}) makes entropy worth about "
                    f"{bonus:.2g} per step, but rewards are only {reward:.2g} per step, so the "
                    "policy is trained to act at random.",
                    advice="Scale the rewards up (to about 1 per step), lower initial_alpha, or "
                    "raise entropy_lr.",
                    figures={"alpha_value": alpha, "reward_per_step": reward},
                    settings={"initial_alpha": history.settings.get("initial_alpha")},
                ),
                policy_id,
            )


def find_unpredictable_actions(history: RunHistory) -> Iterator[Located]:
    """Finds data whose actions cannot be predicted from observations."""
    if not history.reads_data:
        return
    is_weighted = to_float(history.settings.get("beta", 0.0)) > 0  # by advantages
    limit = _WEIGHTED_GUESSING_SHARE if is_weighted else _GUESSING_SHARE
    for policy_id in history.policy_ids:
        loss = history.get_column(policy_id, "policy_loss")
        loss = loss[np.isfinite(loss)]
        facts = history.get_action_facts(policy_id)
        guessing = facts.max_entropy + facts.components * NORMAL_ENTROPY
        if len(loss) < MIN_ROWS or math.isnan(guessing):
            continue
        last = mean(get_end(loss))
        fall = (float(loss[0]) - last) / abs(guessing) if guessing else 0.0
        if not (last > limit * guessing and fall < _MIN_LOSS_FALL):
            continue
        course = f"The loss went from {loss[0]:.3g} to {last:.3g}, and guessing has {guessing:.3g}"
        rate = median(history.get_column(policy_id, "cur_lr"))
        if rate < _MIN_IMITATION_LR:
            finding = Finding(
                title="lr is too small",
                evidence=f"{course}: with lr={rate:.2g} the policy hardly changes.",
                advice="Raise lr; 1e-4 to 1e-3 is usual.",
                figures={"policy_loss": last, "cur_lr": rate},
                settings={"lr": rate},
            )
        else:
            finding = Finding(
                evidence=f"{course}: the recorded actions cannot be predicted from the recorded "
                "observations.",
                advice="Check the data (tfpolicies data show): whether actions belong to the "
                "observations of the same row, and whether a policy chose them, not chance.",
                figures={"policy_loss": last, "loss_of_guessing": guessing},
                settings={"input_": history.settings.get("input_")},
            )
        yield Located(finding, policy_id)


def find_falling_loss(history: RunHistory) -> Iterator[Located]:
    """Finds imitation that was ended while its loss still fell."""
    for policy_id in history.policy_ids if history.reads_data else ():
        loss = history.get_column(policy_id, "policy_loss")
        loss = loss[np.isfinite(loss)]
        quarter = len(loss) // 4
        if quarter < 2:
            continue
        fall = loss[-2 * quarter : -quarter].mean() - loss[-quarter:].mean()
        if fall > 0.1 * abs(loss[0] - loss[-quarter:].mean()) > 0:
            yield Located(
                Finding(
                    evidence=f"The loss still falls: it was {loss[0]:.3g} and is {loss[-1]:.3g}.",
                    advice="Train for more epochs (--epochs, --steps), or raise lr.",
                    figures={"policy_loss": float(loss[-1])},
                    settings={"lr": history.settings.get("lr")},
                ),
                policy_id,
            )


def find_poor_data(history: RunHistory) -> Iterator[Located]:
    """Finds a policy that imitates well and plays badly."""
    if not history.reads_data or not len(history.evaluation.values):
        return
    yield Located(
        Finding(
            evidence=f"The loss is learned, but evaluations have a mean return of "
            f"{history.evaluation.last:.4g}: the policy acts as the data do, and still plays "
            "badly. It comes to states that the data do not cover, or the data are that bad.",
            advice="Compare with the returns of the data (tfpolicies data show). Record more "
            "episodes and better ones, also from the states that the policy comes to; MARWIL "
            "(beta=1) prefers the better rows.",
            figures={"evaluation/episode_reward_mean": history.evaluation.last},
        )
    )


RULES = (
    HistoryRule(
        name="large_bounds",
        title="Observations may be too large",
        find=find_large_bounds,
    ),
    HistoryRule(
        name="untrained_policy",
        title="A policy is not trained",
        find=find_untrained_policies,
        needs_stuck=False,
    ),
    HistoryRule(
        name="exploration",
        title="Exploration does not fit the run",
        find=find_exploration,
        needs_stuck=False,
    ),
    HistoryRule(
        name="clipped_rewards",
        title="Clipping makes all rewards equal",
        find=find_clipped_rewards,
    ),
    HistoryRule(
        name="unscaled_actions",
        title="Actions are not scaled to their bounds",
        find=find_unscaled_actions,
    ),
    HistoryRule(
        name="unpredictable_actions",
        title="The data do not say why their actions were taken",
        find=find_unpredictable_actions,
        needs_stuck=False,
    ),
    HistoryRule(
        name="high_temperature",
        title="Entropy is worth more than the rewards",
        find=find_high_temperature,
    ),
    HistoryRule(
        name="unequal_progress",
        title="One policy does not learn",
        find=find_unequal_progress,
        is_symptom=True,
        needs_stuck=False,
    ),
    HistoryRule(
        name="falling_loss",
        title="Imitation has not ended",
        find=find_falling_loss,
        is_symptom=True,
    ),
    HistoryRule(
        name="poor_data",
        title="The data do not cover the states that the policy meets",
        find=find_poor_data,
        is_symptom=True,
    ),
    HistoryRule(
        name="rare_rewards",
        title="Rewards are rare",
        find=find_rare_rewards,
        is_symptom=True,
    ),
)
