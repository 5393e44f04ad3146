"""Rules that find why a run does not learn, in the statistics of one iteration.

Training applies them to each of its iterations (`health_checks.py`), and `diagnose` to the rows of
a run that is read back. The table at the end ranks them, with the likeliest cause first.

The limits are chosen so that runs that learn are far from them. Sources: Schulman et al. 2017
(KL divergence, clipping), Engstrom et al. 2020 (arXiv:2005.12729: scales of observations and
rewards), Andrychowicz et al. 2021 (arXiv:2006.05990: discount, entropy, gradient clipping).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfpolicies.algorithms.health_stats import PolicyStats, RunStats, to_float
from tfpolicies.config.run_sections import needs_environment

_NUM_ITERATIONS = 3  # iterations in which a rule applies before it is reported
_SYMPTOM_NUM_ITERATIONS = 5  # the same for a symptom, whose cause may take longer to show
_MAX_CLIPPED_SHARE = 0.5  # share of the rows of a batch that counts as most of them
_MAX_KL_FACTOR = 10  # multiple of its target at which a KL divergence is far too large
_MIN_KL_FACTOR = 1e-3  # share of its target at which a KL divergence is nearly 0
_SMALL_LR = 1e-5  # learning rate above which other causes explain a KL near 0
_LARGE_LR = 0.03  # learning rate of Adam above which networks hardly learn
_MIN_LR = 1e-6  # learning rate below which networks hardly change in a usual run
_MIN_ENTROPY_SHARE = 0.01  # of the largest entropy of discrete actions
_MAX_ENTROPY_SHARE = 0.95  # of the largest entropy of discrete actions
_MIN_ACTION_STD = 0.01  # standard deviation of a continuous action, in units of the policy
_MAX_ACTION_STD = 2.0  # in the same units; initially it is 1
# Multiple of the policy's objective at which the entropy bonus dominates
_MAX_ENTROPY_BONUS_FACTOR = 10
_LARGE_OBS = 1e3  # observations of this size saturate networks
_LARGE_VALUE_ERROR = 1e3  # value error that networks do not learn to correct
_LARGE_REWARD = 1e3  # of a step; values of 1e3 and more are too large for networks in any case
_MIN_EXPLAINED_VARIANCE = 0.1  # explained variance above which the value function is learning
_MAX_VALUE_FACTOR = 3  # multiple of the largest possible return at which values explode
_MAX_EQUAL_RETURNS = 100  # episodes with the same return before a warning
_MAX_EPISODES_RATIO = 1.5  # maximum ratio of all episodes to checked episodes
MAX_STEPS_WITHOUT_END = 10_000  # steps per environment without an episode end before a warning
_MAX_STEPS_PER_UPDATE = 8  # with replay: more steps per update hardly learn
LEARNING_START = "num_steps_sampled_before_learning_starts"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a rule that applies.

    Attributes:
        evidence: sentences that describe the fault, with the figures that show it.
        advice: sentences that say what to change.
        figures: the figures, by column or statistic.
        settings: the settings that change it, with their current values.
        title: names the cause more exactly than its rule, in a few words; "" if not.
    """

    evidence: str
    advice: str
    title: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> str:
        """Evidence and advice as one text."""
        return f"{self.evidence} {self.advice}"


UNDECIDED = Finding(evidence="", advice="")
"""Returned by a rule that cannot be decided yet; symptoms wait for it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule for a run or a policy.

    Attributes:
        name: names the cause, in output for machines.
        title: names the cause in a few words.
        find: returns a finding, None if the rule does not apply, or `UNDECIDED`.
        num_iterations: consecutive iterations in which it must apply.
        is_symptom: whether causes of higher rank explain it.
        is_setup_check: whether it also applies to runs whose returns grow.
        is_of_run: whether it looks at `RunStats`, not at `PolicyStats`.
    """

    name: str
    title: str
    find: Callable[[Any], Finding | None]
    num_iterations: int = _NUM_ITERATIONS
    is_symptom: bool = False
    is_setup_check: bool = False
    is_of_run: bool = False


# -- rules of the whole run -------------------------------------------------------------------


