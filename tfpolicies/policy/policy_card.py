"""The facts that a policy knows of itself, for the model cards of its exports."""

from __future__ import annotations

from typing import Any

from tfpolicies.config.description import get_algorithm_name, get_changed_settings
from tfpolicies.envs.env_registry import get_env_name
from tfpolicies.export.model_card import ModelCard, get_export_facts
from tfpolicies.system.git_commit import find_commit

_DESCRIBED_ELSEWHERE = {"env", "seed"}
_OF_ACTING = {"explore"}  # changed by loading a policy to play


def make_policy_card(policy: Any) -> ModelCard:
    """Returns the facts of `export_facts`, completed by those that a policy knows.

    Args:
        policy: a `TFPolicy`.
    """
    config, default_config = policy.config, policy.config_class()
    omitted = {*_DESCRIBED_ELSEWHERE, *_OF_ACTING, *policy.auto_settings}
    defaults = default_config.to_dict()
    settings = {name: x for name, x in config.items() if name in defaults and name not in omitted}
    algorithm, env, seed = default_config.algo_class, config.get("env"), config.get("seed")
    environment = None if env is None else get_env_name(env)
    return get_export_facts().fill_in(
        ModelCard(
            policy_id=policy.policy_id,
            algorithm=None if algorithm is None else get_algorithm_name(algorithm),
            environment=None if environment is None or "<" in environment else environment,
            seed=seed if isinstance(seed, int) else None,
            gradient_updates=policy.num_grad_updates,
            commit=find_commit("."),
            settings=get_changed_settings(settings, defaults),
        )
    )
