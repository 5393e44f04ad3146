"""Warnings about a run that does not learn, based on the statistics of its iterations.

Checks are ranked, with the likeliest cause first. Each is reported once per run, with the statistic
that shows it and the setting that changes it, after it has failed in several consecutive
iterations. A symptom is not reported while a check of higher rank fails, or cannot be decided yet,
since that explains it. If returns have grown, the run is learning, and only its setup is checked.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.batch.leaves import iterate_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.envs.env_registry import get_env_name
from tfpolicies.models.spaces import action_leaves, choices_per_cell, is_float_box
from tfpolicies.rollout.episode import RolloutMetrics

if TYPE_CHECKING:
    from tfpolicies.config.algorithm_config import AlgorithmConfig

logger = logging.getLogger("tfpolicies")

_NUM_ITERATIONS = 3  # iterations in which a check fails before it is reported
_SYMPTOM_NUM_ITERATIONS = 5  # the same for a symptom, whose cause may take longer to show
_MIN_EPISODES = 40  # finished episodes: twice the number of first returns
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
_NUM_MEASURED_ROWS = 64  # rows of a batch used to measure the magnitude of observations
_LARGE_VALUE_ERROR = 1e3  # value error that networks do not learn to correct
_MIN_EXPLAINED_VARIANCE = 0.1  # explained variance above which the value function is learning
_MAX_VALUE_FACTOR = 3  # multiple of the largest possible return at which values explode
_MAX_EQUAL_RETURNS = 100  # episodes with the same return before a warning
_MAX_EPISODES_RATIO = 1.5  # maximum ratio of all episodes to checked episodes
_MAX_STEPS_WITHOUT_END = 10_000  # steps per environment without an episode end before a warning
_MAX_STEPS_PER_UPDATE = 8  # with replay: more steps per update hardly learn
_LEARNING_START = "num_steps_sampled_before_learning_starts"

_UNDECIDED = ""
"""Returned by a check that cannot be decided yet; symptoms wait for it."""


class PolicyStats(NamedTuple):
    """The statistics of one policy after an iteration."""

    policy_id: str
    stats: Mapping[str, Any]  # `learner_stats`
    config: Mapping[str, Any]  # of the policy
    action_space: gym.Space
    result: Mapping[str, Any]  # of the iteration
    obs_magnitude: float = math.nan  # magnitude of its observations, see `RowMagnitudes`
    reward_magnitude: float = math.nan  # largest absolute reward so far

    def get_stat(self, name: str) -> float:
        """Returns a statistic; NaN, so that comparisons are false, if there is none."""
        value = self.stats.get(name)
        return float(value) if isinstance(value, int | float) else math.nan

    def get_setting(self, name: str) -> float:
        """Returns a numeric setting; NaN if there is none."""
        value = self.config.get(name)
        return float(value) if isinstance(value, int | float) else math.nan

    def get_learning_rates(self) -> dict[str, float]:
        names = [name for name in self.stats if name.startswith("cur_") and name.endswith("lr")]
        return {name.removeprefix("cur_"): self.get_stat(name) for name in names}


class RunStats(NamedTuple):
    """The statistics of the whole run after an iteration."""

    result: Mapping[str, Any]
    config: AlgorithmConfig
    episodes: Sequence[RolloutMetrics]  # the newest
    num_envs: int  # of all workers
    first_returns: Sequence[float] | None = ()  # of the first episodes; None if unknown

    def get_steps(self, name: str) -> int:
        """Returns the sampled or trained steps of this iteration, in the unit of the run."""
        return int(self.result[f"num_{self.config.count_steps_by}_{name}_this_iter"])

    def has_improved(self) -> bool:
        """Returns whether recent returns exceed the first ones by one standard deviation."""
        if self.first_returns is None:
            return True
        mean = self.result.get("recent_returns", {}).get("mean", math.nan)
        if not self.first_returns:
            return False
        first_mean, spread = float(np.mean(self.first_returns)), float(np.std(self.first_returns))
        return bool(mean > first_mean + max(spread, 1e-6 * abs(first_mean)))


class RowMagnitudes:
    """Measures the magnitude of the observations and rewards that policies learn from."""

    def __init__(self) -> None:
        self._obs: dict[str, float] = {}
        self._rewards: dict[str, float] = {}

    def begin_iteration(self) -> None:
        self._obs.clear()

    def measure(self, policy_id: str, batch: SampleBatch) -> None:
        """Measures the observations of the first batch of an iteration, and all rewards."""
        if policy_id not in self._obs and SampleBatch.OBS in batch:
            magnitudes = [
                _largest_component(leaf) for leaf in iterate_leaves(batch[SampleBatch.OBS])
            ]
            self._obs[policy_id] = max(magnitudes, default=math.nan)
        rewards = batch.get(SampleBatch.REWARDS)
        if rewards is not None and len(rewards):
            largest = float(np.abs(rewards).max())
            self._rewards[policy_id] = max(largest, self._rewards.get(policy_id, 0.0))

    def get(self, policy_id: str) -> tuple[float, float]:
        """Returns the magnitudes of a policy's observations and rewards; NaN if not measured."""
        obs = self._obs.get(policy_id, math.nan)
        return obs, self._rewards.get(policy_id, math.nan)