def _find_no_training(run: RunStats) -> Finding | None:
    waits = run.env_steps <= run.get_number(LEARNING_START)
    if run.has_learned or not run.steps_sampled > 0 or waits:
        return None
    return Finding(
        evidence=f"An iteration sampled {run.steps_sampled:.0f} steps, but updated no policy.",
        advice="Check policies_to_train, and the policies that policy_mapping_fn returns for "
        "agents.",
        figures={"steps_sampled": run.steps_sampled},
        settings={"policies_to_train": run.settings.get("policies_to_train", None)},
    )


def _find_endless_episodes(run: RunStats) -> Finding | None:
    if run.episodes_total or not needs_environment(run.settings.get("input_", None)):
        return None
    steps = run.env_steps // max(1, run.num_envs)
    if steps < MAX_STEPS_WITHOUT_END:
        return UNDECIDED
    return Finding(
        evidence=f"{_describe_environment(run)}: no episode has ended after {steps:,} steps of "
        "each environment, so the mean return is nan.",
        advice="If episodes never end, give the environment a time limit: "
        "gymnasium.wrappers.TimeLimit(env, max_episode_steps=1000).",
        figures={"episodes": 0, "env_steps": run.env_steps},
    )


def _find_equal_returns(run: RunStats) -> Finding | None:
    if math.isnan(run.equal_return):
        return None
    smoothing = run.get_number("metrics_num_episodes_for_smoothing")
    if run.window < min(_MAX_EQUAL_RETURNS, smoothing):
        return UNDECIDED
    if run.first_returns is not None and run.first_returns.are_below(run.equal_return):
        return None  # it may be the best return
    return Finding(
        evidence=f"{_describe_environment(run)}: the return was {run.equal_return:g} in each of "
        f"the last {run.window} episodes, so nothing tells good actions from bad ones.",
        advice="Add intermediate rewards, or explore more (entropy_coeff, exploration_config).",
        figures={"episode_reward_min": run.equal_return, "episode_reward_max": run.equal_return},
    )


def _find_few_updates(run: RunStats) -> Finding | None:
    settings, batch_size = run.settings, run.get_number("train_batch_size")
    updates = run.steps_trained / batch_size if batch_size else math.nan
    reads_data = not needs_environment(settings.get("input_", None))
    if settings.get("training_intensity", 0) is not None or not updates > 0 or reads_data:
        return None
    steps = run.steps_sampled / updates
    if steps < _MAX_STEPS_PER_UPDATE:
        return None
    return Finding(
        evidence=f"There is one update per {steps:.0f} sampled steps, since {run.num_envs} "
        "environments step between two updates.",
        advice=f"For one update per step set training_intensity={batch_size:.0f}, or step fewer "
        "environments (num_envs_per_worker, --num-envs).",
        figures={"steps_per_update": steps},
        settings={"training_intensity": None},
    )


def _describe_environment(run: RunStats) -> str:
    return f"Environment {run.env_name!r:.200}"


# -- rules of one policy ----------------------------------------------------------------------


def _find_equal_policy_returns(policy: PolicyStats) -> Finding | None:
    """Finds one of several policies whose agents got the same return since the start."""
    if len(policy.run.policy_means) < 2:
        return None  # `_find_equal_returns` looks at the returns of a single policy
    are_most = policy.run.episodes_total < _MAX_EPISODES_RATIO * policy.window
    if policy.window < _MAX_EQUAL_RETURNS or math.isnan(policy.equal_return) or not are_most:
        return None
    return Finding(
        evidence=f"the return of its agents was {policy.equal_return:g} in each of the last "
        f"{policy.window} episodes, so nothing tells good actions from bad ones.",
        advice="Check the rewards that the environment gives to these agents, and "
        "policy_mapping_fn.",
        figures={"return_mean": policy.equal_return},
    )


def _find_equal_observations(policy: PolicyStats) -> Finding | None:
    if policy.get_metric("obs_range") != 0.0:
        return None
    return Finding(
        evidence="all observations are the same, so actions cannot depend on the state.",
        advice="Check that the environment's reset and step return the current observation, not "
        "the same array.",
        figures={"obs_range": 0.0},
    )


