"""What ported code asks of configs: old names, and settings that RLlib's algorithms have."""

import json
import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces

import tfpolicies.compat  # noqa: F401
from helpers.environments import CountingEnv, TwoArmsEnv
from helpers.factories import batch_for, make
from tfpolicies import (
    AlgorithmConfig,
    DefaultCallbacks,
    DQNConfig,
    MultiAgentBatch,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    SampleBatch,
)
from tfpolicies.errors import ConfigError, UnknownSettingError, UsageError

pytestmark = pytest.mark.usefixtures("kept_programs")


def test_each_worker_is_told_how_many_steps_it_samples():
    config = AlgorithmConfig().training(train_batch_size=4000)
    config.rollouts(num_rollout_workers=3, num_envs_per_worker=2, rollout_fragment_length="auto")
    results = [config.get_rollout_fragment_length(worker_index=i) for i in range(4)]
    assert results == [667, 667, 667, 666]
    config.rollouts(rollout_fragment_length=50)
    assert config.get_rollout_fragment_length() == 50
    assert config.total_train_batch_size == 4000


@pytest.mark.parametrize(
    ("env", "is_game"),
    [("ALE/Pong-v5", True), ("CartPole-v1", False), ("Nothing", False), (CountingEnv, False)],
)
def test_games_are_known_by_their_name(env, is_game):
    assert AlgorithmConfig().environment(env).is_atari is is_game


def test_taking_a_setting_out_reads_it():
    config = PPOConfig().training(lr=0.5)
    assert config.pop("lr") == config.lr == 0.5
    assert config.pop("nothing", 7) == 7


def test_settings_about_several_agents_are_read_as_old_dicts_have_them():
    config = PPOConfig().multi_agent(policies={"a", "b"}, policies_to_train=["a"])
    result = config["multiagent"]
    assert set(result["policies"]) == {"a", "b"}
    assert result["policies_to_train"] == ["a"]
    with pytest.raises(UnknownSettingError, match="belongs to old dict configs"):
        config["multiagent"] = {}


def test_a_serialized_config_is_json_without_code():
    config = PPOConfig().environment(CountingEnv, observation_space=spaces.Discrete(3))
    config.multi_agent(policies={"b", "a"}, policy_mapping_fn=lambda *values, **more: "a")
    config.callbacks(DefaultCallbacks).environment(env_config={"map": np.eye(2)})
    result = json.loads(json.dumps(config.serialize()))
    assert result["env"] == "helpers.environments.CountingEnv"
    assert result["callbacks"] == "tfpolicies.config.callbacks.DefaultCallbacks"
    assert result["policy_mapping_fn"] == "__not_serializable__"
    assert result["policies"] == {"a": [None] * 4, "b": [None] * 4}
    assert result["observation_space"]["type"] == "Discrete"
    assert result["env_config"] == {"map": [[1.0, 0.0], [0.0, 1.0]]}
    assert (result["lr"], result["lambda"]) == (5e-5, 1.0)


UNKNOWN = """
from tfpolicies import AlgorithmConfig
for name in ("serialize", "kl_coeff"):
    try:
        getattr(AlgorithmConfig(), name)
    except AttributeError as error:
        print(" ".join(str(error).split()))
"""


def test_without_the_names_for_porting_an_error_says_where_they_are():
    command = [sys.executable, "-c", UNKNOWN]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    of_ported_code, of_another_config = done.stdout.splitlines()
    message = "RLlib finds it after `import tfpolicies.compat`"
    assert f"has no such setting. Code written for {message}" in of_ported_code
    assert "in their config, such as PPOConfig" in of_another_config
    assert message not in of_another_config


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_without_the_divergence_in_the_loss_its_coefficient_is_and_stays_zero(policy_class):
    policy = make(policy_class, use_kl_loss=False, kl_coeff=0.5)
    assert policy.config["kl_coeff"] == 0.5
    assert policy.kl_coeff == 0.0
    stats = policy.learn_on_batch(batch_for(policy, 8))["learner_stats"]
    assert stats["total_loss"] == pytest.approx(stats["policy_loss"] + stats["vf_loss"], rel=1e-5)
    assert policy.update_kl(10.0) == 0.0
    assert make(policy_class, use_kl_loss=True, kl_coeff=0.5).kl_coeff == 0.5


# -- rows that are changed before they are learned from ---------------------------------------


def replaying(change, **training):
    config = DQNConfig().environment(lambda context: TwoArmsEnv())
    config.rollouts(num_envs_per_worker=2, rollout_fragment_length=4)
    config.training(
        before_learn_on_batch=change,
        model={"fcnet_hiddens": [4]},
        hiddens=[],
        train_batch_size=4,
        training_intensity=2.0,
        num_steps_sampled_before_learning_starts=0,
        target_network_update_freq=8,
        replay_buffer_config={"capacity": 32},
        **training,
    )
    config.framework(inference="tf", jit_compile=False).debugging(seed=4, log_level="ERROR")
    return config.reporting(min_sample_timesteps_per_iteration=0).build()


def test_rows_can_be_changed_before_each_update():
    seen = []

    def change(batch, workers, config):
        assert type(batch) is MultiAgentBatch
        assert workers.local_worker().config is config
        seen.append(batch.count)
        batch.policy_batches["default_policy"]["rewards"][:] = 1000.0
        return batch

    algorithm = replaying(change)
    result = algorithm.train()
    assert seen == [4] * 4  # 8 rows sampled, 16 to be trained on
    assert result["num_agent_steps_trained"] == 16
    assert result["info"]["learner"]["default_policy"]["learner_stats"]["mean_td_error"] < -900
    assert algorithm.counters["num_target_updates"] == 1
    algorithm.stop()


def test_rows_that_nobody_changes_are_learned_from_as_ever():
    weights = []
    for change in (None, lambda batch, workers, config: batch):
        algorithm = replaying(change)
        algorithm.train()
        weights.append(algorithm.get_weights()["default_policy"])
        algorithm.stop()
    for name, value in weights[0].items():
        np.testing.assert_allclose(value, weights[1][name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "changed", [None, MultiAgentBatch({"default_policy": SampleBatch(obs=np.zeros((3, 1)))}, 3)]
)
def test_what_is_no_batch_of_as_many_rows_is_refused(changed):
    algorithm = replaying(lambda batch, workers, config: changed)
    with pytest.raises(UsageError, match=r"must return a MultiAgentBatch with 4 rows"):
        algorithm.train()
    algorithm.stop()


def test_what_changes_rows_is_a_function():
    with pytest.raises(ConfigError, match=r"before_learn_on_batch must be None or a function"):
        DQNConfig().training(before_learn_on_batch=3)
