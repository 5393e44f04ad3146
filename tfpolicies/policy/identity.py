"""What makes a policy this one: its complete config, and the seeds derived from it."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID


def complete_config(
    config_class: type[AlgorithmConfig], config: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the complete flat config of a policy, and what identifies the policy."""
    identity: dict[str, Any] = {"__policy_id": DEFAULT_POLICY_ID, "worker_index": 0}
    complete = config_class()
    if isinstance(config, AlgorithmConfig):
        given = config.settings_for(config_class)
    else:
        given = dict(config or {})
        identity.update({key: given.pop(key) for key in identity if key in given})
    return complete.update_from_dict(given).to_dict(), identity


def derived_seed(seed: int | None, *parts: Any) -> int:
    """Returns a seed that depends on all parts by a stable hash; random where `seed` is None."""
    if seed is None:
        return secrets.randbits(63)
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
