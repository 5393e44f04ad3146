"""Keras callbacks in `learn`: an iteration is an epoch, and a policy is the model."""

import math

import keras
import numpy as np
import pytest

from helpers import two_policies
from helpers.workers import make_callbacks, make_small_config
from tfpolicies import KerasCallbacks, PGConfig, PPOConfig, SACConfig
from tfpolicies.algorithms.monitored_metrics import find_direction
from tfpolicies.errors import UsageError
from tfpolicies.reporting.progress_csv import read_progress

pytestmark = [
    pytest.mark.usefixtures("kept_programs"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras saves
]

BATCH = 32  # steps of an iteration
RETURN = "episode_reward_mean"


def build(config_class=PGConfig, env="CartPole-v1", returns=(), losses=(), **settings):
    """Builds an algorithm, some of whose results are these returns and losses."""

    def replace(algorithm, result):
        number = algorithm.iteration - 1
        if number < len(returns):
            result[RETURN] = returns[number]
        if number < len(losses):
            stats = result["info"]["learner"]["default_policy"]["learner_stats"]
            stats["policy_loss"] = losses[number]

    config = make_small_config(env, config_class, seed=5)
    config.rollouts(rollout_fragment_length=8, batch_mode="truncate_episodes")
    config.callbacks(make_callbacks(on_train_result=replace))
    return config.update_from_dict(settings).build()


def learn(algorithm, iterations, *callbacks, **options):
    return algorithm.learn(iterations * BATCH, progress=False, callbacks=[*callbacks], **options)


class Recorder(keras.callbacks.Callback):
    """Records what it is called with, and the weights after each epoch."""

    def __init__(self):
        super().__init__()
        self.calls, self.logs, self.weights = [], [], []

    def on_train_begin(self, logs=None):
        self.calls.append("begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(logs)
        self.weights.append(self.model.get_weights())

    def on_train_end(self, logs=None):
        self.calls.append("end")


def assert_same(weights, expected):
    for array, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(array, other)


# -- epochs -----------------------------------------------------------------------------------


@pytest.mark.core
def test_an_iteration_is_an_epoch_whose_logs_are_a_row_and_the_loss(tmp_path):
    first, second, history = Recorder(), Recorder(), keras.callbacks.History()
    log = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    learn(build(), 2, first, log, history, run_dir=tmp_path / "run")
    assert first.calls == ["begin", 0, 1, "end"]
    rows = read_progress(tmp_path / "run" / "progress.csv")
    for logs, row in zip(first.logs, rows, strict=True):
        assert logs.pop("loss") == row["learner/default_policy/policy_loss"]
        np.testing.assert_equal(logs, row)
    assert history.history["iteration"] == [1, 2]
    assert (tmp_path / "log.csv").read_text().splitlines()[2].startswith("1,")
    learn(build(), 3, second, run_dir=tmp_path / "run")
    assert second.calls == ["begin", 2, "end"]


def test_train_end_is_left_out_if_training_can_be_resumed_and_a_run_always_ends(tmp_path):
    recorder, ends = Recorder(), []

    def press(algorithm, result):
        raise KeyboardInterrupt

    runs = make_callbacks(
        on_run_start=lambda algorithm, run_dir: ends.append(run_dir),
        on_run_end=lambda algorithm, run_dir, ended_by: ends.append(ended_by),
    )
    with pytest.raises(KeyboardInterrupt):
        learn(build(), 2, recorder, runs, press, run_dir=tmp_path)
    assert (recorder.calls, ends) == (["begin", 0], [tmp_path, "signal"])
    learn(build(), 2, recorder, runs, run_dir=tmp_path)
    assert ends[2:] == [tmp_path, "steps"]
    assert recorder.calls[2:] == ["begin", 1, "end"]


def test_a_class_of_callbacks_ends_training_by_returning_false():
    class Two(KerasCallbacks):
        def __init__(self):
            super().__init__([])

        def on_iteration_end(self, *, algorithm, row):
            return row["iteration"] < 2

    algorithm = build()
    assert learn(algorithm, 5, Two).ended_by == "callback"
    assert algorithm.iteration == 2


# -- monitored metrics ------------------------------------------------------------------------


@pytest.mark.core
def test_early_stopping_takes_returns_up_and_restores_the_best_weights(tmp_path):
    recorder = Recorder()
    stopping = keras.callbacks.EarlyStopping(RETURN, patience=2, restore_best_weights=True)
    algorithm = build(returns=[1.0, 5.0, 3.0, 2.0, 9.0])
    learned = learn(algorithm, 5, recorder, stopping, run_dir=tmp_path)
    assert (learned.ended_by, algorithm.iteration) == ("callback", 4)
    assert_same(algorithm.get_policy().get_weights(as_dict=False), recorder.weights[1])
    resumed = build()  # the final checkpoint has the restored weights
    learn(resumed, 4, run_dir=tmp_path)
    assert_same(resumed.get_policy().get_weights(as_dict=False), recorder.weights[1])


@pytest.mark.core
def test_losses_are_taken_down():
    algorithm = build(losses=[-1.0, -2.0, -1.5, -1.4, -9.0])
    learn(algorithm, 5, keras.callbacks.EarlyStopping("loss", patience=2))
    assert algorithm.iteration == 4


@pytest.mark.core
def test_the_best_model_is_saved_for_plain_keras(tmp_path):
    path = str(tmp_path / "{epoch:02d}-{episode_reward_mean:.1f}.keras")
    weights_path = str(tmp_path / "best.weights.h5")
    algorithm = build(PPOConfig, returns=[math.nan, 2.0, 1.0, 3.0, 2.0])
    recorder = Recorder()
    learn(
        algorithm,
        5,
        keras.callbacks.ModelCheckpoint(path, monitor=RETURN, save_best_only=True),
        keras.callbacks.ModelCheckpoint(
            weights_path, monitor=RETURN, save_best_only=True, save_weights_only=True
        ),
        recorder,
    )
    names = [file.name for file in sorted(tmp_path.glob("*.keras"))]
    assert names == ["02-2.0.keras", "04-3.0.keras"]
    loaded = keras.models.load_model(tmp_path / names[1])
    policy, obs = algorithm.get_policy(), np.eye(4, dtype=np.float32)
    policy.set_weights(recorder.weights[3])
    for output, expected in zip(loaded(obs), policy.to_keras()(obs), strict=True):
        np.testing.assert_array_equal(output, expected)
    plain = policy.to_keras()
    plain.load_weights(weights_path)
    assert_same(plain.get_weights(), loaded.get_weights())


def test_epochs_without_the_metric_do_not_count():
    stopping = keras.callbacks.EarlyStopping("evaluation/episode_reward_mean", patience=2)
    algorithm = build(evaluation_interval=2, evaluation_duration=1)
    values = iter([5.0, 4.0, 3.0, 9.0])

    def replace(algorithm, evaluation_metrics):
        evaluation_metrics["evaluation"][RETURN] = next(values)

    learn(algorithm, 8, stopping, make_callbacks(on_evaluate_end=replace))
    assert algorithm.iteration == 6
    later = keras.callbacks.EarlyStopping(RETURN, patience=1)
    algorithm = build(returns=[math.nan, math.nan, math.nan, 1.0, 2.0, 1.5, 9.0])
    learn(algorithm, 7, later)
    assert algorithm.iteration == 6


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        (RETURN, "max"),
        ("recent_returns/mean", "max"),
        ("evaluation/episode_reward_min", "max"),
        ("learner/left/vf_explained_var", "max"),
        ("learner/left/vf_loss", "min"),
        ("learner/left/loss", "min"),
        ("loss", "min"),
        ("episode_len_mean", None),
        ("learner/left/kl", None),
        ("custom/reward", None),
    ],
)
def test_the_direction_of_a_metric_is_known_or_must_be_passed(name, direction):
    assert find_direction(name) == direction


