"""Hints for names of other libraries, Keras models and learning-rate schedules in configs."""

import keras
import numpy as np
import pytest

from helpers.factories import make, trajectory
from helpers.quick_configs import quick_config
from tfpolicies import (
    PPO,
    Algorithm,
    DefaultCallbacks,
    DQNConfig,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    SACConfig,
    TD3Config,
    TFPolicy,
)
from tfpolicies.cli import main
from tfpolicies.config.migration_hints import SETTINGS
from tfpolicies.errors import ConfigError, ModelError, UnknownPolicyError, UsageError

SCHEDULES = keras.optimizers.schedules


def build_algorithm(callbacks=DefaultCallbacks, **training):
    config = quick_config(env="CartPole-v1", train_batch_size=32, log_level="WARN", **training)
    return config.callbacks(callbacks).build()


class CustomModel(keras.Model):
    def __init__(self, hidden=8):
        super().__init__()


def train(**settings):
    return lambda: PPOConfig().training(**settings)


@pytest.mark.parametrize(
    ("idiom", "error", "words"),
    [
        (lambda: PPO("MlpPolicy", "CartPole-v1"), ConfigError, "PPOConfig().environment(env)"),
        (train(n_steps=2048), TypeError, "training(train_batch_size="),
        (train(policy_kwargs={}), TypeError, "'fcnet_hiddens': [64, 64]"),
        (
            lambda: PPO("MlpPolicy", "CartPole-v1", verbose=1, ent_coef=0.1),
            TypeError,
            "PPO() got unexpected keywords: verbose, ent_coef. Here 'verbose' is debugging("
            "log_level='INFO'). Here 'ent_coef' is training(entropy_coeff=...). Write PPOConfig()",
        ),
        (train(target_kl=0.1), TypeError, "kl_coeff) that adapts"),
        (train(use_sde=True), TypeError, "not offered"),
        (train(free_log_std=True), TypeError, "{'free_log_std': ...}"),
        (lambda: PPOConfig().rollouts(norm_obs=True), TypeError, "'MeanStdFilter'"),
        (lambda: PPOConfig().environment(num_envs=8), TypeError, "num_envs_per_worker=..."),
        (lambda: PPOConfig().rollouts(n_envs=8), TypeError, "num_envs_per_worker=..."),
        (lambda: PPOConfig().update_from_dict({"clip_range": 0.1}), KeyError, "clip_param"),
        (lambda: DQNConfig().training(buffer_size=9), TypeError, "{'capacity': ...}"),
        (lambda: PPOConfig()["learning_rate"], KeyError, "training(lr=...)"),
        (lambda: PPO.predict, AttributeError, "predict"),
        (
            train(optimizer=keras.optimizers.SGD(0.25, momentum=0.5)),
            ConfigError,
            "training(lr=0.25, optimizer={'type': 'sgd', 'momentum': 0.5})",
        ),
        (
            train(lr=keras.optimizers.Adam(1e-3)),
            ConfigError,
            "lr cannot be an optimizer object, since each policy creates its own optimizer; got "
            "Adam(...). Write training(lr=0.001, optimizer={'type': 'adam'}).",
        ),
        (
            train(optimizer=keras.optimizers.Adam(SCHEDULES.ExponentialDecay(0.5, 10, 0.9))),
            ConfigError,
            "training(lr={'type': 'ExponentialDecay', 'initial_learning_rate': 0.5, ",
        ),
        (train(model=[keras.layers.Dense(2)]), ConfigError, "keras.Sequential([...])"),
        (train(model="m.keras"), ConfigError, "keras.models.load_model"),
        (lambda: make().save_weights("w"), AttributeError, "to_keras().save_weights"),
        (
            train(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
            ConfigError,
            "training(lr=..., optimizer={'type': 'adam', ...})",
        ),
        (
            lambda: make(model={"custom_model": CustomModel}),
            ModelError,
            "The model class CustomModel(hidden=8) is called with (observation_space, ",
        ),
        (
            lambda: make(model={"custom_model": lambda size: None}),
            ModelError,
            "The factory of models <lambda>(size) is called with",
        ),
    ],
)
def test_an_idiom_of_another_library_is_answered_with_the_one_here(idiom, error, words):
    with pytest.raises(error) as caught:
        idiom()
    assert words in str(caught.value)


def test_predict_and_callback_of_an_algorithm_are_answered():
    built = build_algorithm()
    with pytest.raises(
        AttributeError, match=r"'PPO' object has no attribute 'predict'.*get_policy"
    ):
        built.predict(np.zeros(4))
    with pytest.raises(TypeError, match=r"^PPO\.learn\(\) got .* 'callback' is callbacks=\[f\]"):
        built.learn(32, callback=print)
    assert built.training_iteration == 0
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_thing'$"):
        _ = built.no_such_thing


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (SACConfig, "ent_coef", "training(initial_alpha=...)"),
        (PPOConfig, "ent_coef", "training(entropy_coeff=...)"),
        (PPOConfig, "batch_size", "training(sgd_minibatch_size=...)"),
        (SACConfig, "batch_size", "training(train_batch_size=...)"),
        (TD3Config, "action_noise", "exploration_config={'type': 'GaussianNoise', "),
        (TD3Config, "target_policy_noise", "training(target_noise=...)"),
        (DQNConfig, "learning_starts", "(num_steps_sampled_before_learning_starts=...)"),
    ],
)
def test_the_answer_is_that_for_the_algorithm(config, name, words):
    for idiom in (lambda: config().training(**{name: 1}), lambda: config()[name]):
        with pytest.raises((TypeError, KeyError)) as caught:
            idiom()
        assert words in str(caught.value)
    with pytest.raises(TypeError) as caught:
        config().algo_class("MlpPolicy", **{name: 1})
    assert words in str(caught.value)


