"""What `tools.rllib_tests` knows of single tests of RLlib: repairs, and why some do not count.

A test of a repaired file counts as "ok*": it passes with another name for a private one, another
text of a message, or a difference that `docs/migrate/rllib.md` names. Tests in `NOT_COUNTED` also
run, but are not part of the share.
"""

import re

REPAIRS: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "policy/tests/test_policy_map": {
        "test_policy_map": (  # private names
            (r"policy_map\._deque", "policy_map.in_memory()"),
            (r"policy_map\.cache\.keys\(\)", "policy_map.in_memory()"),
            (r"policy_map\.cache", "policy_map.in_memory()"),
            (r"policy_map\._valid_keys", "set(policy_map)"),
        )
    },
    "policy/tests/test_export_checkpoint_and_model": {
        "test_export_ppo": (  # the outputs of a SavedModel have names; no state without a memory
            (
                r"results = model\(tf\.convert_to_tensor\((.*)\)\)",
                r"results = (model(tf.convert_to_tensor(\1))['action_dist_inputs'], None)",
            ),
            (r"assert results\[1\]\.shape == \(1, 1\).*", "pass"),
        ),
        "test_export_ppo_multi_agent": (),
    },
    "algorithms/tests/test_algorithm_export_checkpoint": {
        "test_save_ppo": (
            (
                r"results = model\(tf\.convert_to_tensor\((.*)\)\)",
                r"results = (model(tf.convert_to_tensor(\1))['action_dist_inputs'], None)",
            ),
            (r"assert results\[1\]\.shape == \(1, 1\).*", "pass"),
        )
    },
    "evaluation/tests/test_rollout_worker": {
        "test_global_vars_update": (  # numbers are numbers in graph mode, too
            (r"policy\.get_session\(\)\.run\(lr\)", "lr"),
        )
    },
    "evaluation/tests/test_postprocessing": {
        "test_n_step_malformed_terminateds": (  # the text of a message
            (r'"Unexpected terminated.*in middle"', '"takes a single trajectory"'),
        )
    },
    "evaluation/tests/test_episode_v2": {
        "test_single_agent_env": (  # hand-written policies see what environments give
            (r"obs_batch\.argmax\(axis=1\)", "np.array(obs_batch)"),
            (r"\Aimport", "import numpy as np\nimport"),
        ),
        "test_multi_agent_env": (),
    },
    "env/tests/test_multi_agent_env": {
        "test_train_multi_agent_cartpole_multi_policy": (  # the text of a message
            (r'"not found in PolicyMap"', '"No policy"'),
        ),
        "test_multi_agent_sample_round_robin": (  # observations of batches are those of the space
            (r"one_hot\((np\.array\(\[[\d, ]+\] \* 2\)), 10\)", r"\1"),
        ),
    },
    "algorithms/tests/test_algorithm_config": {
        "test_update_from_dict_works_for_multi_callbacks": (  # the name of a class
            (
                r'"ray\.rllib\.algorithms\.callbacks\.make_multi_callbacks\.<locals>\."',
                '"tfpolicies.config.callbacks."',
            ),
            ('"_MultiCallbacks"', '"MultiCallbacks"'),
        ),
        "test_rollout_fragment_length": (  # rounded up, so that a round is a train batch
            (r"(worker_index=3\)) == 204", r"\1 == 205"),
        ),
    },
    "examples/models/modelv3": {"test_modelv3": ((r"\binputs=lstm_in", "lstm_in"),)},  # of Keras 3
}
"""By file, and by the tests they are for: patterns, and what stands in their place."""

_LATER = "later: with the algorithm that it needs"
_NEW_STACK = "other: RLlib's new stack, or PyTorch"
_NOT_WANTED = "not wanted: named in the guide, with what to do instead"
_INTERNAL = "internal: what no user calls"
_TIMING = "internal: compares two times of a machine"
_TORCH = "other: tests PyTorch alone"
_ATARI = "other: needs Atari's games, which are no part of the environments here"