SATURATION = "networks learn from numbers near 1: larger ones saturate them"
FILTER_ADVICE = (
    "Set rollouts(observation_filter='MeanStdFilter') (on the command line: --set "
    "observation_filter=MeanStdFilter), or scale them in the environment."
)


def _find_large_observations(policy: PolicyStats) -> Finding | None:
    obs_magnitude = policy.get_metric("obs_magnitude")
    if policy.settings.get("observation_filter", "NoFilter") != "NoFilter":
        return None
    if not obs_magnitude > _LARGE_OBS:
        return None
    return Finding(
        evidence=f"observations have magnitude {obs_magnitude:.2g}, but {SATURATION}.",
        advice=FILTER_ADVICE,
        figures={"obs_magnitude": obs_magnitude},
        settings={"observation_filter": "NoFilter"},
    )


def _find_short_horizon(policy: PolicyStats) -> Finding | None:
    gamma, length = policy.get_number("gamma"), policy.run.length_mean
    if not 0 <= gamma < 1:
        return None
    horizon = 1 / (1 - gamma)
    if not length > 4 * horizon**2:
        return None
    horizon_text = "counts only the next reward"
    if gamma > 0:
        horizon_text = f"looks 1 / (1 - gamma) = {horizon:.3g} steps ahead"
    return Finding(
        evidence=f"gamma={gamma:g} {horizon_text}, but episodes last {length:.0f} steps on "
        "average. Rewards that come later hardly count.",
        advice="Set training(gamma=0.99) (on the command line: --set gamma=0.99).",
        figures={"episode_len_mean": length},
        settings={"gamma": gamma},
    )


def _find_entropy_bonus(policy: PolicyStats) -> Finding | None:
    coefficient, loss = policy.get_stat("entropy_coeff"), abs(policy.get_stat("policy_loss"))
    entropy = policy.get_entropy()
    bonus = coefficient * abs(entropy)
    if not bonus > _MAX_ENTROPY_BONUS_FACTOR * loss or loss == 0:
        return None
    if not entropy > policy.actions.get_entropy(_MAX_ENTROPY_SHARE, _MAX_ACTION_STD):
        return None
    return Finding(
        evidence=f"the entropy bonus (entropy_coeff={coefficient:g} times {entropy:.2g} nats) is "
        f"{bonus / loss:.0f} times as large as the policy's objective (policy_loss is "
        f"{loss:.2g}), so the policy is trained to act at random.",
        advice="Lower entropy_coeff; 0 to 0.01 is usual.",
        figures={"entropy": entropy, "policy_loss": loss},
        settings={"entropy_coeff": coefficient},
    )


def _find_small_steps(policy: PolicyStats) -> Finding | None:
    kl, target = policy.get_stat("kl"), policy.get_number("kl_target")
    rates = policy.get_learning_rates()
    highest = max(rates.values(), default=math.nan)
    if kl < _MIN_KL_FACTOR * target and highest < _SMALL_LR:
        symptom = (
            f"an iteration changes the policy by a KL divergence of {max(kl, 0.0):.2g}, nearly 0"
        )
    elif math.isnan(kl) and highest < _MIN_LR:
        symptom = "the learning rate is nearly 0"
    else:
        return None
    return Finding(
        evidence=f"{symptom}, so it hardly learns.",
        advice=f"Raise {format_learning_rates(policy)}; 1e-4 to 1e-3 is usual.",
        figures=_without_nan(kl=kl),
        settings=rates,
    )


def _find_large_steps(policy: PolicyStats) -> Finding | None:
    kl, target = policy.get_stat("kl"), policy.get_number("kl_target")
    rates = policy.get_learning_rates()
    if math.isnan(kl) and max(rates.values(), default=math.nan) > _LARGE_LR:
        return Finding(
            evidence="the learning rate is far over the usual 1e-4 to 1e-3, so each update undoes "
            "earlier learning.",
            advice=f"Lower {format_learning_rates(policy)}.",
            figures={f"cur_{name}": rate for name, rate in rates.items()},
            settings=rates,
        )
    if not (kl > _MAX_KL_FACTOR * target and policy.get_stat("cur_kl_coeff") > 0):
        return None
    rate, num_sgd_iter = policy.get_stat("cur_lr"), policy.settings.get("num_sgd_iter", None)
    return Finding(
        evidence=f"an iteration changes the policy by a KL divergence of {kl:.2g}, far over "
        f"kl_target={target:g}.",
        advice=f"Lower lr (now {rate:.2g}) or num_sgd_iter (now {num_sgd_iter}).",
        figures={"kl": kl},
        settings={"lr": rate, "num_sgd_iter": num_sgd_iter},
    )