def test_loading_by_the_class_is_answered():
    for kind in (PPO, Algorithm):
        with pytest.raises(AttributeError, match=r"'load'\. Use `Algorithm\.from_checkpoint\(fol"):
            kind.load("folder")
    assert not hasattr(PPO, "no_such_thing")


def test_a_linear_rate_of_the_zoo_is_a_schedule_here(capsys):
    expected = "lr_schedule=[[0, 0.001], [total_timesteps, 0.0]]"
    with pytest.raises(ConfigError) as caught:
        PPOConfig().training(lr="lin_1e-3")
    assert expected in str(caught.value)
    assert main(["train", "CartPole-v1", "--lr", "lin_1e-3"]) == 2
    assert expected in capsys.readouterr().err


def test_a_callback_that_returns_false_is_answered_with_a_way_to_stop(caplog):
    class Stops(DefaultCallbacks):
        def on_train_result(self, *, algorithm, result):
            return False

    built = build_algorithm()
    built.callbacks = Stops()
    caplog.set_level("WARNING", "tfpolicies")
    built.learn(64, callbacks=[DefaultCallbacks()], progress=False)
    assert built.training_iteration == 2
    (line,) = [x.getMessage() for x in caplog.records if "returned False" in x.getMessage()]
    assert "f(algorithm, result) does, in learn(..., callbacks=[f])" in line

    class BaseCallback:
        __module__ = "stable_baselines3.common.callbacks"

    class EvalCallback(BaseCallback):
        __module__ = "stable_baselines3.common.callbacks"

    words = r"Use config.evaluation\(evaluation_interval=N.*keep_best"
    with pytest.raises(UsageError, match=words):
        built.learn(64, callbacks=[EvalCallback()])
    custom = type("Custom", (BaseCallback,), {"__module__": __name__})
    with pytest.raises(UsageError, match="in callbacks of learn ends training by returning False"):
        built.learn(64, callbacks=custom())