@pytest.mark.core
@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        ("val_loss", r"evaluations give 'evaluation/episode_reward_mean': config.evaluation\("),
        ("evaluation/episode_reward_mean", "which this run does not have"),
        ("accuracy", "Did you mean 'episode_reward_mean'"),
        ("episode_reward_men", "Did you mean 'episode_reward_mean'"),
        ("learner/other/kl", "which a training iteration does not have"),
        ("learner/default_policy/polcy_loss", "Did you mean 'learner/default_policy/policy_loss'"),
        ("episode_len_mean", "whether it should rise or fall depends on the task. Pass mode='max'"),
    ],
)
def test_a_metric_without_values_or_direction_is_refused(monitor, message):
    with pytest.raises(UsageError, match=message):
        learn(build(), 2, keras.callbacks.EarlyStopping(monitor))


def test_a_mode_that_the_user_passes_stays():
    algorithm = build(returns=[3.0, 2.0, 1.0, 1.5, 1.6, 0.0])
    learn(algorithm, 6, keras.callbacks.EarlyStopping(RETURN, patience=2, mode="min"))
    assert algorithm.iteration == 5


# -- the learning rate ------------------------------------------------------------------------


@pytest.mark.core
def test_the_learning_rate_is_reduced_on_a_plateau():
    rates = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(note.model.optimizer.learning_rate)
    )
    plateau = keras.callbacks.ReduceLROnPlateau(RETURN, factor=0.5, patience=1)
    algorithm = build(returns=[1.0, 2.0, 2.0, 2.0], lr=0.25)
    learn(algorithm, 4, plateau, note)
    assert rates == [0.25, 0.25, 0.125, 0.0625]
    assert algorithm.get_policy().get_hyperparameter("lr") == 0.0625


