"""Facts of the policies of an algorithm, for the model cards of their exports."""

from __future__ import annotations

import math

from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol
from tfpolicies.algorithms.run_description import describe_run
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.export.model_card import ModelCard, ReturnFigure
from tfpolicies.system.machine_info import get_versions


def make_algorithm_card(algorithm: AlgorithmProtocol, policy_id: str) -> ModelCard:
    """Returns the facts of a policy after the last iteration of its algorithm.

    Args:
        algorithm: an `Algorithm`.
        policy_id: of the policy.
    """
    facts, config, result = describe_run(algorithm), algorithm.config, algorithm._last_result
    has_one_policy = len(algorithm.worker.policy_map) == 1
    evaluation = result.get("evaluation") or {}
    recent = dict(result.get("recent_returns") or {})
    figures: dict[str, tuple[float | None, float | None]] = {
        "training": (recent.get("mean"), recent.get("episodes")),
        "evaluation": (
            evaluation.get("episode_reward_mean"),
            len(evaluation.get("hist_stats", {}).get("episode_reward", ())) or None,
        ),
    }
    if not has_one_policy:  # returns of an episode are those of all policies
        summaries = {"training": result, "evaluation": evaluation}
        for name, summary in summaries.items():
            mean = summary.get("policy_reward_mean", {}).get(policy_id)
            figures[name] = (mean, figures[name][1] if name == "evaluation" else None)
    return ModelCard(
        policy_id=policy_id,
        algorithm=facts["algorithm"],
        environment=None if "<" in str(facts["env"]) else facts["env"],
        seed=facts["seed"],
        env_steps=_count_steps(algorithm) if needs_environment(config.input_) else None,
        training=make_figure(*figures["training"]),
        evaluation=make_figure(*figures["evaluation"], explores=_explores(algorithm)),
        commit=facts["commit"],
        versions=get_versions(),
        settings=facts["config"] if has_one_policy else None,
    )


def make_figure(
    mean: float | None, episodes: float | None, explores: bool | None = None
) -> ReturnFigure | None:
    """Returns a figure of a card; None if the mean is unknown or not a number."""
    if mean is None or math.isnan(mean):
        return None
    count = None if episodes is None or math.isnan(episodes) else int(episodes)
    return ReturnFigure(mean_return=float(mean), episodes=count, explores=explores)


def _count_steps(algorithm: AlgorithmProtocol) -> int | None:
    return algorithm.counters["num_env_steps_sampled"] or None


def _explores(algorithm: AlgorithmProtocol) -> bool:
    """Returns whether evaluations of an algorithm sample actions."""
    evaluator = algorithm._evaluator
    if evaluator.explore is not None:
        return bool(evaluator.explore)
    is_greedy = evaluator.is_greedy_by_config
    return bool(algorithm.config.explore) if is_greedy is None else not is_greedy