NOT_COUNTED: dict[str, str] = {
    "test_policy_swap_gpu": _LATER,
    "test_add_policy_connector_enabled": _LATER,
    "test_export_appo": _LATER,
    "test_save_appo_multi_agent": _LATER,
    "test_sac_discr": _LATER,
    "test_ppo_cont": "not wanted: variables by the names of RLlib's layers",
    "test_sac_cont": "not wanted: variables by the names of RLlib's layers",
    "test_to_device": _TORCH,
    "test_interceptors": _TORCH,
    "test_add_time_dimension": _TORCH,
    "test_policy_get_and_set_state": _TORCH,
    "test_action_normalization_offline_dataset": _LATER,
    "test_reward_clipping": _NOT_WANTED,
    "test_metrics": _NOT_WANTED,
    "test_auto_vectorization": _NOT_WANTED,
    "test_batches_larger_when_vectorized": _NOT_WANTED,
    "test_vector_env_support": _NOT_WANTED,
    "test_traj_view_next_action": _TORCH,
    "test_traj_view_lstm_functionality": _NEW_STACK,
    "test_traj_view_attention_functionality": _INTERNAL,
    "TestAgentCollector": _NOT_WANTED,
    "test_crash_only_one_worker_during_sampling_but_ignore": _INTERNAL,
    "test_crash_only_one_worker_during_sampling_but_recreate": _INTERNAL,
    "test_guess_the_number_multi_agent": _NEW_STACK,
    "test_inference_batches_are_grouped_by_policy": _NEW_STACK,
    "test_action_connector_gets_raw_input_dict": _NEW_STACK,
    "test_start_episode": _NEW_STACK,
    "test_env_runner_output": _NEW_STACK,
    "test_env_error": _NEW_STACK,
    "test_no_reset_until_poll": _NOT_WANTED,
    "test_vectorize_basic": _NOT_WANTED,
    "test_vectorize_round_robin": _NOT_WANTED,
    "test_multi_agent_sample_sync_remote": _NOT_WANTED,
    "test_multi_agent_sample_async_remote": _NOT_WANTED,
    "test_returning_model_based_rollouts_data": _NOT_WANTED,
    "test_space_in_preferred_format": _NOT_WANTED,
    "test_spaces_sample_contain_in_preferred_format": _NOT_WANTED,
    "test_evaluation_wo_evaluation_worker_set": _NOT_WANTED,
    "test_space_inference_from_remote_workers": _TIMING,
    "test_worker_validation_time": _TIMING,
    "test_no_env_but_eval_workers_do_have_env": _LATER,
    "test_rl_module_api": _NEW_STACK,
    "test_config_per_module": _NEW_STACK,
    "test_learner_api": _NEW_STACK,
    "test_get_marl_module_spec": _NEW_STACK,
    "test_on_sub_environment_created_with_remote_envs": _NOT_WANTED,
    "test_on_workers_recreated_callback": _LATER,
    "test_callbacks_on_env_runner::": _NEW_STACK,
    "test_rlms_and_preprocessing": _NEW_STACK,
    "test_gym_preprocessors": _ATARI,
    "test_distributions::": _TORCH,
    "test_impala": _LATER,
    "TestRE3": _NOT_WANTED,
    "test_fifo_replay_buffer::": _NOT_WANTED,
    "test_multi_agent_mixin_replay_buffer::": _NOT_WANTED,
    "test_segment_tree_replay_buffer_api::": _NOT_WANTED,
}
"""Tests, classes and files (with `::`), and why they do not count."""


def repaired(file: str, text: str) -> str:
    """Returns the text of a file, ported, with its repairs."""
    for repairs in REPAIRS.get(file, {}).values():
        for pattern, instead in repairs:
            text = re.sub(pattern, instead, text)
    return text


def is_repaired(file: str, test: str) -> bool:
    """Whether a test is what repairs are for; those of examples are for tests elsewhere."""
    function = test.rpartition("::")[2]
    example = file not in REPAIRS and any(function in tests for tests in REPAIRS.values())
    return function in REPAIRS.get(file, {}) or example


def why_not_counted(file: str, test: str) -> str | None:
    """Returns why a test is no part of the share, None if it is one."""
    name = f"{file}::{test}::"
    parts = {part if part.endswith("::") else f"::{part}::": part for part in NOT_COUNTED}
    return next((NOT_COUNTED[part] for known, part in parts.items() if known in name), None)