def test_the_learning_rate_is_assigned_like_a_variable():
    class Assigning(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            rate = self.model.optimizer.learning_rate
            assert rate == rate.numpy()
            rate.assign(keras.ops.multiply(rate, 2.0))

    algorithm = build(lr=0.125)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr / 2)
    learn(algorithm, 2, Assigning(), scheduler, Assigning())
    assert algorithm.get_policy().get_hyperparameter("lr") == 0.5


def test_one_rate_of_several_networks_is_the_rate_and_several_are_chosen(sac_config):
    def double():
        return keras.callbacks.LearningRateScheduler(lambda epoch, lr: 2 * lr)

    algorithm = sac_config(lr=0.25).build()
    learn(algorithm, 1, double())
    policy = algorithm.get_policy()
    names = ("actor_lr", "critic_lr", "entropy_lr")
    assert [policy.get_hyperparameter(name) for name in names] == [0.5, 0.5, 0.5]

    algorithm = sac_config(lr=0.25, critic_lr=0.5).build()
    message = r"several: lr=0.25, critic_lr=0.5. Choose: callbacks=\[KerasCallbacks\("
    with pytest.raises(UsageError, match=message):
        learn(algorithm, 1, double())
    with pytest.raises(UsageError, match=r"must name learning rates of SACTF2Policy, lr, critic"):
        learn(algorithm, 1, KerasCallbacks(double(), learning_rate="alpha_lr"))
    learn(algorithm, 1, KerasCallbacks(double(), learning_rate=["critic_lr", "lr"]))
    policy = algorithm.get_policy()
    assert [policy.get_hyperparameter(name) for name in names] == [0.5, 1.0, 0.5]


@pytest.fixture
def sac_config():
    def make(**settings):
        config = make_small_config("Pendulum-v1", SACConfig, seed=5)
        config.training(num_steps_sampled_before_learning_starts=1000, q_model_config={})
        return config.update_from_dict(settings)

    return make


@pytest.mark.parametrize(
    ("settings", "setting"),
    [({"lr_schedule": [[0, 0.1], [99, 0.0]]}, "lr_schedule"), ({"lr": lambda step: 0.1}, "lr")],
)
def test_a_rate_with_a_schedule_is_not_set(settings, setting):
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr)
    with pytest.raises(UsageError, match=f"but {setting} sets lr after each iteration"):
        learn(build(**settings), 1, scheduler)


# -- the model --------------------------------------------------------------------------------


