"""Files of hyperparameters in the format of RL Baselines3 Zoo, written by hand."""

import math

import pytest

import tfpolicies
from tfpolicies.algorithms.tuned_hyperparameters import TUNED
from tfpolicies.algorithms.zoo_conversion import SUPPORTED, convert_entry
from tfpolicies.algorithms.zoo_expressions import parse_expression
from tfpolicies.algorithms.zoo_file import read_zoo_file
from tfpolicies.errors import ConfigError, MissingPackageError

pytestmark = pytest.mark.core

PPO_FILE = """
# a comment
CartPole-v1: &small
  n_envs: 8
  n_timesteps: !!float 1e5
  policy: 'MlpPolicy'
  n_steps: 32
  batch_size: 256
  gae_lambda: 0.8
  gamma: 0.98
  n_epochs: 20
  ent_coef: 0.0
  learning_rate: lin_0.001
  clip_range: lin_0.2

Walker-v4:
  <<: *small
  normalize: "{'norm_obs': True, 'norm_reward': False}"
  n_envs: 1
  n_timesteps: 1e6
  learning_rate: !!float 5.05e-05
  max_grad_norm: 1
  vf_coef: 0.87
  use_sde: True
  sde_sample_freq: 4
  policy_kwargs: "dict(
                    log_std_init=-2,
                    ortho_init=False,
                    activation_fn=nn.ReLU,
                    net_arch=[dict(pi=[256, 256], vf=[256, 256])]
                  )"
"""