def _find_exploding_values(policy: PolicyStats) -> Finding | None:
    reward, max_return = _get_max_return(policy)
    loss, value = policy.get_stat("vf_loss"), abs(policy.get_stat("mean_q"))
    limit = _MAX_VALUE_FACTOR * max_return
    if not (reward > 0 and (value > limit or _sqrt(loss) > limit)):
        return None
    gamma = policy.get_number("gamma")
    symptom = f"vf_loss is {loss:.2g}" if math.isnan(value) else f"the mean value is {value:.2g}"
    return Finding(
        evidence=f"{symptom}, although rewards of at most {reward:.2g} with gamma={gamma:g} make "
        f"no value larger than {max_return:.2g}: the value function explodes.",
        advice=f"Lower {format_learning_rates(policy)}, or set grad_clip=0.5; with target "
        "networks, update them less often.",
        figures=_without_nan(vf_loss=loss, mean_q=value, reward_magnitude=reward),
        settings=policy.get_learning_rates(),
    )


def _find_large_rewards(policy: PolicyStats) -> Finding | None:
    loss = policy.get_stat("vf_loss")
    error = abs(policy.get_stat("mean_td_error")) if math.isnan(loss) else _sqrt(loss)
    is_learning = policy.get_stat("vf_explained_var") > _MIN_EXPLAINED_VARIANCE
    reward = policy.get_metric("reward_magnitude")
    if is_learning or not (error > _LARGE_VALUE_ERROR or reward > _LARGE_REWARD):
        return None
    if not reward > _LARGE_REWARD and _find_exploding_values(policy):
        return None
    reason = "" if math.isnan(reward) else f"since rewards are as large as {reward:.2g}: "
    return Finding(
        evidence=f"values are wrong by {error:.2g} on average, {reason}networks learn values near "
        "1 to 100.",
        advice="Scale the rewards down, for example by gymnasium.wrappers.TransformReward, or set "
        "clip_rewards=1.0.",
        figures=_without_nan(
            vf_loss=loss,
            mean_td_error=policy.get_stat("mean_td_error"),
            reward_magnitude=reward,
        ),
        settings={"clip_rewards": policy.settings.get("clip_rewards", None)},
    )


def _get_max_return(policy: PolicyStats) -> tuple[float, float]:
    """Returns the largest absolute reward so far, and the largest return that it allows."""
    gamma, reward = policy.get_number("gamma"), policy.get_metric("reward_magnitude")
    horizon = 1 / (1 - gamma) if gamma < 1 else policy.run.length_max
    bonus = policy.get_stat("alpha_value") * 10 * max(1.0, abs(policy.get_stat("target_entropy")))
    return reward, (reward + (0.0 if math.isnan(bonus) else bonus)) * horizon


def _find_no_advantages(policy: PolicyStats) -> Finding | None:
    if policy.get_stat("policy_loss") != 0.0:
        return None
    return Finding(
        evidence="policy_loss is exactly 0, since all advantages are 0: the rewards make no "
        "difference between actions, and nothing is trained.",
        advice="Check the rewards of the environment, and clip_rewards.",
        figures={"policy_loss": 0.0},
        settings={"clip_rewards": policy.settings.get("clip_rewards", None)},
    )


def _find_low_entropy(policy: PolicyStats) -> Finding | None:
    entropy = policy.get_entropy()
    if not entropy < policy.actions.get_entropy(_MIN_ENTROPY_SHARE, _MIN_ACTION_STD):
        return None
    coefficient = to_float(policy.settings.get("entropy_coeff", 0.0))
    return Finding(
        evidence=f"the entropy is {entropy:.2g} nats, so the policy nearly always takes the same "
        "action in the same state and no longer explores.",
        advice=f"Raise entropy_coeff (now {coefficient:g}) or lower "
        f"{format_learning_rates(policy)}.",
        figures={"entropy": entropy},
        settings={"entropy_coeff": coefficient, **policy.get_learning_rates()},
    )


