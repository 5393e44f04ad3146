"""Configs in ported code: names of methods, and settings that RLlib's algorithms have."""

import json
import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces

import tfpolicies.compat
from helpers.environments import CountingEnv, TwoArmsEnv
from helpers.factories import assert_close, batch_for, make
from helpers.quick_configs import quick_config
from tfpolicies import AlgorithmConfig, DQNConfig, PPOConfig, PPOTF1Policy, PPOTF2Policy
from tfpolicies.errors import ConfigError, UnknownSettingError, UsageError

pytestmark = pytest.mark.usefixtures("kept_programs")


def test_the_fragment_length_of_each_worker_sums_up_to_the_train_batch():
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
def test_atari_games_are_recognized_by_their_name(env, is_game):
    assert AlgorithmConfig().environment(env).is_atari is is_game


def test_pop_reads_a_setting():
    config = PPOConfig().training(lr=0.5)
    assert config.pop("lr") == config.lr == 0.5
    assert config.pop("nothing", 7) == 7


def test_multi_agent_settings_are_read_as_old_dicts_have_them():
    config = PPOConfig().multi_agent(policies={"a", "b"}, policies_to_train=["a"])
    result = config["multiagent"]
    assert set(result["policies"]) == {"a", "b"}
    assert result["policies_to_train"] == ["a"]
    with pytest.raises(UnknownSettingError, match="belongs to old dict configs"):
        config["multiagent"] = {}


def test_a_serialized_config_is_json_without_code():
    config = PPOConfig().environment(CountingEnv, observation_space=spaces.Discrete(3))
    config.multi_agent(policies={"b", "a"}, policy_mapping_fn=lambda *values, **more: "a")
    config.callbacks(tfpolicies.DefaultCallbacks).environment(env_config={"map": np.eye(2)})
    result = json.loads(json.dumps(config.serialize()))
    assert result["env"] == "helpers.environments.CountingEnv"
    assert result["callbacks"] == "tfpolicies.config.callbacks.DefaultCallbacks"
    assert result["policy_mapping_fn"] == "__not_serializable__"
    assert result["policies"] == {"a": [None] * 4, "b": [None] * 4}
    assert result["observation_space"]["type"] == "Discrete"
    assert result["env_config"] == {"map": [[1.0, 0.0], [0.0, 1.0]]}
    assert (result["lr"], result["lambda"]) == (5e-5, 1.0)


UNKNOWN = """
from tfpolicies import AlgorithmConfig, SampleBatch
config, batch = AlgorithmConfig(), SampleBatch(obs=[1])
for part, name in ((config, "serialize"), (config, "kl_coeff"), (batch, "policy_batches")):
    try:
        getattr(part, name)
    except AttributeError as error:
        print(" ".join(str(error).split()))
"""


def test_without_compat_an_error_names_its_import():
    command = [sys.executable, "-c", UNKNOWN]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    ported_name, name_of_another_config, name_of_a_batch = process.stdout.splitlines()
    message = "RLlib finds it after `import tfpolicies.compat`"
    assert f"has no such setting. Code written for {message}" in ported_name
    assert "in their config, such as PPOConfig" in name_of_another_config
    assert message not in name_of_another_config
    assert message.removeprefix("RLlib ") in name_of_a_batch


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_without_the_divergence_in_the_loss_its_coefficient_stays_zero(policy_class):
    policy = make(policy_class, use_kl_loss=False, kl_coeff=0.5)
    assert policy.config["kl_coeff"] == 0.5
    assert policy.kl_coeff == 0.0
    stats = policy.learn_on_batch(batch_for(policy, 8))["learner_stats"]
    assert stats["total_loss"] == pytest.approx(stats["policy_loss"] + stats["vf_loss"], rel=1e-5)
    assert policy.update_kl(10.0) == 0.0
    assert make(policy_class, use_kl_loss=True, kl_coeff=0.5).kl_coeff == 0.5


def build_dqn(change):
    config = quick_config(
        DQNConfig,
        lambda context: TwoArmsEnv(),
        num_envs_per_worker=2,
        rollout_fragment_length=4,
        hiddens=[],
        train_batch_size=4,
        training_intensity=2.0,
        num_steps_sampled_before_learning_starts=0,
        target_network_update_freq=8,
        replay_buffer_config={"capacity": 32},
        min_sample_timesteps_per_iteration=0,
    )
    return config.training(before_learn_on_batch=change).build()


def test_rows_can_be_changed_before_each_update():
    counts = []

    def change(batch, workers, config):
        assert type(batch) is tfpolicies.MultiAgentBatch
        assert workers.local_worker().config is config
        counts.append(batch.count)
        batch.policy_batches["default_policy"]["rewards"][:] = 1000.0
        return batch

    algorithm = build_dqn(change)
    result = algorithm.train()
    assert counts == [4] * 4  # 8 rows sampled, 16 to be trained on
    assert result["num_agent_steps_trained"] == 16
    assert result["info"]["learner"]["default_policy"]["learner_stats"]["mean_td_error"] < -900
    assert algorithm.counters["num_target_updates"] == 1


def test_a_function_that_returns_its_batch_changes_nothing():
    weights = []
    for change in (None, lambda batch, workers, config: batch):
        algorithm = build_dqn(change)
        algorithm.train()
        weights.append(algorithm.get_weights()["default_policy"])
    assert_close(*weights, atol=1e-6)


@pytest.mark.parametrize(
    "changed", [None, tfpolicies.SampleBatch(obs=np.zeros((3, 1))).as_multi_agent()]
)
def test_a_function_that_returns_another_number_of_rows_is_refused(changed):
    algorithm = build_dqn(lambda batch, workers, config: changed)
    with pytest.raises(UsageError, match=r"must return a MultiAgentBatch with 4 rows"):
        algorithm.train()
    with pytest.raises(ConfigError, match=r"before_learn_on_batch must be None or a function"):
        DQNConfig().training(before_learn_on_batch=3)
