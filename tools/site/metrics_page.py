"""The reference of metrics: the columns of `progress.csv`, and the statistics of updates.

A test compares the tables with the results of real runs.
"""

from __future__ import annotations

COLUMNS = {
    "iteration": "training iterations so far, from 1",
    "env_steps": "environment steps so far, of all environments; rows of recorded experience in a "
    "run without an environment",
    "time_s": "seconds of training so far, without pauses between processes",
    "steps_per_s": "environment steps per second in this iteration",
    "time/sample_s": "seconds of the iteration in which episodes were played",
    "time/env_s": "seconds of these in which environments were stepped or waited for, estimated",
    "time/learn_s": "seconds of the iteration in which policies learned",
    "episode_reward_mean": "mean return of the last 100 episodes "
    "(`metrics_num_episodes_for_smoothing`), or of the iteration's if these are more",
    "episode_reward_min": "smallest return of these episodes",
    "episode_reward_max": "largest return of these episodes",
    "episode_len_mean": "mean number of steps of these episodes",
    "episodes": "episodes that have ended so far",
    "recent_returns/mean": "mean return of recent episodes, which the learning curve and `--until` "
    "use: see [Runs](../howto/runs.md)",
    "recent_returns/std": "standard deviation of their returns",
    "recent_returns/min": "smallest of their returns",
    "recent_returns/max": "largest of their returns",
    "recent_returns/episodes": "number of recent episodes",
    "recent_returns/env_steps": "their steps together",
    "evaluation/episode_reward_mean": "mean return of the iteration's evaluation, if it has one",
    "evaluation/episode_reward_std": "standard deviation of the returns of the evaluation",
    "evaluation/episode_reward_min": "smallest return of the evaluation",
    "evaluation/episode_reward_max": "largest return of the evaluation",
    "evaluation/episode_len_mean": "mean number of steps of its episodes",
    "custom/<name>": "numbers that your [callbacks](../howto/callbacks.md) report",
    "env_steps_trained": "environment steps that updates have learned from so far",
    "policy/<policy>/obs_magnitude": "magnitude of the observations that the policy learned from: "
    "the root mean square of their largest component",
    "policy/<policy>/obs_range": "largest difference of a component of its observations so far",
    "policy/<policy>/reward_magnitude": "largest absolute reward so far",
    "policy/<policy>/entropy_share": "entropy of discrete actions as a share of the largest "
    "possible entropy",
    "policy/<policy>/action_std": "standard deviation of continuous actions that has their "
    "entropy, in the units of the policy",
    "policy/<policy>/updates": "minibatch updates of the policy so far",
    "policy/<policy>/return_mean": "with several policies: mean return of the agents of this one; "
    "`return_min` and `return_max` are their extremes",
    "learner/<policy>/<statistic>": "the statistics below, of each policy",
}

_OFF_POLICY = "DQN, SAC, TD3, DDPG"