def test_a_callback_with_a_name_that_nothing_calls_is_warned_about(caplog):
    class Stops(DefaultCallbacks):
        def _on_step(self):
            return False

        def on_episode_ends(self, **kwargs):
            pass

    caplog.set_level("WARNING", "tfpolicies")
    built = build_algorithm(Stops)
    expected = [
        "Stops._on_step is never called: DefaultCallbacks has no such method.",
        "Did you mean 'on_episode_end'",
    ]
    assert all(text in caplog.text for text in expected)
    caplog.clear()
    built.learn(64, callbacks=[Stops()], progress=False)
    assert all(text in caplog.text for text in expected)


def test_every_setting_that_an_answer_names_exists():
    config = {**DQNConfig().to_dict(), **PPOConfig().to_dict(), "lambda_": 1.0}
    for text in SETTINGS.values():
        for part in text.split("(")[1:]:
            name = part.partition("=")[0]
            if "=" in part and name.isidentifier():
                assert name in config or name == "num_envs_per_worker", text


def test_arguments_and_methods_of_a_script_for_stable_baselines_are_answered():
    built = build_algorithm()
    policy = built.get_policy()
    with pytest.raises(TypeError, match="'deterministic' is explore=False, the default"):
        policy.predict(np.zeros(4), deterministic=True)
    with pytest.raises(TypeError, match="'episode_start' is not needed: pass the state"):
        policy.predict(np.zeros(4), episode_start=True)
    with pytest.raises(AttributeError, match=r"Use `get_weights\(\)`"):
        built.get_parameters()
    with pytest.raises(AttributeError, match="store_buffer_in_checkpoints=True"):
        built.load_replay_buffer("buffer.pkl")
    with pytest.raises(TypeError, match=r"env_processes=16.* for SubprocVecEnv"):
        PPOConfig().rollouts(vec_env_cls=None)


def test_an_answer_comes_without_the_list_of_all_settings():
    with pytest.raises(TypeError, match=r"Here it is training\(lr=\.\.\.\)\.$"):
        PPOConfig().training(learning_rate=1e-3)
    with pytest.raises(TypeError, match=r"'gama'\. Did you mean 'gamma'.*\? It takes gamma, lr, "):
        PPOConfig().training(gama=0.9)


def test_an_unknown_policy_id_is_named(caplog):
    caplog.set_level("WARNING", "tfpolicies")
    built = build_algorithm()
    assert built.get_policy("default_polcy") is None
    expected = "get_policy('default_polcy') returns None; there are policies ['default_policy']."
    assert expected in caplog.text
    with pytest.raises(UnknownPolicyError, match="Did you mean 'default_policy'"):
        built.compute_single_action(np.zeros(4), policy_id="default_polcy")
    built.add_policy("other", PPOTF2Policy)
    built.remove_policy()
    assert built.get_policy() is None
    assert "get_policy('default_policy') returns None; there are policies ['other']." in caplog.text


def make_model(activation=None, **settings):
    x = keras.Input((3,))
    hidden = keras.layers.Dense(4)(x)
    logits = keras.layers.Dense(2, activation=activation)(hidden)
    return keras.Model(x, {"logits": logits, "value": keras.layers.Dense(1)(hidden)}, **settings)


def test_outputs_may_be_called_logits_and_value():
    obs = np.random.default_rng(0).random((5, 3), np.float32)
    model = make_model()
    policy = make(model={"custom_model": model})
    extras = policy.compute_actions(obs, explore=False).extras
    expected = model(obs)
    np.testing.assert_allclose(extras["action_dist_inputs"], expected["logits"], atol=1e-6)
    np.testing.assert_allclose(extras["vf_preds"], expected["value"][:, 0], atol=1e-6)
    batch = policy.postprocess_trajectory(trajectory(policy, 6))
    assert policy.learn_on_batch(batch)["learner_stats"]["vf_loss"] > 0


