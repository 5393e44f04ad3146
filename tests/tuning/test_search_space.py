import json
import math

import pytest

import tfpolicies
from tfpolicies import DQNConfig, PPOConfig
from tfpolicies.errors import ConfigError
from tfpolicies.tuning import choice, log_uniform, share_of_steps, uniform
from tfpolicies.tuning.ranges import Choice
from tfpolicies.tuning.repairs import complete_settings
from tfpolicies.tuning.search_space import SearchSpace, nest
from tfpolicies.tuning.shipped_spaces import SHIPPED_SPACES, add_free_log_std, get_search_space

pytestmark = pytest.mark.core


def make_space(**ranges):
    return SearchSpace.from_mapping({name.replace("__", "."): x for name, x in ranges.items()})


# -- spaces -----------------------------------------------------------------------------------


def test_plain_values_are_constants_and_shares_become_steps():
    space = SearchSpace.from_mapping(
        {
            "lr": log_uniform(1e-5, 1e-2),
            "exploration_config.epsilon_timesteps": share_of_steps(0.0, 0.5),
            "gamma": 0.9,
        }
    )
    settings = space.make_settings(
        {"lr": 1e-3, "exploration_config.epsilon_timesteps": 0.25}, steps=8000
    )
    assert settings == {"gamma": 0.9, "lr": 1e-3, "exploration_config.epsilon_timesteps": 2000}


def test_several_settings_get_one_value():
    settings = {"model.fcnet_hiddens, q_model_config.fcnet_hiddens": [8]}
    assert nest(settings) == {
        "model": {"fcnet_hiddens": [8]},
        "q_model_config": {"fcnet_hiddens": [8]},
    }


def test_a_space_is_the_same_after_json():
    space = SearchSpace.from_mapping(
        {"lr": uniform(0.0, 1.0), "model.fcnet_hiddens": choice([[4], [8]]), "grad_clip": math.inf}
    )
    assert SearchSpace.from_json(json.loads(json.dumps(space.to_json()))) == space


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "needs a range"),
        ({"lr": 1e-3}, "needs a range"),
        ([1], "is a dict such as"),
        ({1: uniform(0, 1)}, "is a dict such as"),
        ({"lambda": uniform(0, 1), "lambda_": 0.9}, "sets lambda_? twice"),
        ({"lr, gamma": uniform(0, 1), "gamma": 0.9}, "sets gamma twice"),
    ],
)
def test_a_space_without_ranges_or_with_two_for_a_setting_is_refused(space, message):
    with pytest.raises(ConfigError, match=message):
        SearchSpace.from_mapping(space)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"learning_rate": uniform(0, 1)}, r"Here it is training\(lr=...\)"),
        ({"gamma": uniform(0.5, 1.5)}, "gamma=1.5"),
        ({"gamma": choice([0.9, "high"])}, "gamma='high'"),
        ({"model.fcnet_hidden": choice([[4], [8]])}, "fcnet_hidden"),
        ({"seed": choice([1, 2])}, "seed cannot be searched"),
        ({"lr": uniform(0, 1), "gamma": 2.0}, "gamma"),
    ],
)
def test_what_the_config_does_not_accept_is_an_error_before_the_search(space, message):
    config = PPOConfig()
    with pytest.raises(ConfigError, match=f"The search space.*{message}"):
        SearchSpace.from_mapping(space).check(config)
    assert config.to_dict() == PPOConfig().to_dict()


def test_settings_that_have_values_are_not_searched():
    space = SearchSpace.from_mapping(
        {
            "lr": uniform(0, 1),
            "model.fcnet_hiddens": choice([[4], [8]]),
            "updates_per_step": choice([1.0, 0.5]),
            "gamma": uniform(0, 1),
            "model.ortho_init": True,
        }
    )
    reduced = space.without(["lr", "model", "training_intensity"])
    assert list(reduced.ranges) == ["gamma"]
    assert reduced.constants == {}
    with pytest.raises(ConfigError, match="All settings"):
        reduced.without(["gamma"])