STATISTICS: dict[str, tuple[str, str, str]] = {
    "policy_loss": (
        "PPO",
        "`-mean(min(r·A, clip(r, 1-ε, 1+ε)·A))`",
        "r is the ratio of new and old probabilities of the action, A the advantage, ε "
        "`clip_param` (Schulman et al. 2017, arXiv:1707.06347, equation 7)",
    ),
    "policy_loss ": ("A2C, PG", "`-mean(log π(a\\|s)·A)`", "A is the advantage; in PG the return"),
    "policy_loss  ": (
        "MARWIL, BC",
        "`-mean(w·log π(a\\|s))`",
        "w is `exp(β·A/c)` in MARWIL, with the running norm c of advantages, and 1 in BC "
        "(Wang et al. 2018, equation 4)",
    ),
    "vf_loss": (
        "PPO, A2C",
        "`mean(min((V-R)², limit))`",
        "R is the value target, limit `vf_clip_param`; A2C has half of it and no limit",
    ),
    "vf_loss ": ("MARWIL, BC", "`½·mean(A²)`", "A is the return minus the value; 0 in BC"),
    "vf_explained_var": (
        "PPO, A2C, MARWIL",
        "`1 - Var(R-V) / Var(R)`",
        "1: the value function predicts the targets exactly; 0: it is as good as a constant; "
        "negative: worse",
    ),
    "vf_clipped": (
        "PPO",
        "share of rows with `(V-R)² > limit`",
        "these rows do not change the value function. If they are most, raise `vf_clip_param`",
    ),
    "entropy": ("PPO", "`mean(H(π(·\\|s)))`", "in nats; falls as the policy becomes certain"),
    "policy_entropy": ("A2C", "`mean(H(π(·\\|s)))`", "in nats"),
    "kl": (
        "PPO",
        "`mean(KL(π_old, π))`",
        "how far the update moved the policy, mean over its minibatches",
    ),
    "cur_kl_coeff": ("PPO", "", "the coefficient of the KL penalty; adapts to `kl_target`"),
    "entropy_coeff": (
        "PPO, A2C",
        "",
        "the coefficient of the entropy bonus, which may be scheduled",
    ),
    "total_loss": (
        "PPO",
        "`policy_loss + c_v·vf_loss - c_e·entropy + c_k·kl`",
        "the coefficients are `vf_loss_coeff`, `entropy_coeff` and `cur_kl_coeff`",
    ),
    "total_loss ": ("MARWIL, BC", "`policy_loss + vf_coeff·vf_loss`", ""),
    "cur_lr": (
        "PPO, A2C, PG, DQN, MARWIL, BC",
        "",
        "the learning rate of the last update",
    ),
    "cur_actor_lr": ("SAC, TD3, DDPG", "", "the learning rate of the actor"),
    "mean_q": (_OFF_POLICY, "`mean(Q(s, a))`", "over the rows of the update"),
    "min_q": (_OFF_POLICY, "`min(Q(s, a))`", ""),
    "max_q": (
        _OFF_POLICY,
        "`max(Q(s, a))`",
        "far above the largest possible return: values explode",
    ),
    "mean_td_error": (
        _OFF_POLICY,
        "`mean(\\|Q(s, a) - target\\|)`",
        "in DQN without the absolute value",
    ),
    "critic_loss": (
        "SAC, TD3, DDPG",
        "`mean(L(Q(s, a) - target))`",
        "L is Huber's loss or the square, as `td_error_loss_fn` or `use_huber` says; mean over the "
        "critics in SAC",
    ),
    "actor_loss": (
        "SAC",
        "`mean(alpha·log π(a\\|s) - min Q(s, a))`",
        "a is sampled (Haarnoja et al. 2018, arXiv:1812.05905, equation 7)",
    ),
    "actor_loss ": ("TD3, DDPG", "`-mean(Q(s, π(s)))`", ""),
    "alpha_value": ("SAC", "alpha", "the temperature: the weight of the entropy"),
    "alpha_loss": (
        "SAC",
        "`-log alpha·(mean(log π(a\\|s)) + target_entropy)`",
        "raises alpha if the entropy is below its target",
    ),
    "target_entropy": ("SAC", "", "the entropy that the temperature aims at"),
    "cur_critic_lr": ("SAC, TD3, DDPG", "", "the learning rate of the critics"),
    "cur_entropy_lr": ("SAC", "", "the learning rate of the temperature"),
    "moving_average_sqd_adv_norm": ("MARWIL", "c²", "the running mean of squared advantages"),
    "mean_weight": ("MARWIL", "`mean(w)`", "the mean weight of the imitated actions"),
    "max_weight": ("MARWIL", "`max(w)`", "very large: `beta` is too large for the advantages"),
    "model/<name>": ("all", "", "`custom_metrics` of [your model](../howto/models.md)"),
}
"""Algorithms, formula and explanation by statistic; spaces at the end tell equal names apart."""


def make_metrics_page() -> dict[str, str]:
    """Returns the page by its path in the site's source."""
    columns = "".join(f"| `{name}` | {text} |\n" for name, text in COLUMNS.items())
    statistics = "".join(
        f"| `{name.strip()}` | {algorithms} | {formula} | {text} |\n"
        for name, (algorithms, formula, text) in STATISTICS.items()
    )
    return {"reference/metrics.md": _PAGE.format(columns=columns, statistics=statistics)}


_PAGE = """# Metrics

Each iteration adds a row to `progress.csv` of the run folder, and the same numbers to TensorBoard.
In Python, `algorithm.train()` returns them as `result`, in RLlib's structure.

## Columns of progress.csv

A cell is empty if an iteration does not have the number.

| column | |
|---|---|
{columns}

## Statistics of updates

Their column is `learner/<policy>/<statistic>`; in Python they are
`result["info"]["learner"]["<policy>"]["learner_stats"]`. Each is the mean over the minibatches of
an iteration; those that begin with `min_` and `max_` are minima and maxima.

| statistic | algorithms | formula | |
|---|---|---|---|
{statistics}

[My run does not learn](../howto/does-not-learn.md) says which values are healthy.
"""