def test_a_softmax_in_place_of_logits_is_warned_about_once(caplog):
    caplog.set_level("WARNING", "tfpolicies")
    for _ in range(2):
        make(model={"custom_model": make_model("softmax", name="with_softmax")}, seed=1)
    (record,) = caplog.records
    assert "'with_softmax' returns probabilities" in record.getMessage()
    caplog.clear()
    make(model={"custom_model": make_model()})
    assert not caplog.records


HALVED = {"type": "InverseTimeDecay", "initial_learning_rate": 0.5, "decay_steps": 1}
HALVED |= {"decay_rate": 1.0, "staircase": False}


def rate_after(policy, updates):
    batch = policy.postprocess_trajectory(trajectory(policy, 6))
    results = [policy.learn_on_batch(batch)["learner_stats"]["cur_lr"] for _ in range(updates)]
    return [pytest.approx(x) for x in results]


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_a_keras_schedule_is_a_function_of_gradient_updates(policy_class, tmp_path):
    policy = make(policy_class, lr=SCHEDULES.InverseTimeDecay(0.5, decay_steps=1, decay_rate=1.0))
    assert policy.config["lr"] == HALVED
    assert rate_after(policy, 3) == [0.5, 0.25, 0.5 / 3]
    policy.on_global_var_update({"timestep": 10_000})
    assert policy.cur_lr == pytest.approx(0.5 / 4)
    policy.export_checkpoint(tmp_path)
    assert rate_after(TFPolicy.from_checkpoint(tmp_path), 1) == [0.5 / 4]


def test_a_custom_schedule_is_a_function_of_updates_and_is_given_again_on_loading(tmp_path):
    class Tenth(SCHEDULES.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 * (step + 1)

    policy = make(lr=Tenth())
    assert rate_after(policy, 2) == [0.1, 0.2]
    with pytest.warns(UserWarning, match="Tenth"):
        policy.export_checkpoint(tmp_path)
    twin = TFPolicy.from_checkpoint(tmp_path, config={"lr": Tenth()})
    assert rate_after(twin, 1) == [pytest.approx(0.3)]


def test_a_schedule_may_be_made_of_numbers_of_numpy():
    schedule = SCHEDULES.PiecewiseConstantDecay(np.array([1, 2]), np.array([0.5, 0.25, 0.125]))
    assert rate_after(make(lr=schedule), 3) == [0.5, 0.5, 0.25]
    schedule = SCHEDULES.InverseTimeDecay(np.float32(0.5), np.int64(1), np.float32(1.0))
    assert make(lr=schedule).config["lr"] == HALVED


def test_a_function_as_lr_is_one_of_environment_steps():
    built = build_algorithm(lr=lambda steps: 1e-3 * (1.0 - steps / 64))
    learned = [built.train()["info"]["learner"]["default_policy"] for _ in range(2)]
    rates = [result["learner_stats"]["cur_lr"] for result in learned]
    assert rates == pytest.approx([1e-3, 5e-4])


@pytest.mark.parametrize(
    ("lr", "words"),
    [
        ({"type": "CosineDeca"}, "Did you mean 'CosineDecay'"),
        ({"type": "CosineDecay", "decay_steps": {"a": 1}}, "must hold numbers"),
        ({"type": "CosineDecay", "no_such": 1}, "no_such"),
        (lambda steps: -1.0, "returned -1.0 for 0"),
        (lambda steps: float("inf"), "returned inf for 0"),
        (lambda steps: None, "returned None for 0"),
        ("fast", "a function of environment steps"),
        ([[0, 0.1], [9, 0.0]], r"goes into lr_schedule\), got \[\[0, 0.1\]"),
    ],
)
def test_a_wrong_learning_rate_is_refused(lr, words):
    with pytest.raises(ConfigError, match=words):
        make(lr=lr)
    with pytest.raises(ConfigError, match="lr_schedule must be left out"):
        PPOConfig().training(lr=lambda steps: 0.1, lr_schedule=[[0, 0.1]])
