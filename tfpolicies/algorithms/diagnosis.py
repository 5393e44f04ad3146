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
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.batch.leaves import iterate_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.envs.registry import env_name
from tfpolicies.models.spaces import action_leaves, cell_sizes, is_float_box
from tfpolicies.rollout.episode import RolloutMetrics

logger = logging.getLogger("tfpolicies")

_IN_A_ROW = 3  # iterations in which a check fails before it is reported
_SYMPTOM_IN_A_ROW = 5  # the same for a symptom, whose cause may take longer to show
_ENOUGH_EPISODES = 40  # finished episodes: twice the number of first returns
_MOST_ROWS = 0.5  # share of the rows of a batch that counts as most of them
_FAR = 10  # multiple of its target at which a KL divergence is far too large
_NEAR_0 = 1e-3  # share of its target at which a KL divergence is nearly 0
_SMALL_RATE = 1e-5  # learning rate above which other causes explain a KL near 0
_LARGE_RATE = 0.03  # learning rate of Adam above which networks hardly learn
_SMALLEST_RATE = 1e-6  # learning rate below which networks hardly change in a usual run
_LITTLE = 0.01  # of the largest entropy of discrete actions
_NEARLY_ALL = 0.95  # of the largest entropy of discrete actions
_NARROW = 0.01  # standard deviation of a continuous action, in units of the policy
_WIDE = 2.0  # in the same units; initially it is 1
_LARGE_BONUS = 10  # multiple of the policy's objective at which the entropy bonus dominates
_LARGE_OBS = 1e3  # observations of this size saturate networks
_ROWS = 64  # rows of a batch used to measure the magnitude of observations
_LARGE_ERROR = 1e3  # value error that networks do not learn to correct
_EXPLAINED = 0.1  # explained variance above which the value function is learning
_EXPLODED = 3  # multiple of the largest possible return at which values explode
_SAME_RETURNS = 100  # episodes with the same return before a warning
_MOST_EPISODES = 1.5  # maximum ratio of all episodes to checked episodes
_WITHOUT_END = 10_000  # steps per environment without an episode end before a warning
_STEPS_PER_UPDATE = 8  # with replay: more steps per update hardly learn
_START = "num_steps_sampled_before_learning_starts"

_MAY_HOLD = ""
"""Returned by a check that cannot be decided yet; symptoms wait for it."""


class Trained(NamedTuple):
    """The statistics of one policy after an iteration."""

    policy_id: str
    stats: Mapping[str, Any]  # `learner_stats`
    config: Mapping[str, Any]  # of the policy
    action_space: gym.Space
    result: Mapping[str, Any]  # of the iteration
    obs_size: float = math.nan  # magnitude of its observations, see `RowSizes`
    reward_size: float = math.nan  # largest absolute reward so far

    def number(self, name: str) -> float:
        """Returns a statistic; NaN, so that comparisons are false, if there is none."""
        value = self.stats.get(name)
        return float(value) if isinstance(value, int | float) else math.nan

    def setting(self, name: str) -> float:
        """Returns a numeric setting; NaN if there is none."""
        value = self.config.get(name)
        return float(value) if isinstance(value, int | float) else math.nan

    def learning_rates(self) -> dict[str, float]:
        """Returns the current learning rates by setting name."""
        names = [name for name in self.stats if name.startswith("cur_") and name.endswith("lr")]
        return {name.removeprefix("cur_"): self.number(name) for name in names}


class Sampled(NamedTuple):
    """The statistics of the whole run after an iteration."""

    result: Mapping[str, Any]
    config: AlgorithmConfig
    episodes: Sequence[RolloutMetrics]  # the newest
    num_envs: int  # of all workers
    first_returns: Sequence[float] | None = ()  # of the first episodes; None if unknown

    def amount(self, name: str) -> int:
        """Returns the sampled or trained steps of this iteration, in the unit of the run."""
        return int(self.result[f"num_{self.config.count_steps_by}_{name}_this_iter"])

    def has_improved(self) -> bool:
        """Returns whether recent returns exceed the first ones by one standard deviation."""
        if self.first_returns is None:
            return True
        mean = self.result.get("recent_returns", {}).get("mean", math.nan)
        if not self.first_returns:
            return False
        first, spread = float(np.mean(self.first_returns)), float(np.std(self.first_returns))
        return bool(mean > first + max(spread, 1e-6 * abs(first)))


