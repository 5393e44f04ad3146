"""Names that exist only so that code written for RLlib's TensorFlow stack ports.

Nothing else in the package needs this room, and `docs/porting.md` has the names that do without it.
Like the package itself it imports them on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DQNTrainer": "tfpolicies.compat.agents",
    "EnvContext": "tfpolicies.envs.making",
    "FullyConnectedNetwork": "tfpolicies.compat.tf_model",
    "ModelCatalog": "tfpolicies.compat.catalog",
    "PGTrainer": "tfpolicies.compat.agents",
    "PPOTrainer": "tfpolicies.compat.agents",
    "Postprocessing": "tfpolicies.batch.postprocessing",
    "RecurrentNetwork": "tfpolicies.compat.tf_model",
    "TFModelV2": "tfpolicies.compat.tf_model",
    "UnsupportedSpaceException": "tfpolicies.compat.utils",
    "VisionNetwork": "tfpolicies.compat.tf_model",
    "add_time_dimension": "tfpolicies.compat.tf_model",
    "adjust_nstep": "tfpolicies.batch.postprocessing",
    "build_tf_policy": "tfpolicies.compat.policy_template",
    "collect_episodes": "tfpolicies.compat.metrics",
    "create_policy_for_framework": "tfpolicies.compat.policy_map_utils",
    "discount_cumsum": "tfpolicies.batch.postprocessing",
    "explained_variance": "tfpolicies.compat.utils",
    "normc_initializer": "tfpolicies.compat.catalog",
    "override": "tfpolicies.compat.utils",
    "pretty_print": "tfpolicies.compat.metrics",
    "register_env": "tfpolicies.compat.envs",
    "summarize_episodes": "tfpolicies.compat.metrics",
    "try_import_tf": "tfpolicies.compat.utils",
    "validate_policy_id": "tfpolicies.compat.policy_map_utils",
    "with_common_config": "tfpolicies.compat.catalog",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