@pytest.fixture
def write(tmp_path):
    """A function that writes a file and returns its path."""
    pytest.importorskip("yaml")

    def write_file(text, name="zoo.yml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


def convert(algo, **entry):
    return convert_entry(algo, {"n_timesteps": 10_000, "policy": "MlpPolicy", **entry})


# -- files ------------------------------------------------------------------------------------


def test_an_entry_becomes_the_settings_of_the_tuned_table(write):
    settings, steps, warnings = read_zoo_file(write(PPO_FILE), "PPO", "CartPole-v1")
    assert steps == 100_000
    assert settings["lr_schedule"] == [[0, 0.001], [100_000, 0.0]]
    for name, value in TUNED["PPO", "CartPole-v1"].settings.items():
        if name != "model":
            assert settings[name] == value
    assert settings["model"]["fcnet_hiddens"] == [64, 64]
    assert settings["optimizer"] == {"type": "adam", "epsilon": 1e-5}
    assert warnings == (
        "clip_range: the clip range is constant, not linear; set it by --set clip_param",
    )


def test_the_entry_of_another_version_is_used_and_said(write):
    settings, steps, warnings = read_zoo_file(write(PPO_FILE), "PPO", "Walker-v5")
    assert steps == 1_000_000
    assert settings["observation_filter"] == "MeanStdFilter"
    assert "reward_filter" not in settings
    assert settings["train_batch_size"] == 32  # merged: 32 steps of one environment
    expected = {
        "fcnet_hiddens": [256, 256],
        "fcnet_activation": "relu",
        "ortho_init": False,
        "free_log_std": True,
        "log_std_init": -2.0,
    }
    assert settings["model"] == expected
    assert warnings[0] == "there is no entry for Walker-v5: these are the settings of Walker-v4"
    assert [text.partition(" ")[0] for text in warnings[1:]] == [
        "clip_range:",
        "use_sde",
        "sde_sample_freq",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Acrobot-v1: {n_timesteps: 5}", "no entry for CartPole-v1; it has 1, such as Acrobot-v1"),
        ("- 1", "must have an entry for each environment"),
        ("CartPole-v1: 3", "CartPole-v1 must have settings"),
        ("a: [", "cannot be read as YAML"),
        ("a: !!python/object/apply:os.system [ls]", "cannot be read as YAML: could not determine"),
        (b"\xff\xfe\x00", "cannot be read as YAML"),
        ("[" * 2000, "cannot be read as YAML"),
        (b"a: " + b"1" * (1 << 20), "cannot be read as YAML: .* more than 1048576"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(write, content, message):
    with pytest.raises(ConfigError, match=message):
        read_zoo_file(write(content), "PPO", "CartPole-v1")


def test_merged_mappings_cannot_grow_without_limit(write):
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 60)]
    with pytest.raises(ConfigError, match=r"more than 10,000 keys|n_timesteps"):
        read_zoo_file(write("\n".join(lines)), "PPO", "a59")
    keys = "".join(f"  x{i}: 1\n" for i in range(10_001))
    with pytest.raises(ConfigError, match="more than 10,000 keys"):
        read_zoo_file(write(f"a:\n{keys}"), "PPO", "a")


def test_without_pyyaml_the_error_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tfpolicies\[yaml\]'"):
        read_zoo_file(tmp_path / "zoo.yml", "PPO", "CartPole-v1")
    with pytest.raises(ConfigError, match="are read for PPO, A2C"):
        read_zoo_file(tmp_path / "zoo.yml", "MARWIL", "CartPole-v1")


# -- entries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", SUPPORTED)
def test_an_empty_entry_has_the_defaults_of_stable_baselines3(algo):
    settings, _, warnings = convert(algo)
    config = getattr(tfpolicies, f"{algo}Config")().update_from_dict(settings)
    assert warnings == []
    assert config.num_envs_per_worker == 1
    expected = {
        "PPO": {"train_batch_size": 2048, "sgd_minibatch_size": 64, "lr": 3e-4},
        "A2C": {"train_batch_size": 5, "lr": 7e-4, "vf_loss_coeff": 1.0},
        "DQN": {"train_batch_size": 32, "lr": 1e-4, "rollout_fragment_length": 4},
        "SAC": {"train_batch_size": 256, "lr": 3e-4, "training_intensity": 256.0},
        "TD3": {"train_batch_size": 256, "lr": 1e-3, "actor_hiddens": [400, 300]},
        "DDPG": {"train_batch_size": 256, "lr": 1e-3, "critic_hiddens": [400, 300]},
    }[algo]
    assert {name: config[name] for name in expected} == expected


def test_dqn_counts_updates_in_rows_and_exploration_in_steps():
    settings, _, _ = convert(
        "DQN",
        n_envs=2,
        batch_size=64,
        train_freq=16,
        gradient_steps=8,
        exploration_fraction=0.2,
        exploration_final_eps=0.07,
        target_update_interval=600,
        buffer_size=5e4,
        learning_starts=1000,
        policy_kwargs="dict(net_arch=[256, 256])",
    )
    assert settings["training_intensity"] == 16.0  # 8 updates of 64 rows for 32 steps
    assert settings["rollout_fragment_length"] == 16
    assert settings["exploration_config"]["epsilon_timesteps"] == 2000
    assert settings["exploration_config"]["final_epsilon"] == 0.07
    assert settings["target_network_update_freq"] == 600
    assert settings["replay_buffer_config"]["capacity"] == 50_000
    assert settings["num_steps_sampled_before_learning_starts"] == 1000
    assert settings["model"]["fcnet_hiddens"] == [256, 256]


def test_sac_has_a_temperature_and_networks_of_actor_and_critics():
    kwargs = "dict(net_arch=dict(pi=[64], qf=[32, 32]), activation_fn=th.nn.Tanh)"
    settings, _, _ = convert("SAC", ent_coef=0.1, gradient_steps=-1, policy_kwargs=kwargs)
    assert (settings["initial_alpha"], settings["entropy_lr"]) == (0.1, 0.0)
    assert settings["model"] == {"fcnet_hiddens": [64], "fcnet_activation": "tanh"}
    assert settings["q_model_config"] == {"fcnet_hiddens": [32, 32], "fcnet_activation": "tanh"}
    automatic, _, _ = convert("SAC", ent_coef="auto_0.5", learning_starts=0)
    assert automatic["initial_alpha"] == 0.5
    assert "entropy_lr" not in automatic
    assert automatic["exploration_config"]["random_timesteps"] == 0


def test_td3_has_the_noise_of_the_entry():
    settings, _, _ = convert("TD3", noise_type="normal", noise_std=0.1, policy_delay=3)
    assert settings["exploration_config"]["stddev"] == 0.1
    assert settings["policy_delay"] == 3
    settings, _, _ = convert("DDPG", noise_type="ornstein-uhlenbeck", noise_std=0.5)
    tuned = TUNED["DDPG", "MountainCarContinuous-v0"].settings["exploration_config"]
    for name in ("type", "ou_base_scale", "ou_theta", "ou_sigma", "final_scale"):
        assert settings["exploration_config"][name] == tuned[name]


def test_a2c_weighs_the_square_of_the_value_error():
    settings, _, _ = convert("A2C", n_envs=8, n_steps=16, vf_coef=0.25, use_rms_prop=False)
    assert settings["vf_loss_coeff"] == 0.5
    assert (settings["train_batch_size"], settings["rollout_fragment_length"]) == (128, 16)
    assert settings["optimizer"]["type"] == "adam"


def test_images_get_the_network_of_the_dqn_paper():
    settings, _, _ = convert("PPO", policy="CnnPolicy")
    assert settings["model"]["conv_filters"][0] == [32, 8, 4]
    assert settings["model"]["vf_share_layers"] is True
    assert math.isinf(settings["vf_clip_param"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"env_wrapper": ["my.Wrapper"]}, "env_wrapper is not converted. Wrap the environment"),
        ({"frame_stack": 4}, "frame_stack is not converted"),
        ({"callback": ["my.Callback"]}, "subclass of DefaultCallbacks"),
        ({"target_kl": 0.02}, "kl_target"),
        ({"n_timesteps": None}, "n_timesteps must be a number, got None"),
        ({"n_steps": 1.5}, "n_steps must be a whole number"),
        ({"learning_rate": "cos_1e-3"}, "learning_rate must be a number, got 'cos_1e-3'"),
        ({"policy": "MlpLstmPolicy"}, "model.use_lstm=true"),
        ({"buffer_size": 100}, "PPO has no 'buffer_size'.*another algorithm"),
        ({"n_epoch": 3}, "Did you mean 'n_epochs'"),
        ({"policy_kwargs": "dict(net_arch=[dict(pi=[8], vf=[9])])"}, "different layers"),
        ({"policy_kwargs": "dict(net_arch=[0])"}, "must be a list of sizes"),
        ({"policy_kwargs": "dict(activation_fn=nn.Mish)"}, "activation_fn must be one of Tanh"),
        ({"policy_kwargs": "__import__('os').system('ls')"}, r"is not dict\(name=value\)"),
        ({"policy_kwargs": "dict(a=open('x'))"}, r"is not dict\(name=value\)"),
        ({"policy_kwargs": [1]}, r"policy_kwargs must be dict\(...\)"),
    ],
)
def test_a_setting_without_an_equivalent_is_an_error_with_a_next_step(entry, message):
    with pytest.raises(ConfigError, match=message):
        convert("PPO", **entry)