class RowSizes:
    """Measures the magnitude of the observations and rewards that policies learn from."""

    def __init__(self) -> None:
        self._obs: dict[str, float] = {}
        self._rewards: dict[str, float] = {}

    def begin(self) -> None:
        """Starts a new iteration."""
        self._obs.clear()

    def measure(self, policy_id: str, batch: SampleBatch) -> None:
        """Measures the observations of the first batch of an iteration, and all rewards."""
        if policy_id not in self._obs and SampleBatch.OBS in batch:
            sizes = [_largest_component(leaf) for leaf in iterate_leaves(batch[SampleBatch.OBS])]
            self._obs[policy_id] = max(sizes, default=math.nan)
        rewards = batch.get(SampleBatch.REWARDS)
        if rewards is not None and len(rewards):
            largest = float(np.abs(rewards).max())
            self._rewards[policy_id] = max(largest, self._rewards.get(policy_id, 0.0))

    def of(self, policy_id: str) -> tuple[float, float]:
        """Returns the magnitudes of a policy's observations and rewards; NaN if not measured."""
        obs = self._obs.get(policy_id, math.nan)
        return obs, self._rewards.get(policy_id, math.nan)


def _largest_component(leaf: np.ndarray) -> float:
    """Returns the root mean square, over some rows, of the largest component; 0 for bytes."""
    rows = np.asarray(leaf)
    if rows.ndim < 2 or rows.dtype.kind not in "fi" or not rows.size:
        return 0.0
    rows = rows[:: max(1, len(rows) // _ROWS)].astype(np.float64)
    return float(np.sqrt(np.square(rows).mean(axis=0).max()))


class Check(NamedTuple):
    """One check of a run or policy.

    Attributes:
        function: returns a warning if the check fails, None if it passes, or `_MAY_HOLD`.
        num_iterations: consecutive iterations in which it must fail.
        is_symptom: whether failed checks of higher rank explain it.
        is_setup_check: whether it also applies to runs whose returns grow.
    """

    function: Callable[[Any], str | None]
    in_a_row: int = _IN_A_ROW
    is_symptom: bool = False
    is_wiring: bool = False


class Diagnosis:
    """Warns why a run does not learn, as soon as results show it."""

    def __init__(self) -> None:
        self._in_a_row: Counter[tuple[str, str]] = Counter()
        self._reported: set[str] = set()

    def look(self, sampled: Sampled, trained: Iterable[Trained]) -> None:
        """Checks an iteration, and logs a warning for each newly failed check.

        Args:
            run_stats: statistics of the whole run.
            policy_stats: statistics of the policies that learned.
        """
        improved = sampled.has_improved()
        steps = sampled.result["num_env_steps_sampled"] // max(1, sampled.num_envs)
        ready = sampled.result["episodes_total"] >= _ENOUGH_EPISODES or steps >= _WITHOUT_END
        policies = [*trained]
        explained: set[str] = set()  # ids of policies that failed a check of higher rank
        for name, check in _CHECKS.items():
            subjects = [sampled] if name in _OF_THE_RUN else policies
            for subject in subjects:
                policy_id = getattr(subject, "policy_id", "")
                message = None
                if check.is_wiring or not improved:
                    message = check.function(subject)
                waits = not (ready or check.is_wiring)  # returns may not show learning yet
                waits |= check.is_symptom and not explained.isdisjoint({"", policy_id})
                if message is not None:
                    explained.add(policy_id)
                self._meet(name, policy_id, message, check.in_a_row, waits=waits)

    def _meet(
        self, name: str, policy_id: str, message: str | None, in_a_row: int, *, waits: bool
    ) -> None:
        key = name, policy_id
        if not message:
            self._in_a_row.pop(key, None)
            return
        self._in_a_row[key] += 1
        if self._in_a_row[key] >= in_a_row and not waits and name not in self._reported:
            self._reported.add(name)
            logger.warning("%s%s", f"Policy {policy_id!r}: " if policy_id else "", message)


# -- checks of the whole run ------------------------------------------------------------------


def _check_training(sampled: Sampled) -> str | None:
    waits = sampled.result["num_env_steps_sampled"] <= sampled.config.get(_START, 0)
    if sampled.result["info"]["learner"] or not sampled.amount("sampled") or waits:
        return None
    return (
        f"An iteration sampled {sampled.amount('sampled')} steps, but updated no policy. Check "
        "policies_to_train, and the policies that policy_mapping_fn returns for agents."
    )


def _check_ends(sampled: Sampled) -> str | None:
    if sampled.result["episodes_total"]:
        return None
    steps = sampled.result["num_env_steps_sampled"] // max(1, sampled.num_envs)
    if steps < _WITHOUT_END:
        return _MAY_HOLD
    return (
        f"{_environment(sampled)}: no episode has ended after {steps:,} steps of each environment, "
        "so the mean return is nan. If episodes never end, give the environment a time limit: "
        "gymnasium.wrappers.TimeLimit(env, max_episode_steps=1000)."
    )


def _check_returns(sampled: Sampled) -> str | None:
    returns = {
        (episode.episode_reward, frozenset(episode.agent_rewards.items()))
        for episode in sampled.episodes
    }
    if len(returns) != 1:
        return None
    if len(sampled.episodes) < min(
        _SAME_RETURNS, sampled.config.metrics_num_episodes_for_smoothing
    ):
        return _MAY_HOLD
    ((value, _),) = returns
    return (
        f"{_environment(sampled)}: the return was {value:g} in each of the last "
        f"{len(sampled.episodes)} episodes, so nothing tells good actions from bad ones. "
        "Add intermediate rewards, or explore more "
        "(entropy_coeff, exploration_config)."
    )


def _check_intensity(sampled: Sampled) -> str | None:
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


def _environment(sampled: Sampled) -> str:
    return f"Environment {env_name(sampled.config.env)!r:.200}"


# -- checks of one policy ---------------------------------------------------------------------


def _check_observations(trained: Trained) -> str | None:
    if trained.config.get("observation_filter", "NoFilter") != "NoFilter":
        return None
    if not trained.obs_size > _LARGE_OBS:
        return None
    return (
        f"observations have magnitude {trained.obs_size:.2g}, but networks learn from numbers near "
        "1: larger ones saturate them. Set rollouts(observation_filter='MeanStdFilter'), on the "
        "command line --set observation_filter=MeanStdFilter, or scale them in the environment."
    )


def _check_own_returns(trained: Trained) -> str | None:
    """Finds one of several policies whose agents got the same return since the start."""
    result = trained.result
    if len(result.get("policy_reward_mean", {})) < 2:
        return None  # `_check_returns` checks the returns of a single policy
    returns = result.get("hist_stats", {}).get(f"policy_{trained.policy_id}_reward", ())
    are_most = result["episodes_total"] < _MOST_EPISODES * len(returns)
    if len(returns) < _SAME_RETURNS or len({*returns}) > 1 or not are_most:
        return None
    return (
        f"the return of its agents was {returns[0]:g} in each of the last {len(returns)} episodes, "
        "so nothing tells good actions from bad ones. Check the rewards that the environment "
        "gives to these agents, and policy_mapping_fn."
    )


def _check_horizon(trained: Trained) -> str | None:
    gamma, length = trained.setting("gamma"), trained.result.get("episode_len_mean", math.nan)
    if not 0 <= gamma < 1:
        return None
    horizon = 1 / (1 - gamma)
    if not length > 4 * horizon**2:
        return None
    sight = "counts the next reward only"
    if gamma > 0:
        sight = f"looks about {horizon:.3g} steps ahead, 1 / (1 - gamma)"
    return (
        f"gamma={gamma:g} {sight}, but episodes have {length:.0f} steps on average: later rewards "
        "of an action do not count. Set training(gamma=0.99), on the command line --set "
        "gamma=0.99."
    )


def _check_entropy_bonus(trained: Trained) -> str | None:
    coefficient, loss = trained.number("entropy_coeff"), abs(trained.number("policy_loss"))
    entropy = _get_entropy(trained)
    bonus = coefficient * abs(entropy)
    if not bonus > _LARGE_BONUS * loss or loss == 0:
        return None
    most, components = _get_largest_entropy(trained.action_space)
    wide = _NEARLY_ALL * most + components * _entropy_of(_WIDE)
    if not entropy > wide:
        return None
    return (
        f"the entropy bonus (entropy_coeff={coefficient:g} times {entropy:.2g} nats) is "
        f"{bonus / loss:.0f} times as large as the policy's objective (policy_loss is "
        f"{loss:.2g}), so the policy is trained to act at random. Lower entropy_coeff; 0 to 0.01 "
        "is usual."
    )


def _check_small_rate(trained: Trained) -> str | None:
    kl, target = trained.number("kl"), trained.setting("kl_target")
    highest = max(trained.learning_rates().values(), default=math.nan)
    if kl < _NEAR_0 * target and highest < _SMALL_RATE:
        shown = (
            f"an iteration changes the policy by a KL divergence of {max(kl, 0.0):.2g}, nearly 0"
        )
    elif math.isnan(kl) and highest < _SMALLEST_RATE:
        shown = "the learning rate is nearly 0"
    else:
        return None
    return f"{shown}, so it hardly learns. Raise {_get_rates(trained)}; 1e-4 to 1e-3 is usual."


def _check_large_steps(trained: Trained) -> str | None:
    kl, target = trained.number("kl"), trained.setting("kl_target")
    if math.isnan(kl) and max(trained.learning_rates().values(), default=math.nan) > _LARGE_RATE:
        return (
            "the learning rate is far over the usual 1e-4 to 1e-3, so each update undoes what was "
            f"learned before. Lower {_get_rates(trained)}."
        )
    if not (kl > _FAR * target and trained.number("cur_kl_coeff") > 0):
        return None
    return (
        f"an iteration changes the policy by a KL divergence of {kl:.2g}, far over "
        f"kl_target={target:g}. Lower lr (now {trained.number('cur_lr'):.2g}) or num_sgd_iter (now "
        f"{trained.config.get('num_sgd_iter')})."
    )


def _check_values(trained: Trained) -> str | None:
    gamma, reward = trained.setting("gamma"), trained.reward_size
    lengths = trained.result.get("hist_stats", {}).get("episode_lengths", ())
    horizon = 1 / (1 - gamma) if gamma < 1 else max(lengths, default=math.nan)
    bonus = trained.number("alpha_value") * 10 * max(1.0, abs(trained.number("target_entropy")))
    largest = (reward + (0.0 if math.isnan(bonus) else bonus)) * horizon
    loss, value = trained.number("vf_loss"), abs(trained.number("mean_q"))
    if reward > 0 and (value > _EXPLODED * largest or math.sqrt(loss) > _EXPLODED * largest):
        shown = f"vf_loss is {loss:.2g}" if math.isnan(value) else f"the mean value is {value:.2g}"
        return (
            f"{shown}, although rewards of at most {reward:.2g} with gamma={gamma:g} make no value "
            f"larger than {largest:.2g}: the value function explodes. Lower {_get_rates(trained)}, "
            "or set grad_clip=0.5; with target networks, update them less often."
        )
    error = abs(trained.number("mean_td_error")) if math.isnan(loss) else math.sqrt(loss)
    if error > _LARGE_ERROR and not trained.number("vf_explained_var") > _EXPLAINED:
        return (
            f"values are wrong by {error:.2g} on average, since rewards are as large as "
            f"{reward:.2g}: networks learn values near 1 to 100. Scale the rewards down, for "
            "example by gymnasium.wrappers.TransformReward, or set clip_rewards=1.0."
        )
    return None


def _check_advantages(trained: Trained) -> str | None:
    if trained.number("policy_loss") != 0.0:
        return None
    return (
        "policy_loss is exactly 0, since all advantages are 0: the rewards make no difference "
        "between actions, and nothing is trained. Check the rewards of the environment, and "
        "clip_rewards."
    )


def _check_entropy(trained: Trained) -> str | None:
    most, components = _get_largest_entropy(trained.action_space)
    entropy, limit = _get_entropy(trained), _LITTLE * most + components * _entropy_of(_NARROW)
    if not entropy < limit:
        return None
    return (
        f"the entropy is {entropy:.2g} nats, so the policy nearly always takes the same action in "
        "the same state and no longer explores. Raise entropy_coeff (now "
        f"{trained.config.get('entropy_coeff', 0.0):g}) or lower {_get_rates(trained)}."
    )


def _check_value_errors(trained: Trained) -> str | None:
    share = trained.number("vf_clipped")
    if not share > _MOST_ROWS:
        return None
    of_policies = trained.result.get("policy_reward_mean", {})  # with several policies
    of_all = trained.result.get("episode_reward_mean", math.nan)
    mean = of_policies.get(trained.policy_id, of_all)
    returns = f" (the mean return is {mean:.4g})" if math.isfinite(mean) else ""
    return (
        f"in {share:.0%} of the rows the estimated value is so far from the return{returns} that "
        f"its squared error is above vf_clip_param={trained.config.get('vf_clip_param', 0):g}. The "
        "value function learns nothing from such rows. Set training(vf_clip_param=float('inf')), "
        "on the command line --set vf_clip_param=inf, or scale the rewards down."
    )


def _get_rates(trained: Trained) -> str:
    rates = trained.learning_rates().items()
    return " and ".join(f"{name} (now {rate:.2g})" for name, rate in rates) or "lr"


def _get_entropy(trained: Trained) -> float:
    """Returns the entropy of the policy in nats, by either of its names."""
    entropy = trained.number("entropy")
    return trained.number("policy_entropy") if math.isnan(entropy) else entropy


def _get_largest_entropy(action_space: gym.Space) -> tuple[float, int]:
    """Returns the entropy of random discrete actions, and the number of continuous components."""
    most, components = 0.0, 0
    for leaf in action_leaves(action_space):
        if is_float_box(leaf.space):
            components += math.prod(leaf.shape)
        else:
            most += sum(map(math.log, cell_sizes(leaf.space)))
    return most, components


def _entropy_of(deviation: float) -> float:
    return 0.5 * math.log(2 * math.pi * math.e) + math.log(deviation)


_CHECKS: dict[str, Check] = {
    "training": Check(_check_training, is_wiring=True),
    "ends": Check(_check_ends, 1, is_wiring=True),
    "intensity": Check(_check_intensity, is_wiring=True),
    "returns": Check(_check_returns, 1, is_symptom=True),
    "own returns": Check(_check_own_returns, 1, is_wiring=True),
    "observations": Check(_check_observations),
    "horizon": Check(_check_horizon),
    "entropy bonus": Check(_check_entropy_bonus),
    "small rate": Check(_check_small_rate, is_symptom=True),
    "large steps": Check(_check_large_steps, is_symptom=True),
    "values": Check(_check_values, is_symptom=True),
    "advantages": Check(_check_advantages, is_symptom=True),
    "entropy": Check(_check_entropy, _SYMPTOM_IN_A_ROW, is_symptom=True),
    "value errors": Check(_check_value_errors, _SYMPTOM_IN_A_ROW, is_symptom=True),
}
"""Checks by name, with the likeliest cause first."""

_OF_THE_RUN = ("training", "ends", "intensity", "returns")


# -- checks of the run length -----------------------------------------------------------------


def too_short(config: AlgorithmConfig, steps: float) -> str | None:
    """Returns a message if learning does not start within some steps, else None.

    Args:
        config: of the run.
        steps: environment steps of the whole run.
    """
    start = config.get(_START, 0)
    if not start or steps > start:
        return None
    return (
        f"learning starts after {_START}={start} steps, and the run has {steps:.0f}. Train for "
        f"more steps, or set training({_START}=N), on the command line --set {_START}=N."
    )
