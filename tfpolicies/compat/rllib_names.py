"""Maps RLlib's names to those of this package, by the table in the porting guide."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tfpolicies.base.porting_tables import RLLIB, as_plain_text, extract_code, read_table

_MODULE = re.compile(r"tfpolicies\.(algorithms\.\w+|compat\.tune)")


def _iterate_names() -> Iterator[tuple[str, str, str]]:
    """Yields names to import from Ray: name, replacement ("" for none), and a remark."""
    for row in read_table(RLLIB):
        for name in row.names:
            if name.startswith("ray."):
                replacement = (
                    extract_code(row.replacement)[0]
                    if row.replacement.startswith("`tfpolicies.")
                    else ""
                )
                yield name, replacement, as_plain_text(row.differs)


def _split_name(name: str) -> tuple[str, str]:
    module, _, last = name.rpartition(".")
    return module, last


_NEW_NAMES = {name: place for name, place, _ in _iterate_names() if place}

MODULES = {name: place for name, place in _NEW_NAMES.items() if _MODULE.fullmatch(place)}
"""RLlib's modules that a whole module replaces."""

REPLACEMENTS = {
    _split_name(name): _split_name(place)
    for name, place in _NEW_NAMES.items()
    if name not in MODULES
}
"""The module and name in this package, by RLlib's module and name."""

ALTERNATIVES = {
    _split_name(name)[1]: remark
    for name, place, remark in _iterate_names()
    if not place and remark.startswith(("Use ", "Set "))
}
"""Advice about RLlib's names without a replacement, by name."""

_ATTRIBUTES = """
_counters _create_exploration add_workers as_eager as_serializable assert_healthy batch_builder
buffer copy entropy_coeff env_context env_creator env_id fetch_ready_async_reqs
foreach_worker_async from_batch from_dict get_config get_rollout_fragment_length
get_single_step_input_dict is_atari is_policy_to_train kl_coeff last_batch
last_extra_action_outs_for last_terminated_for last_truncated_for load_checkpoint logdir
loss_initialized maybe_initialize_optimizer_and_loss multiagent policy_batches policy_map
policy_mapping_fn pop prev_action_for prev_reward_for reset_buffer rnn_state_for running_stats
save_checkpoint serialize started step to_dict total_train_batch_size variables with_tracing
"""

RLLIB_ATTRIBUTES = frozenset(_ATTRIBUTES.split())
"""Names of the attributes that `RLlibExtension` adds to objects of the core."""

SECTIONS = {
    "ray.rllib": "Names",
    "ray.rllib.algorithms": "Not offered",
    "ray.rllib.algorithms.algorithm_config": "Configs",
    "ray.rllib.connectors": "Connectors",
    "ray.rllib.core": "Not offered",
    "ray.rllib.env": "Environments",
    "ray.rllib.env.multi_agent_env_runner": "Not offered",
    "ray.rllib.env.single_agent_env_runner": "Not offered",
    "ray.rllib.models": "A custom model",
    "ray.rllib.models.action_dist": "A custom action distribution",
    "ray.rllib.models.tf.tf_action_dist": "A custom action distribution",
    "ray.rllib.models.torch": "Not offered",
    "ray.rllib.offline": "Recorded experience",
    "ray.rllib.offline.estimators": "Not offered",
    "ray.rllib.policy": "A custom policy",
    "ray.rllib.utils.exploration": "Configs",
    "ray.rllib.utils.replay_buffers": "Replay buffers",
    "ray.rllib.utils.schedules": "Schedules",
    "ray.air": "Ray Tune",
    "ray.train": "Ray Tune",
    "ray.tune": "Ray Tune",
}
"""Sections of `docs/migrate/rllib.md` about names without a replacement, by module prefix."""


def find_section(module: str) -> str:
    """Returns the section of the porting guide for a module of RLlib.

    >>> find_section("ray.rllib.models.tf.attention_net"), find_section("ray.rllib.core")
    ('A custom model', 'Not offered')
    """
    while module not in SECTIONS and "." in module:
        module = module.rpartition(".")[0]
    return SECTIONS.get(module, "Names")