def test_a_number_of_steps_is_required():
    with pytest.raises(ConfigError, match="n_timesteps, the steps of training, is missing"):
        convert_entry("PPO", {"policy": "MlpPolicy"})


def test_replay_by_episodes_is_refused():
    with pytest.raises(ConfigError, match="counts steps here, not episodes"):
        convert("SAC", train_freq=[1, "episode"])
    assert convert("SAC", train_freq=[8, "step"])[0]["rollout_fragment_length"] == 8


def test_settings_that_change_nothing_give_no_warning():
    assert convert("SAC", use_sde=False, optimize_memory_usage=False)[2] == []
    _, _, warnings = convert(
        "SAC", use_sde=True, policy_kwargs="dict(log_std_init=-3, use_expln=True)"
    )
    assert [text.partition(" is not used")[0] for text in warnings] == [
        "policy_kwargs: log_std_init",
        "policy_kwargs: use_expln",
        "use_sde",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("dict()", {}),
        ("{'a': (1, -2.5), 'b': None}", {"a": [1, -2.5], "b": None}),
        ("dict(f=nn.ELU, g=dict(h=[True]))", {"f": "ELU", "g": {"h": [True]}}),
    ],
)
def test_expressions_are_parsed(text, value):
    assert parse_expression("x", text) == value


@pytest.mark.parametrize("text", ["", "dict(", "f()", "dict([1])", "dict(**a)", "a", "(" * 5000])
def test_other_expressions_are_refused(text):
    with pytest.raises(ConfigError, match="x must be an expression such as"):
        parse_expression("x", text)


def test_the_command_trains_with_an_entry(write, tmp_path, capsys, caplog):
    from tfpolicies.cli import main

    text = PPO_FILE.replace("!!float 1e5", "256")
    path = write(text)
    words = ["train", "CartPole-v1", "--config", str(path), "--run-dir", str(tmp_path / "runs")]
    assert main([*words, "--set", "jit_compile=False", "--set", "inference=tf"]) == 0
    output = capsys.readouterr().out
    assert "settings of --config, the rest: RLlib's defaults" in output
    assert "256" in output
    assert "the clip range is constant" in caplog.text
    assert main(["train", "--config", str(path)]) == 2
    assert "has an entry for each environment" in capsys.readouterr().err