def _largest_component(leaf: np.ndarray) -> float:
    """Returns the root mean square, over some rows, of the largest component; 0 for bytes."""
    rows = np.asarray(leaf)
    if rows.ndim < 2 or rows.dtype.kind not in "fi" or not rows.size:
        return 0.0
    rows = rows[:: max(1, len(rows) // _NUM_MEASURED_ROWS)].astype(np.float64)
    return float(np.sqrt(np.square(rows).mean(axis=0).max()))


class HealthCheck(NamedTuple):
    """One check of a run or policy.

    Attributes:
        function: returns a warning if the check fails, None if it passes, or `_UNDECIDED`.
        num_iterations: consecutive iterations in which it must fail.
        is_symptom: whether failed checks of higher rank explain it.
        is_setup_check: whether it also applies to runs whose returns grow.
    """

    function: Callable[[Any], str | None]
    num_iterations: int = _NUM_ITERATIONS
    is_symptom: bool = False
    is_setup_check: bool = False


class HealthChecks:
    """Warns why a run does not learn, as soon as results show it."""

    def __init__(self) -> None:
        self._failed_iterations: Counter[tuple[str, str]] = Counter()
        self._reported_names: set[str] = set()

    def check(self, run_stats: RunStats, policy_stats: Iterable[PolicyStats]) -> None:
        """Checks an iteration, and logs a warning for each newly failed check.

        Args:
            run_stats: statistics of the whole run.
            policy_stats: statistics of the policies that learned.
        """
        has_improved = run_stats.has_improved()
        steps = run_stats.result["num_env_steps_sampled"] // max(1, run_stats.num_envs)
        ready = (
            run_stats.result["episodes_total"] >= _MIN_EPISODES or steps >= _MAX_STEPS_WITHOUT_END
        )
        policies = [*policy_stats]
        failed_ids: set[str] = set()  # ids of policies that failed a check of higher rank
        for name, health_check in _CHECKS.items():
            subjects = [run_stats] if name in _RUN_CHECKS else policies
            for subject in subjects:
                policy_id = getattr(subject, "policy_id", "")
                message = None
                if health_check.is_setup_check or not has_improved:
                    message = health_check.function(subject)
                waits = not (
                    ready or health_check.is_setup_check
                )  # returns may not show learning yet
                waits |= health_check.is_symptom and not failed_ids.isdisjoint({"", policy_id})
                if message is not None:
                    failed_ids.add(policy_id)
                self._report(name, policy_id, message, health_check.num_iterations, waits=waits)

    def _report(
        self, name: str, policy_id: str, message: str | None, num_iterations: int, *, waits: bool
    ) -> None:
        key = name, policy_id
        if not message:
            self._failed_iterations.pop(key, None)
            return
        self._failed_iterations[key] += 1
        if (
            self._failed_iterations[key] >= num_iterations
            and not waits
            and name not in self._reported_names
        ):
            self._reported_names.add(name)
            logger.warning("%s%s", f"Policy {policy_id!r}: " if policy_id else "", message)


# -- checks of the whole run ------------------------------------------------------------------


def _check_training(run: RunStats) -> str | None:
    waits = run.result["num_env_steps_sampled"] <= run.config.get(_LEARNING_START, 0)
    if run.result["info"]["learner"] or not run.get_steps("sampled") or waits:
        return None
    return (
        f"An iteration sampled {run.get_steps('sampled')} steps, but updated no policy. Check "
        "policies_to_train, and the policies that policy_mapping_fn returns for agents."
    )


def _check_episode_ends(run: RunStats) -> str | None:
    if run.result["episodes_total"] or not needs_environment(run.config.input_):
        return None
    steps = run.result["num_env_steps_sampled"] // max(1, run.num_envs)
    if steps < _MAX_STEPS_WITHOUT_END:
        return _UNDECIDED
    return (
        f"{_describe_environment(run)}: no episode has ended after {steps:,} steps of each "
        "environment, so the mean return is nan. If episodes never end, give the environment a "
        "time limit: gymnasium.wrappers.TimeLimit(env, max_episode_steps=1000)."
    )


def _check_returns(run: RunStats) -> str | None:
    returns = {
        (episode.episode_reward, frozenset(episode.agent_rewards.items()))
        for episode in run.episodes
    }
    if len(returns) != 1:
        return None
    if len(run.episodes) < min(_MAX_EQUAL_RETURNS, run.config.metrics_num_episodes_for_smoothing):
        return _UNDECIDED
    ((value, _),) = returns
    return (
        f"{_describe_environment(run)}: the return was {value:g} in each of the last "
        f"{len(run.episodes)} episodes, so nothing tells good actions from bad ones. Add "
        "intermediate rewards, or explore more (entropy_coeff, exploration_config)."
    )


def _check_intensity(run: RunStats) -> str | None:
    config = run.config
    updates = run.get_steps("trained") / config.train_batch_size
    reads_data = not needs_environment(config.input_)
    if config.get("training_intensity", 0) is not None or not updates or reads_data:
        return None
    steps = run.get_steps("sampled") / updates
    if steps < _MAX_STEPS_PER_UPDATE:
        return None
    return (
        f"There is one update per {steps:.0f} sampled steps, since {run.num_envs} environments "
        "step between two updates. For one update per step set training_intensity="
        f"{config.train_batch_size}, or step fewer environments (num_envs_per_worker, --num-envs)."
    )


def _describe_environment(run: RunStats) -> str:
    return f"Environment {get_env_name(run.config.env)!r:.200}"


# -- checks of one policy ---------------------------------------------------------------------


def _check_observations(policy: PolicyStats) -> str | None:
    if policy.config.get("observation_filter", "NoFilter") != "NoFilter":
        return None
    if not policy.obs_magnitude > _LARGE_OBS:
        return None
    return (
        f"observations have magnitude {policy.obs_magnitude:.2g}, but networks learn from numbers "
        "near 1: larger ones saturate them. Set rollouts(observation_filter='MeanStdFilter'), on "
        "the command line --set observation_filter=MeanStdFilter, or scale them in the environment."
    )


def _check_policy_returns(policy: PolicyStats) -> str | None:
    """Finds one of several policies whose agents got the same return since the start."""
    result = policy.result
    if len(result.get("policy_reward_mean", {})) < 2:
        return None  # `_check_returns` checks the returns of a single policy
    returns = result.get("hist_stats", {}).get(f"policy_{policy.policy_id}_reward", ())
    are_most = result["episodes_total"] < _MAX_EPISODES_RATIO * len(returns)
    if len(returns) < _MAX_EQUAL_RETURNS or len({*returns}) > 1 or not are_most:
        return None
    return (
        f"the return of its agents was {returns[0]:g} in each of the last {len(returns)} episodes, "
        "so nothing tells good actions from bad ones. Check the rewards that the environment "
        "gives to these agents, and policy_mapping_fn."
    )


def _check_horizon(policy: PolicyStats) -> str | None:
    gamma, length = policy.get_setting("gamma"), policy.result.get("episode_len_mean", math.nan)
    if not 0 <= gamma < 1:
        return None
    horizon = 1 / (1 - gamma)
    if not length > 4 * horizon**2:
        return None
    horizon_text = "counts the next reward only"
    if gamma > 0:
        horizon_text = f"looks about {horizon:.3g} steps ahead, 1 / (1 - gamma)"
    return (
        f"gamma={gamma:g} {horizon_text}, but episodes have {length:.0f} steps on average: later "
        "rewards of an action do not count. Set training(gamma=0.99), on the command line --set "
        "gamma=0.99."
    )


def _check_entropy_bonus(policy: PolicyStats) -> str | None:
    coefficient, loss = policy.get_stat("entropy_coeff"), abs(policy.get_stat("policy_loss"))
    entropy = _get_entropy(policy)
    bonus = coefficient * abs(entropy)
    if not bonus > _MAX_ENTROPY_BONUS_FACTOR * loss or loss == 0:
        return None
    max_entropy, components = _get_max_entropy(policy.action_space)
    random_entropy = _MAX_ENTROPY_SHARE * max_entropy + components * _normal_entropy(
        _MAX_ACTION_STD
    )
    if not entropy > random_entropy:
        return None
    return (
        f"the entropy bonus (entropy_coeff={coefficient:g} times {entropy:.2g} nats) is "
        f"{bonus / loss:.0f} times as large as the policy's objective (policy_loss is "
        f"{loss:.2g}), so the policy is trained to act at random. Lower entropy_coeff; 0 to 0.01 "
        "is usual."
    )


def _check_small_rate(policy: PolicyStats) -> str | None:
    kl, target = policy.get_stat("kl"), policy.get_setting("kl_target")
    highest = max(policy.get_learning_rates().values(), default=math.nan)
    if kl < _MIN_KL_FACTOR * target and highest < _SMALL_LR:
        symptom = (
            f"an iteration changes the policy by a KL divergence of {max(kl, 0.0):.2g}, nearly 0"
        )
    elif math.isnan(kl) and highest < _MIN_LR:
        symptom = "the learning rate is nearly 0"
    else:
        return None
    return (
        f"{symptom}, so it hardly learns. Raise {_format_learning_rates(policy)}; 1e-4 to "
        "1e-3 is usual."
    )


def _check_large_steps(policy: PolicyStats) -> str | None:
    kl, target = policy.get_stat("kl"), policy.get_setting("kl_target")
    if math.isnan(kl) and max(policy.get_learning_rates().values(), default=math.nan) > _LARGE_LR:
        return (
            "the learning rate is far over the usual 1e-4 to 1e-3, so each update undoes earlier "
            f"learning. Lower {_format_learning_rates(policy)}."
        )
    if not (kl > _MAX_KL_FACTOR * target and policy.get_stat("cur_kl_coeff") > 0):
        return None
    return (
        f"an iteration changes the policy by a KL divergence of {kl:.2g}, far over "
        f"kl_target={target:g}. Lower lr (now {policy.get_stat('cur_lr'):.2g}) or num_sgd_iter "
        f"(now {policy.config.get('num_sgd_iter')})."
    )


def _check_values(policy: PolicyStats) -> str | None:
    gamma, reward = policy.get_setting("gamma"), policy.reward_magnitude
    lengths = policy.result.get("hist_stats", {}).get("episode_lengths", ())
    horizon = 1 / (1 - gamma) if gamma < 1 else max(lengths, default=math.nan)
    bonus = policy.get_stat("alpha_value") * 10 * max(1.0, abs(policy.get_stat("target_entropy")))
    max_return = (reward + (0.0 if math.isnan(bonus) else bonus)) * horizon
    loss, value = policy.get_stat("vf_loss"), abs(policy.get_stat("mean_q"))
    if reward > 0 and (
        value > _MAX_VALUE_FACTOR * max_return or math.sqrt(loss) > _MAX_VALUE_FACTOR * max_return
    ):
        symptom = (
            f"vf_loss is {loss:.2g}" if math.isnan(value) else f"the mean value is {value:.2g}"
        )
        return (
            f"{symptom}, although rewards of at most {reward:.2g} with gamma={gamma:g} make no "
            f"value larger than {max_return:.2g}: the value function explodes. Lower "
            f"{_format_learning_rates(policy)}, or set grad_clip=0.5; with target networks, update "
            "them less often."
        )
    error = abs(policy.get_stat("mean_td_error")) if math.isnan(loss) else math.sqrt(loss)
    if (
        error > _LARGE_VALUE_ERROR
        and not policy.get_stat("vf_explained_var") > _MIN_EXPLAINED_VARIANCE
    ):
        return (
            f"values are wrong by {error:.2g} on average, since rewards are as large as "
            f"{reward:.2g}: networks learn values near 1 to 100. Scale the rewards down, for "
            "example by gymnasium.wrappers.TransformReward, or set clip_rewards=1.0."
        )
    return None


def _check_advantages(policy: PolicyStats) -> str | None:
    if policy.get_stat("policy_loss") != 0.0:
        return None
    return (
        "policy_loss is exactly 0, since all advantages are 0: the rewards make no difference "
        "between actions, and nothing is trained. Check the rewards of the environment, and "
        "clip_rewards."
    )


def _check_entropy(policy: PolicyStats) -> str | None:
    max_entropy, components = _get_max_entropy(policy.action_space)
    entropy, limit = (
        _get_entropy(policy),
        _MIN_ENTROPY_SHARE * max_entropy + components * _normal_entropy(_MIN_ACTION_STD),
    )
    if not entropy < limit:
        return None
    return (
        f"the entropy is {entropy:.2g} nats, so the policy nearly always takes the same action in "
        "the same state and no longer explores. Raise entropy_coeff (now "
        f"{policy.config.get('entropy_coeff', 0.0):g}) or lower {_format_learning_rates(policy)}."
    )


def _check_value_errors(policy: PolicyStats) -> str | None:
    share = policy.get_stat("vf_clipped")
    if not share > _MAX_CLIPPED_SHARE:
        return None
    mean_by_policy = policy.result.get("policy_reward_mean", {})  # with several policies
    total_mean = policy.result.get("episode_reward_mean", math.nan)
    mean = mean_by_policy.get(policy.policy_id, total_mean)
    returns = f" (the mean return is {mean:.4g})" if math.isfinite(mean) else ""
    return (
        f"in {share:.0%} of the rows the estimated value is so far from the return{returns} that "
        f"its squared error is above vf_clip_param={policy.config.get('vf_clip_param', 0):g}. The "
        "value function learns nothing from such rows. Set training(vf_clip_param=float('inf')), "
        "on the command line --set vf_clip_param=inf, or scale the rewards down."
    )


def _format_learning_rates(policy: PolicyStats) -> str:
    rates = policy.get_learning_rates().items()
    return " and ".join(f"{name} (now {rate:.2g})" for name, rate in rates) or "lr"


def _get_entropy(policy: PolicyStats) -> float:
    """Returns the entropy of the policy in nats, by either of its names."""
    entropy = policy.get_stat("entropy")
    return policy.get_stat("policy_entropy") if math.isnan(entropy) else entropy


def _get_max_entropy(action_space: gym.Space) -> tuple[float, int]:
    """Returns the entropy of random discrete actions, and the number of continuous components."""
    max_entropy, components = 0.0, 0
    for leaf in action_leaves(action_space):
        if is_float_box(leaf.space):
            components += math.prod(leaf.shape)
        else:
            max_entropy += sum(map(math.log, choices_per_cell(leaf.space)))
    return max_entropy, components


def _normal_entropy(deviation: float) -> float:
    return 0.5 * math.log(2 * math.pi * math.e) + math.log(deviation)


_CHECKS: dict[str, HealthCheck] = {
    "training": HealthCheck(_check_training, is_setup_check=True),
    "ends": HealthCheck(_check_episode_ends, 1, is_setup_check=True),
    "intensity": HealthCheck(_check_intensity, is_setup_check=True),
    "returns": HealthCheck(_check_returns, 1, is_symptom=True),
    "own returns": HealthCheck(_check_policy_returns, 1, is_setup_check=True),
    "observations": HealthCheck(_check_observations),
    "horizon": HealthCheck(_check_horizon),
    "entropy bonus": HealthCheck(_check_entropy_bonus),
    "small rate": HealthCheck(_check_small_rate, is_symptom=True),
    "large steps": HealthCheck(_check_large_steps, is_symptom=True),
    "values": HealthCheck(_check_values, is_symptom=True),
    "advantages": HealthCheck(_check_advantages, is_symptom=True),
    "entropy": HealthCheck(_check_entropy, _SYMPTOM_NUM_ITERATIONS, is_symptom=True),
    "value errors": HealthCheck(_check_value_errors, _SYMPTOM_NUM_ITERATIONS, is_symptom=True),
}
"""Checks by name, with the likeliest cause first."""

_RUN_CHECKS = ("training", "ends", "intensity", "returns")


# -- checks of the run length -----------------------------------------------------------------


def describe_too_short(config: AlgorithmConfig, steps: float) -> str | None:
    """Returns a message if learning does not start within some steps, else None.

    Args:
        config: of the run.
        steps: environment steps of the whole run.
    """
    start = config.get(_LEARNING_START, 0)
    if not start or steps > start:
        return None
    return (
        f"learning starts after {_LEARNING_START}={start} steps, and the run has {steps:.0f}. "
        f"Train for more steps, or set training({_LEARNING_START}=N), on the command line --set "
        f"{_LEARNING_START}=N."
    )