# -- repairs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "expected", "note"),
    [
        ({"sgd_minibatch_size": 512, "train_batch_size": 256}, {"sgd_minibatch_size": 256}, "512"),
        ({"train_batch_size": 64}, {"train_batch_size": 128}, "at least sgd_minibatch_size"),
        ({"train_batch_size": 16_384}, {"train_batch_size": 8000}, "at most the steps"),
        ({"sgd_minibatch_size": 8000}, {"sgd_minibatch_size": 4000}, "at most train_batch_size"),
        ({"train_batch_size": 512, "sgd_minibatch_size": 64}, {}, None),
    ],
)
def test_batches_that_cannot_work_are_changed_and_said(sampled, expected, note):
    settings, notes = complete_settings(PPOConfig(), sampled, steps=8000)
    assert settings == {**sampled, **expected}
    assert bool(notes) == (note is not None)
    assert all(note in text for text in notes)


def test_learning_starts_within_the_first_tenth_of_the_steps():
    name = "num_steps_sampled_before_learning_starts"
    settings, notes = complete_settings(DQNConfig(), {name: 10_000}, steps=5000)
    assert settings == {name: 500}
    assert notes == [f"{name} 10,000 becomes 500: at most a tenth of the steps of a trial"]


def test_settings_that_were_not_sampled_stay():
    config = DQNConfig().training(num_steps_sampled_before_learning_starts=10_000)
    assert complete_settings(config, {"lr": 1e-3}, steps=5000) == ({"lr": 1e-3}, [])


def test_a_schedule_keeps_its_shape():
    config = PPOConfig().training(lr=1e-3, lr_schedule=[[0, 1e-3], [500, 5e-4], [1000, 0.0]])
    settings, notes = complete_settings(config, {"lr": 2e-3}, steps=5000)
    assert settings == {"lr": 2e-3, "lr_schedule": [[0, 2e-3], [500, 1e-3], [1000, 0.0]]}
    assert notes == []
    assert complete_settings(config, {"gamma": 0.9}, steps=5000)[0] == {"gamma": 0.9}
    falling = PPOConfig().training(entropy_coeff=0.1, entropy_coeff_schedule=1000)  # to 0 there
    settings, _ = complete_settings(falling, {"entropy_coeff": 0.01}, steps=5000)
    assert settings == {"entropy_coeff": 0.01}


def test_updates_per_step_depend_on_the_batch():
    sampled = {"updates_per_step": 0.25, "train_batch_size": 64}
    settings, _ = complete_settings(DQNConfig(), sampled, steps=5000)
    assert settings == {"training_intensity": 16.0, "train_batch_size": 64}
    settings, _ = complete_settings(DQNConfig(), {"updates_per_step": 2.0}, steps=5000)
    assert settings == {"training_intensity": 64.0}  # of 32 rows, the default


# -- the spaces of the algorithms -------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED_SPACES)
def test_each_algorithm_accepts_its_space(name):
    config = getattr(tfpolicies, f"{name}Config")()
    space = get_search_space(config)
    space.check(config)
    assert space.source.startswith(f"{name}: ")
    for last in (False, True):
        values = {
            key: x.values[-last] if isinstance(x, Choice) else (x.high if last else x.low)
            for key, x in space.ranges.items()
        }
        settings, _ = complete_settings(config, space.make_settings(values, 5000), 5000)
        config.copy(copy_frozen=False).update_from_dict(nest(settings))


def test_constants_replace_defaults_only():
    config = PPOConfig().training(vf_clip_param=3.0)
    constants = get_search_space(config).constants
    assert "vf_clip_param" not in constants
    assert constants["kl_coeff"] == 0.0
    assert constants["num_envs_per_worker"] == 8


def test_gaussians_of_ppo_have_a_free_log_std_unless_it_is_set():
    config = PPOConfig()
    space = add_free_log_std(get_search_space(config), config)
    assert space.constants["model.free_log_std"] is True
    sac = tfpolicies.SACConfig()
    assert add_free_log_std(get_search_space(sac), sac) == get_search_space(sac)


def test_a_subclass_has_the_space_of_its_base():
    class Mine(tfpolicies.PPO):
        """A subclass."""

    assert get_search_space(Mine.get_default_config()).source.startswith("PPO: ")
    with pytest.raises(ConfigError, match="There is no search space for"):
        get_search_space(tfpolicies.AlgorithmConfig())