def _find_clipped_value_errors(policy: PolicyStats) -> Finding | None:
    share = policy.get_stat("vf_clipped")
    if not share > _MAX_CLIPPED_SHARE:
        return None
    mean = policy.run.policy_means.get(policy.policy_id, policy.run.mean)
    returns = f" (the mean return is {mean:.4g})" if math.isfinite(mean) else ""
    limit = policy.get_number("vf_clip_param")
    return Finding(
        evidence=f"in {share:.0%} of the rows the estimated value is so far from the return"
        f"{returns} that its squared error is above vf_clip_param={limit:g}. The value function "
        "learns nothing from such rows.",
        advice="Set training(vf_clip_param=float('inf')) (on the command line: --set "
        "vf_clip_param=inf), or scale the rewards down.",
        figures={"vf_clipped": share},
        settings={"vf_clip_param": limit},
    )


def format_learning_rates(policy: PolicyStats) -> str:
    """Returns the names and current values of the learning rates, for a sentence."""
    rates = policy.get_learning_rates().items()
    return " and ".join(f"{name} (now {rate:.2g})" for name, rate in rates) or "lr"


def _sqrt(number: float) -> float:
    return math.sqrt(max(number, 0.0))


def _without_nan(**figures: float) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not math.isnan(value)}


_RULES = (
    Rule(
        name="no_training",
        title="No policy was trained",
        find=_find_no_training,
        is_setup_check=True,
        is_of_run=True,
    ),
    Rule(
        name="endless_episodes",
        title="No episode ends",
        find=_find_endless_episodes,
        num_iterations=1,
        is_setup_check=True,
        is_of_run=True,
    ),
    Rule(
        name="few_updates",
        title="Too few updates for the sampled steps",
        find=_find_few_updates,
        is_setup_check=True,
        is_of_run=True,
    ),
    Rule(
        name="equal_returns",
        title="All episodes have the same return",
        find=_find_equal_returns,
        num_iterations=1,
        is_symptom=True,
        is_of_run=True,
    ),
    Rule(
        name="equal_policy_returns",
        title="All episodes have the same return for a policy",
        find=_find_equal_policy_returns,
        num_iterations=1,
        is_setup_check=True,
    ),
    Rule(
        name="equal_observations",
        title="All observations are the same",
        find=_find_equal_observations,
    ),
    Rule(
        name="large_observations",
        title="Observations are too large",
        find=_find_large_observations,
    ),
    Rule(
        name="short_horizon",
        title="gamma is too small for the episodes",
        find=_find_short_horizon,
    ),
    Rule(
        name="entropy_bonus",
        title="The entropy bonus dominates",
        find=_find_entropy_bonus,
    ),
    Rule(
        name="small_steps",
        title="The learning rate is too small",
        find=_find_small_steps,
        is_symptom=True,
    ),
    Rule(
        name="large_steps",
        title="Updates change the policy too much",
        find=_find_large_steps,
        is_symptom=True,
    ),
    Rule(
        name="exploding_values",
        title="The value function explodes",
        find=_find_exploding_values,
        is_symptom=True,
    ),
    Rule(
        name="large_rewards",
        title="Rewards are too large",
        find=_find_large_rewards,
        is_symptom=True,
    ),
    Rule(
        name="no_advantages",
        title="Rewards do not depend on actions",
        find=_find_no_advantages,
        is_symptom=True,
    ),
    Rule(
        name="low_entropy",
        title="The policy no longer explores",
        find=_find_low_entropy,
        num_iterations=_SYMPTOM_NUM_ITERATIONS,
        is_symptom=True,
    ),
    Rule(
        name="clipped_value_errors",
        title="The value function learns nothing from most rows",
        find=_find_clipped_value_errors,
        num_iterations=_SYMPTOM_NUM_ITERATIONS,
        is_symptom=True,
    ),
)

RULES: Mapping[str, Rule] = {rule.name: rule for rule in _RULES}
"""Rules by name, with the likeliest cause first."""