def test_the_model_is_read_like_that_of_keras_and_weights_have_their_filter(tmp_path):
    class Reading(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            model, policy = self.model, algorithm.get_policy()
            assert model.count_params() == policy.to_keras().count_params()
            assert model.layers
            assert model.optimizer.iterations == policy.num_grad_updates
            np.testing.assert_array_equal(model(np.eye(4))[0], policy.model(np.eye(4))[0])
            if epoch == 0:
                self.first, self.filter = model.get_weights(), policy.get_state()["filter"]
                model.save_weights(tmp_path / "first.weights.h5")
            with pytest.raises(UsageError, match=r"called model.fit, but its model is a policy"):
                model.fit(np.eye(4))
            with pytest.raises(AttributeError, match="has learning_rate and iterations, not 'lr'"):
                _ = model.optimizer.lr

        def on_train_end(self, logs=None):
            self.model.set_weights(self.first)

    algorithm, reading = build(observation_filter="MeanStdFilter"), Reading()
    learn(algorithm, 3, reading)
    np.testing.assert_equal(algorithm.get_policy().get_state()["filter"], reading.filter)
    assert_same(algorithm.get_policy().get_weights(as_dict=False), reading.first)


def test_weights_are_loaded_from_a_file(tmp_path):
    path, recorder = tmp_path / "first.weights.h5", Recorder()
    save = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: epoch or save.model.save_weights(path),
        on_train_end=lambda logs: save.model.load_weights(path),
    )
    algorithm = build()
    learn(algorithm, 2, save, recorder)
    assert_same(algorithm.get_policy().get_weights(as_dict=False), recorder.weights[0])


def test_one_of_several_policies_is_the_model():
    recorder = Recorder()
    algorithm = two_policies.make_config().build()
    message = r"trains the policies \['left', 'right'\].*KerasCallbacks\(.*policy_id='left'\)"
    with pytest.raises(UsageError, match=message):
        algorithm.learn(14, progress=False, callbacks=[recorder])
    with pytest.raises(UsageError, match=r"one of \['left', 'right'\], got 'up'"):
        algorithm.learn(14, progress=False, callbacks=[KerasCallbacks(recorder, policy_id="up")])
    algorithm.learn(14, progress=False, callbacks=[KerasCallbacks(recorder, policy_id="right")])
    weights = algorithm.get_policy("right").get_weights(as_dict=False)
    assert_same(recorder.weights[-1], weights)
    assert recorder.logs[-1]["loss"] == recorder.logs[-1]["learner/right/total_loss"]
    algorithm = two_policies.make_config(policies_to_train=["right"]).build()
    algorithm.learn(14, progress=False, callbacks=[recorder])
    assert_same(recorder.weights[-1], algorithm.get_policy("right").get_weights(as_dict=False))


# -- callbacks without a meaning here ---------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (keras.callbacks.TensorBoard, r"Use learn\(..., run_dir=...\); events are in the run"),
        (lambda: keras.callbacks.BackupAndRestore("x"), "saves all that training needs and"),
        (keras.callbacks.ProgbarLogger, r"Use learn\(..., progress=True\)"),
        (keras.callbacks.TerminateOnNaN, "not needed: an update that is not finite ends"),
        (
            lambda: keras.callbacks.ModelCheckpoint("x.keras", save_freq=10),
            "has save_freq=10, a number of batches, but an iteration is an epoch",
        ),
    ],
)
def test_a_callback_without_a_meaning_here_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        learn(build(), 1, make())


def test_methods_for_batches_are_warned_about(caplog):
    class Counting(keras.callbacks.EarlyStopping):
        def on_train_batch_end(self, batch, logs=None):
            raise AssertionError

    caplog.set_level("WARNING", "tfpolicies")
    algorithm = build(log_level="WARN")
    printing = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None)
    checkpoint = keras.callbacks.ModelCheckpoint("x.keras", "loss", save_best_only=True)
    KerasCallbacks([checkpoint])
    learn(algorithm, 1, Counting("loss"), printing)
    lines = [x.getMessage() for x in caplog.records if "will not be called" in x.getMessage()]
    assert [line.partition(" will")[0] for line in lines] == [
        "Counting: on_train_batch_end",
        "LambdaCallback: on_train_batch_begin",
    ]


def test_other_objects_are_refused():
    with pytest.raises(UsageError, match="must be Keras callbacks, got 'x'"):
        KerasCallbacks(["x"])
    with pytest.raises(UsageError, match=r"functions f.*or Keras callbacks, got 3"):
        learn(build(), 1, 3)
