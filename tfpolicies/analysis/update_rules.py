"""Rules about the updates of a run: how many, how large, and with which settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfpolicies.algorithms.health_rules import LEARNING_START, Finding
from tfpolicies.algorithms.health_stats import to_float
from tfpolicies.analysis.history_rule import (
    MIN_ROWS,
    HistoryRule,
    Located,
    divide,
    get_end,
    mean,
    median,
)
from tfpolicies.analysis.run_history import RunHistory
from tfpolicies.analysis.usual_settings import find_unusual_settings
from tfpolicies.reporting.progress_display import format_count

_MIN_DEFINITE_FACTOR = 10.0  # of an unusual setting that counts for any run that stopped growing
_MIN_TARGET_UPDATES = 5  # updates of a target network: values spread by one step with each
_MAX_UPDATES_PER_STEP = 20  # with replay (D'Oro et al. 2023 need resets beyond)
_MAX_SHARE_AT_END = 0.01  # of the highest learning rate, below which nothing is learned any more
_MIN_LOG_STD, _MAX_LOG_STD = -4.0, 1.0  # of first actions
_MIN_RATIO = 1e-3  # of the rate or KL divergence of another policy
_MAX_KL_COEFFICIENT = 50.0
_MAX_KL = 0.2  # median KL divergence of an iteration; clipping keeps it below 0.05
_MIN_KL = 1e-5  # the same: the policy is practically unchanged
_MIN_EXPLAINED_VARIANCE = 0.1
_MAX_ENTROPY_SHARE = 0.95
_MAX_VALUE_LOSS = 100.0  # weighted loss of values that share layers with the policy


def find_target_network(history: RunHistory) -> Iterator[Located]:
    """Finds target networks that never follow, or follow at once (Mnih et al. 2015)."""
    settings = history.settings
    freq, tau = (to_float(settings.get(x)) for x in ("target_network_update_freq", "tau"))
    start = to_float(settings.get(LEARNING_START))
    steps = history.last_step - (0.0 if math.isnan(start) else start)
    if not math.isfinite(freq) or not 0 <= tau <= 1 or steps <= 0 or history.reads_data:
        return
    updates_per_step = _get_updates_per_step(history)
    if not updates_per_step > 0:
        return
    between = max(freq, 1.0 / updates_per_step, 1.0)  # steps between two updates of the target
    moved = 1.0 - (1.0 - tau) ** (steps / between) if tau < 1 else steps / between
    current = {"tau": tau, "target_network_update_freq": int(freq)}
    if tau < 1 and moved < 0.9:
        title = "The target networks hardly move"
        evidence = (
            f"tau={tau:g} moved the target networks only {moved:.0%} of the way to the learned "
            "ones in the whole run, so values are those of the first, random networks."
        )
        advice = "Raise tau; 0.005 is usual, with target_network_update_freq=0."
    elif tau == 1 and steps / between < _MIN_TARGET_UPDATES and not history.is_short():
        title, times = "The target network is updated too rarely", int(steps / between)
        evidence = (
            f"The target network was updated {format_count(times, 'time')} in {steps:,.0f} steps "
            f"(target_network_update_freq={freq:.0f}), and with each update values spread back by "
            "a few steps only."
        )
        advice = "Lower target_network_update_freq; 250 to 1000 steps is usual in small tasks."
    elif tau > 0.5 and between * updates_per_step < 10:
        title = "The target network follows at once"
        evidence = (
            f"With tau={tau:g} and target_network_update_freq={freq:.0f} the target network "
            f"follows the learned one every {between * updates_per_step:.0f} updates, so values "
            "chase themselves."
        )
        advice = "Raise target_network_update_freq to 250 or more, or set tau=0.005."
    else:
        return
    yield Located(
        Finding(
            title=title,
            evidence=evidence,
            advice=advice,
            figures={"target_updates": steps / between},
            settings=current,
        )
    )


def _get_updates_per_step(history: RunHistory) -> float:
    """Returns the updates per sampled step of an algorithm with replay, by its settings."""
    settings = history.settings
    intensity = to_float(settings.get("training_intensity"))
    if not math.isnan(intensity):
        return divide(intensity, to_float(settings.get("train_batch_size")))
    fragment = to_float(settings.get("rollout_fragment_length"))
    fragment = to_float(settings.get("n_step", 1)) if math.isnan(fragment) else fragment
    return divide(1.0, fragment * history.num_envs)


def find_updates_per_step(history: RunHistory) -> Iterator[Located]:
    if LEARNING_START not in history.settings or history.reads_data:
        return
    ratio = _get_updates_per_step(history)
    if math.isnan(ratio):
        return
    steps_per_update = 1 / ratio if ratio > 0 else math.inf
    settings = {
        name: history.settings.get(name)
        for name in ("training_intensity", "train_batch_size", "rollout_fragment_length")
    }
    if ratio > _MAX_UPDATES_PER_STEP:
        title = "Too many updates for the sampled steps"
        evidence = (
            f"There are {ratio:.0f} updates per sampled step, so values are fitted to the first "
            "rows in the buffer."
        )
        advice = "Lower training_intensity; train_batch_size means one update per step."
    elif steps_per_update >= 8:
        title = "Too few updates for the sampled steps"
        batch_size = to_float(history.settings.get("train_batch_size"))
        evidence = (
            f"There is one update per {steps_per_update:.0f} sampled steps, "
            f"{history.last_step * ratio:,.0f} in the whole run."
        )
        advice = f"For one update per step set training_intensity={batch_size:.0f}."
    else:
        return
    yield Located(
        Finding(
            title=title,
            evidence=evidence,
            advice=advice,
            figures={"updates_per_step": ratio},
            settings=settings,
        )
    )


def find_ended_schedule(history: RunHistory) -> Iterator[Located]:
    for policy_id in history.policy_ids:
        rates = history.get_column(policy_id, "cur_lr", "cur_actor_lr")
        rates = np.nan_to_num(rates)
        if len(rates) < MIN_ROWS or not rates.max() > 0:
            continue
        row = int((rates <= _MAX_SHARE_AT_END * rates.max()).argmax())
        is_ended = rates[-1] <= _MAX_SHARE_AT_END * rates.max() and rates[row:].max() == rates[row]
        if is_ended and history.steps[row] < 0.6 * history.last_step:
            yield Located(
                Finding(
                    evidence=f"The learning rate fell to {rates[-1]:.2g} after "
                    f"{int(history.steps[row]):,} of {history.last_step:,} steps, and hardly "
                    "anything was learned from then on.",
                    advice="Let lr_schedule end at the last step of the run.",
                    figures={"cur_lr": float(rates[-1])},
                    settings={"lr_schedule": history.settings.get("lr_schedule")},
                ),
                policy_id,
            )


def find_unusual(history: RunHistory) -> Iterator[Located]:
    """Finds settings far outside of the usual range, of the run or of a policy."""
    algorithm, config = history.record.algorithm, history.get_changed_settings()
    min_factor = 0.0 if history.is_stuck() or history.has_forgotten() else _MIN_DEFINITE_FACTOR
    for unusual in find_unusual_settings(algorithm, config):
        if unusual.factor >= min_factor:
            yield Located(unusual.finding)
    for policy_id in history.policy_ids:
        settings = history.get_policy_settings(policy_id)
        changes = {
            name: value for name, value in settings.items() if value != history.settings.get(name)
        }
        for unusual in find_unusual_settings(algorithm, changes):
            if unusual.factor >= min_factor:
                yield Located(unusual.finding, policy_id)


def find_unusual_choices(history: RunHistory) -> Iterator[Located]:
    """Finds choices with which algorithms are not known to learn."""
    for title, name, value, evidence, advice in _get_unusual_choices(history):
        settings = {name: value}
        yield Located(Finding(title=title, evidence=evidence, advice=advice, settings=settings))


def _get_unusual_choices(history: RunHistory) -> Iterator[tuple[str, str, Any, str, str]]:
    """Yields title, setting, value, evidence and advice."""
    optimizer, model = (_get_mapping(history.settings, name) for name in ("optimizer", "model"))
    kind, exploration = optimizer.get("type"), _get_mapping(history.settings, "exploration_config")
    if str(kind).lower() == "sgd":
        yield (
            "The optimizer is SGD",
            "optimizer.type",
            kind,
            "The optimizer is SGD, whose steps are as small as the gradients.",
            "Use Adam: training(optimizer={'type': 'adam'}).",
        )
    if history.settings.get("use_critic") is False:
        yield (
            "There is no value function",
            "use_critic",
            False,
            "use_critic=False: advantages are whole returns, which are noisy.",
            "Set use_critic=True.",
        )
    if exploration.get("type") == "Random":
        yield (
            "All actions of training are random",
            "exploration_config.type",
            "Random",
            "The exploration is Random: all actions of training are random, so returns stay those "
            "of chance.",
            "Remove exploration_config, so that the algorithm explores in its own way.",
        )
    activation = model.get("fcnet_activation")
    if activation in ("linear", None) and "fcnet_activation" in model:
        yield (
            "The network is linear",
            "model.fcnet_activation",
            activation,
            "The layers have no activation function, so the network is linear, whatever its size.",
            "Set model={'fcnet_activation': 'tanh'} or 'relu'.",
        )
    log_std = to_float(model.get("log_std_init"))
    if model.get("free_log_std") and not _MIN_LOG_STD <= log_std <= _MAX_LOG_STD:
        yield (
            "First actions have an unusual spread",
            "model.log_std_init",
            log_std,
            f"log_std_init={log_std:g}: the first actions have a standard deviation of "
            f"{math.exp(log_std):.2g}, in units in which the bounds are near 1.",
            "Set model={'log_std_init': 0.0}; -2 to 0 is usual.",
        )


def _get_mapping(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, Mapping) else {}


def find_value_range(history: RunHistory) -> Iterator[Located]:
    """Finds a distribution of values (Bellemare et al. 2017) that does not reach the returns."""
    settings = history.settings
    if not to_float(settings.get("num_atoms")) > 1:
        return
    low, high = (to_float(settings.get(name)) for name in ("v_min", "v_max"))
    for policy_id in history.policy_ids:
        largest = mean(get_end(history.get_column(policy_id, "max_q")))
        smallest = mean(get_end(history.get_column(policy_id, "min_q")))
        margin = 0.02 * (high - low)
        if largest > high - margin or smallest < low + margin:
            yield Located(
                Finding(
                    evidence=f"Values go from {smallest:.4g} to {largest:.4g}, and the "
                    f"distribution of values only from v_min={low:g} to v_max={high:g}, so it "
                    "cannot tell better actions from good ones.",
                    advice="Set v_min and v_max to the smallest and largest discounted return.",
                    figures={"min_q": smallest, "max_q": largest},
                    settings={"v_min": low, "v_max": high},
                ),
                policy_id,
            )


def find_shared_layers(history: RunHistory) -> Iterator[Located]:
    model = history.settings.get("model")
    is_shared = isinstance(model, Mapping) and model.get("vf_share_layers")
    coefficient = to_float(history.settings.get("vf_loss_coeff"))
    for policy_id in history.policy_ids if is_shared else ():
        loss = median(history.get_column(policy_id, "vf_loss")) * coefficient
        policy_loss = median(np.abs(history.get_column(policy_id, "policy_loss")))
        if loss > _MAX_VALUE_LOSS:
            yield Located(
                Finding(
                    evidence=f"The policy shares layers with the value function, whose loss is "
                    f"{loss:.2g} (vf_loss_coeff times vf_loss), that of the policy "
                    f"{policy_loss:.2g}: the layers are trained for values only.",
                    advice="Set model={'vf_share_layers': False}, lower vf_loss_coeff, or scale "
                    "the rewards down.",
                    figures={"vf_loss": loss / coefficient, "policy_loss": policy_loss},
                    settings={"vf_loss_coeff": coefficient, "model.vf_share_layers": True},
                ),
                policy_id,
            )


def find_kl(history: RunHistory) -> Iterator[Located]:
    for policy_id in history.policy_ids:
        kl = history.get_column(policy_id, "kl")
        kl = kl[np.isfinite(kl)]
        settings = history.get_policy_settings(policy_id)
        current = {
            name: settings.get(name) for name in ("lr", "num_sgd_iter", "clip_param", "grad_clip")
        }
        names = ", ".join(f"{name} (now {value})" for name, value in current.items())
        first = kl[: max(1, len(kl) // 4)]
        penalty = mean(get_end(history.get_column(policy_id, "cur_kl_coeff")))
        if len(kl) and max(median(kl), median(first)) > _MAX_KL:
            title = "Updates change the policy too much"
            kl_text = f"{max(median(kl), median(first)):.2g}"
            evidence = (
                f"Each iteration changes the policy by a KL divergence of about {kl_text}; 0.01 is "
                "usual. Such steps undo earlier learning."
            )
            advice = f"Lower {names}."
        elif len(kl) >= MIN_ROWS and abs(median(kl)) < _MIN_KL:
            title = "Updates hardly change the policy"
            evidence = (
                f"Each iteration changes the policy by a KL divergence of about {median(kl):.2g}; "
                "0.01 is usual. The policy practically stays the same."
            )
            advice = f"Raise {names}, or check that rewards and observations differ."
        elif penalty > _MAX_KL_COEFFICIENT:
            title = "The KL penalty holds the policy"
            evidence = (
                f"cur_kl_coeff has grown to {penalty:.2g}, since updates exceeded kl_target: the "
                "penalty dominates the loss."
            )
            advice = f"Lower {names}, or set kl_coeff=0: clipping limits updates as well."
        else:
            continue
        yield Located(
            Finding(
                title=title,
                evidence=evidence,
                advice=advice,
                figures={"kl": median(kl)},
                settings=current,
            ),
            policy_id,
        )


def find_lagging_policies(history: RunHistory) -> Iterator[Located]:
    """Finds one of several policies that hardly changes, while others do."""
    for name, columns in (("lr", ("cur_lr", "cur_actor_lr")), ("kl", ("kl",))):
        values = {x: median(history.get_column(x, *columns)) for x in history.policy_ids}
        largest = max(values.values(), default=math.nan)
        for policy_id, value in values.items():
            if not value < _MIN_RATIO * largest:
                continue
            what = "KL divergence of an iteration" if name == "kl" else "learning rate"
            settings = history.get_policy_settings(policy_id)
            yield Located(
                Finding(
                    evidence=f"The {what} is {max(value, 0.0):.2g}, that of another policy "
                    f"{largest:.2g}: this policy stays as it is.",
                    advice="Compare the settings of the policies, first lr, and check the rewards "
                    "of its agents.",
                    figures={columns[0]: value},
                    settings={"lr": settings.get("lr")},
                ),
                policy_id,
            )


def find_untrained_values(history: RunHistory) -> Iterator[Located]:
    for policy_id in history.policy_ids:
        variance = history.get_column(policy_id, "vf_explained_var")
        variance = variance[np.isfinite(variance)]
        if len(variance) >= MIN_ROWS and np.median(variance) < _MIN_EXPLAINED_VARIANCE:
            yield Located(
                Finding(
                    evidence=f"The value function explains {np.median(variance):.0%} of the "
                    "variance of returns in a typical iteration; it never learned them.",
                    advice="Check that observations tell where an episode is, with numbers near 1, "
                    "and that rewards depend on it; then vf_clip_param, vf_loss_coeff, the scale "
                    "of rewards, and lr.",
                    figures={"vf_explained_var": float(np.median(variance))},
                    settings={
                        name: history.settings.get(name)
                        for name in ("vf_clip_param", "vf_loss_coeff", "lr")
                    },
                ),
                policy_id,
            )


def find_random_policy(history: RunHistory) -> Iterator[Located]:
    for policy_id in history.policy_ids:
        entropy = mean(get_end(history.get_column(policy_id, "entropy", "policy_entropy")))
        facts = history.get_action_facts(policy_id)
        if facts.components or not facts.max_entropy > 0:
            continue
        share = entropy / facts.max_entropy
        if share > _MAX_ENTROPY_SHARE and history.record.num_iterations >= MIN_ROWS:
            yield Located(
                Finding(
                    evidence=f"The entropy is still {share:.0%} of that of random actions, so the "
                    "policy has no preferences yet.",
                    advice="Raise lr or the number of updates (num_sgd_iter); if that changes "
                    "nothing, check that rewards depend on actions and observations on the state.",
                    figures={"entropy": entropy, "entropy_share": share},
                    settings={"lr": history.settings.get("lr")},
                ),
                policy_id,
            )


RULES = (
    HistoryRule(
        name="lagging_policy",
        title="A policy hardly changes",
        find=find_lagging_policies,
        is_symptom=True,
        needs_stuck=False,
    ),
    HistoryRule(
        name="updates_per_step",
        title="The number of updates does not fit the sampled steps",
        find=find_updates_per_step,
    ),
    HistoryRule(
        name="target_network",
        title="The target network does not fit the run",
        find=find_target_network,
        is_symptom=True,
    ),
    HistoryRule(
        name="unusual_setting",
        title="A setting is far from usual",
        find=find_unusual,
    ),
    HistoryRule(
        name="unusual_choice",
        title="A setting is not one of those that are known to learn",
        find=find_unusual_choices,
    ),
    HistoryRule(
        name="value_range",
        title="Values do not fit between v_min and v_max",
        find=find_value_range,
    ),
    HistoryRule(
        name="ended_schedule",
        title="The learning rate fell to 0 too early",
        find=find_ended_schedule,
    ),
    HistoryRule(
        name="shared_layers",
        title="The loss of values dominates shared layers",
        find=find_shared_layers,
    ),
    HistoryRule(
        name="kl",
        title="The size of updates does not fit",
        find=find_kl,
        is_symptom=True,
    ),
    HistoryRule(
        name="untrained_values",
        title="The value function learned nothing",
        find=find_untrained_values,
        is_symptom=True,
    ),
    HistoryRule(
        name="random_policy",
        title="The policy is still random",
        find=find_random_policy,
        is_symptom=True,
    ),
)
