"""`Algorithm.learn`: in Python as on the command line."""

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import pytest

from helpers.factories import assert_equal
from helpers.keras_models import unregistered_layer
from helpers.multi_agent_envs import World, flags
from helpers.workers import make_small_config
from tfpolicies import PG, Algorithm, DefaultCallbacks, PGConfig, PGTF2Policy, Policy
from tfpolicies.algorithms import run_logger
from tfpolicies.algorithms.run_logger import RunLogger, TrainingOptions
from tfpolicies.cli import main
from tfpolicies.errors import FolderInUseError, NonFiniteError, UsageError
from tfpolicies.reporting.progress_csv import read_progress
from tfpolicies.reporting.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("kept_programs")

BATCH = 32  # steps of an iteration


def build(config_class=PGConfig, **settings):
    config = make_small_config("CartPole-v1", config_class, seed=5, num_envs_per_worker=2)
    config.rollouts(rollout_fragment_length=8, batch_mode="truncate_episodes")
    return config.update_from_dict(settings).build()


def learn(algorithm, iterations, run_dir=None, **options):
    """Learns until so many iterations are done, without a progress bar."""
    return algorithm.learn(iterations * BATCH, **{"run_dir": run_dir, "progress": False, **options})


def read_iterations(run_dir):
    return [row["iteration"] for row in read_progress(run_dir / "progress.csv")]


def read_latest(run_dir):
    """Returns the manifest of the latest checkpoint."""
    return json.loads((run_dir / "checkpoints" / "latest" / "algorithm.json").read_text())


def load_weights(run_dir, name):
    (policy,) = Policy.from_checkpoint(run_dir / "checkpoints" / name).values()
    return policy.get_weights()


# -- files ------------------------------------------------------------------------------------


def test_learning_in_python_writes_the_files_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [f"train_batch_size={BATCH}", "rollout_fragment_length=8", "inference=tf"]
    settings += ["model.fcnet_hiddens=[4]", "jit_compile=False", "log_level=ERROR"]
    settings += ["batch_mode=truncate_episodes"]
    words = ["train", "CartPole-v1", "--algo", "PG", "--num-envs", "2", "--seed", "5"]
    words += ["--steps", str(6 * BATCH), "--keep-best"]
    assert main([*words, *(word for x in settings for word in ("--set", x))]) == 0
    (by_command,) = (tmp_path / "runs").iterdir()
    learned = learn(build(), 6, run_dir="mine", keep_best=True)

    assert (learned.ended_by, learned.run_dir) == ("steps", tmp_path / "mine")
    assert learned.result["training_iteration"] == 6
    runs = (Path("mine"), by_command)
    names, expected_names = ({path.name for path in run.iterdir()} for run in runs)
    assert names == expected_names
    rows, expected_rows = (
        [
            {name: x for name, x in row.items() if not name.startswith(("time", "steps_per_s"))}
            for row in read_progress(run / "progress.csv")
        ]
        for run in runs
    )
    np.testing.assert_equal(rows, expected_rows)
    for name in ("latest", "best"):
        assert_equal(*(load_weights(run, name) for run in runs))
    assert (tmp_path / "mine" / "learning_curve.png").stat().st_size > 10_000
    assert main(["evaluate", "mine", "--episodes", "2"]) == 0
    assert main(["train", "--resume", "mine"]) == 2


def test_without_a_folder_nothing_is_written_and_steps_count_as_on_the_command_line(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    algorithm = build()
    assert learn(algorithm, 2).run_dir is None
    assert learn(algorithm, 3.0).result["training_iteration"] == 3
    assert learn(algorithm, 1).result == {}
    assert "leaves nothing to do" not in caplog.text  # log_level is ERROR
    assert algorithm.iteration == 3
    assert list(tmp_path.iterdir()) == []


def test_progress_is_shown_unless_it_is_switched_off(capsys):
    algorithm = build()
    learn(algorithm, 1)
    assert capsys.readouterr().out == ""
    algorithm.learn(2 * BATCH)
    assert capsys.readouterr().out.startswith("64/64 steps | ")


def test_the_newest_checkpoints_are_kept(tmp_path):
    weights = []

    def record_weights(algorithm, result):
        weights.append(algorithm.get_policy().get_weights())

    kept = {"checkpoint_every": 1, "keep_checkpoints": 3, "keep_best": True}
    learn(build(), 5, tmp_path, callbacks=[record_weights], **kept)
    names = [f"iteration-{i:06}" for i in (3, 4, 5)]
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["best", *names, "latest"]
    for name, expected in zip([*names, "latest"], [*weights[2:], weights[-1]], strict=True):
        assert_equal(load_weights(tmp_path, name), expected)


class OwnPolicy(PGTF2Policy):
    """A class that a file may not import."""


class OwnPG(PG):
    policy_classes = {"tf2": OwnPolicy}


def test_a_run_with_a_custom_policy_and_model_measures_its_best_again(tmp_path):
    settings = {"model": {"custom_model": unregistered_layer}, "num_envs_per_worker": 1}
    settings |= {"evaluation_interval": 1, "evaluation_duration": 1}
    for iterations in (2, 3):
        algorithm = build(lambda: PGConfig(OwnPG), rollout_fragment_length=BATCH, **settings)
        learn(algorithm, iterations, tmp_path, keep_best=True)
    assert read_iterations(tmp_path) == [1, 2, 3]


class Duel(World):
    """One step, in which the agent with the greater action takes 1 from the other one."""

    _agent_ids = ("a", "b")

    def play(self, actions):
        gain = float(np.sign(actions["a"] - actions["b"]))
        return self.obs("a", "b"), {"a": gain, "b": -gain}, flags(True), flags(), {}


DUEL = {"env": Duel, "policies": ["a", "b"], "policy_mapping_fn": lambda agent, *_, **__: agent}


@pytest.mark.parametrize(
    ("settings", "criteria"),
    [
        ({}, ("keep_best", "until=0.5")),
        ({"evaluation_interval": 2, "evaluation_duration": 4}, ("keep_best", "until=0.5")),
        ({}, ()),
        ({"evaluation_interval": 1, "custom_evaluation_function": "won"}, ("until=0.5",)),
    ],
)
def test_criteria_that_a_constant_sum_never_meets_are_named_once(
    settings, criteria, tmp_path, caplog
):
    if "custom_evaluation_function" in settings:
        settings = {**settings, "custom_evaluation_function": lambda *_: WON}
    algorithm = build(**DUEL, **settings, log_level="WARN")
    caplog.clear()
    options = {"keep_best": True, "until": 0.5} if criteria else {"until": -1.0}
    learned = learn(algorithm, 4, tmp_path, **options)
    assert learned.ended_by == ("steps" if criteria else "target")
    text = "\n".join(x.getMessage() for x in caplog.records if "total return" in x.getMessage())
    for name in ("keep_best", "until=0.5"):
        assert (text.count(name) > 0) == (name in criteria), text
    assert len(text.splitlines()) == (
        0 if not criteria else 1 + ("evaluation_duration" in settings)
    )
    assert not criteria or "total return, 0, whatever the policies learn (mean returns: 'a'" in text


WON = {"episode_reward_mean": 0.7}


def read_best_score(run_dir, algorithm):
    """Returns the score that a resumed run compares with."""
    options = TrainingOptions(steps=1, keep_best=True)
    run_logger = RunLogger(RunFolder.open(run_dir), algorithm, options)
    run_logger.close()
    return run_logger.best_score


def test_a_resumed_run_measures_its_best_checkpoint_as_it_evaluates_now(tmp_path):
    evaluation = {"evaluation_interval": 1, "evaluation_duration": 2}
    learn(build(**evaluation), 2, tmp_path, keep_best=True)
    curve = tmp_path / "progress.csv"
    header, *rows = (line.split(",") for line in curve.read_text().splitlines())
    for row in rows:  # as if episodes had been sampled, or been others
        row[header.index("evaluation/episode_reward_mean")] = "1e6"
    curve.write_text("".join(",".join(cells) + "\n" for cells in (header, *rows)))

    again = build(**evaluation)
    assert 8.0 < read_best_score(tmp_path, again) < 500.0
    fresh = build(**evaluation)  # nothing else has changed
    assert_equal(again.get_policy().get_weights(), fresh.get_policy().get_weights())


@pytest.mark.core
def test_a_run_with_evaluations_ends_with_one(tmp_path):
    evaluations = []

    class Counting(DefaultCallbacks):
        def on_evaluate_end(self, *, algorithm, evaluation_metrics, **kwargs):
            evaluations.append(algorithm.iteration)

    settings = {"evaluation_duration": 1, "callbacks": Counting}
    learn(build(evaluation_interval=2, **settings), 5, tmp_path / "a")
    assert evaluations == [2, 4, 5]
    rows = read_progress(tmp_path / "a" / "progress.csv")
    is_finite = [np.isfinite(row["evaluation/episode_reward_mean"]) for row in rows]
    assert is_finite == [False, True, False, True, True]
    evaluations.clear()
    learn(build(evaluation_interval=2, **settings), 4)
    learn(build(**settings), 3)  # no interval, no evaluation
    algorithm = build(evaluation_interval=2, **settings)
    algorithm.train()  # your own loop decides when it ends
    assert evaluations == [2, 4]


def test_the_best_iteration_is_that_with_the_best_recent_returns(tmp_path):
    recent = [(900.0, 4), (150.0, 5), (200.0, 5), (100.0, 5)]  # mean return of so many episodes
    weights = []

    class Scripted(DefaultCallbacks):
        def on_train_result(self, *, algorithm, result):
            mean, episodes = recent[algorithm.iteration - 1]
            result["recent_returns"] = {"mean": mean, "episodes": episodes}
            result["episode_reward_mean"] = 10.0 * algorithm.iteration  # lags, and still grows
            weights.append(algorithm.get_policy().get_weights())

    algorithm = build()
    learn(algorithm, 4, tmp_path, keep_best=True, callbacks=[Scripted])
    assert_equal(load_weights(tmp_path, "best"), weights[1])  # sampled the third one
    assert read_best_score(tmp_path, algorithm) == 200.0


def test_the_best_of_a_run_without_recent_returns_is_that_of_the_last_episodes(tmp_path):
    class Earlier(DefaultCallbacks):
        """Gives results as earlier versions did."""

        def on_train_result(self, *, algorithm, result):
            del result["recent_returns"]
            result["episode_reward_mean"] = 10.0 * algorithm.iteration

    algorithm = build()
    learn(algorithm, 2, tmp_path, keep_best=True, callbacks=[Earlier])
    assert read_best_score(tmp_path, algorithm) == 20.0


def test_a_checkpoint_that_training_resumes_from_stays(tmp_path):
    kept = {"checkpoint_every": 1, "keep_checkpoints": 2}
    learn(build(), 1, tmp_path, **kept)
    first = tmp_path / "checkpoints" / "iteration-000001"
    again = Algorithm.from_checkpoint(first)
    again.run_dir = tmp_path
    learn(again, 5, tmp_path, **kept)
    names = sorted(path.name for path in first.parent.glob("iteration-*"))
    assert names == [f"iteration-{i:06}" for i in (1, 4, 5)]


# -- resuming ---------------------------------------------------------------------------------


def test_a_script_that_is_run_again_resumes_its_run(tmp_path, capsys):
    run_dir = tmp_path / "new" / "run"
    learn(build(reset_episodes_at_checkpoint=True), 2, run_dir)
    again = build(reset_episodes_at_checkpoint=True)
    learned = learn(again, 4, run_dir, progress=True)
    where = f"Training resumes in {run_dir} after iteration 2 (64 steps).\n"
    assert where in capsys.readouterr().out
    assert learned.result["training_iteration"] == 4
    assert read_iterations(run_dir) == [1, 2, 3, 4]
    assert_equal(again.get_policy().get_weights(), load_weights(run_dir, "latest"))
    assert learn(again, 5, run_dir).ended_by == "steps"
    assert read_iterations(run_dir) == [1, 2, 3, 4, 5]


def test_iterations_after_the_checkpoint_are_named_when_a_run_resumes(tmp_path, capsys):
    learn(build(), 3, tmp_path, checkpoint_every=1, keep_checkpoints=3)
    checkpoints = tmp_path / "checkpoints"
    shutil.rmtree(checkpoints / "latest")
    (checkpoints / "iteration-000001").rename(checkpoints / "latest")
    learn(build(), 4, tmp_path, progress=True)
    repeated = "2 iterations recorded after this checkpoint will be repeated.\n"
    assert f"after iteration 1 (32 steps); {repeated}" in capsys.readouterr().out
    assert read_iterations(tmp_path) == [1, 2, 3, 4]


def test_a_run_without_a_checkpoint_starts_again_and_says_so(tmp_path, capsys):
    learn(build(), 2, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "latest")
    capsys.readouterr()
    learn(build(), 1, tmp_path, progress=True)
    text = f"The run in {tmp_path} has no checkpoint yet: training starts again.\n"
    assert text in capsys.readouterr().out
    assert read_iterations(tmp_path) == [1]


def test_an_algorithm_that_trained_continues_its_own_run_and_no_other(tmp_path):
    first, other, new = tmp_path / "first", tmp_path / "other", tmp_path / "new"
    algorithm = build()
    learn(algorithm, 1, first)
    algorithm.train()
    learn(algorithm, 3, first)
    assert read_iterations(first) == [1, 3]
    learn(build(), 1, other)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"holds another run, at iteration 1.*from_checkpoint\("):
        learn(algorithm, 4, other)
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert algorithm.iteration == 3
    learn(PG.from_checkpoint(other / "checkpoints" / "latest"), 2, other)
    assert read_iterations(other) == [1, 2]
    learn(algorithm, 4, new)
    assert read_iterations(new) == [4]


def test_a_folder_that_is_not_for_this_algorithm_is_refused_and_left_alone(tmp_path):
    run_dir = tmp_path / "run"
    learn(build(), 1, run_dir)
    with pytest.raises(UsageError, match=r"other settings: lr \(there 0.0004, here 0.5\)"):
        learn(build(lr=0.5), 1, run_dir)
    others = {"lr": 0.5, "gamma": 0.5, "seed": 6, "grad_clip": 9.0}
    with pytest.raises(UsageError, match=r"gamma .*, grad_clip .*, lr .* and 1 more. Give another"):
        learn(build(**others), 1, run_dir)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"is not a run folder, but holds \['notes.txt', 'run'\]"):
        learn(build(), 1, tmp_path)
    with RunFolder.open(run_dir).acquire(), pytest.raises(FolderInUseError):
        learn(build(), 1, run_dir)
    assert read_iterations(run_dir) == [1]


STOPPING, BOARD = keras.callbacks.EarlyStopping(), keras.callbacks.TensorBoard()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"total_timesteps": 0}, "total_timesteps must be a whole number, 1 or more, got 0"),
        ({"total_timesteps": "1e5"}, "total_timesteps must be a whole number"),
        ({"total_timesteps": float("nan")}, "total_timesteps must be a whole number"),
        ({"total_timesteps": float("inf")}, "total_timesteps must be a whole number"),
        ({"checkpoint_every": 0}, "checkpoint_every must be"),
        ({"until": "high"}, "until must be a number or None"),
        ({"callbacks": ["print"]}, "callbacks must be functions"),
        ({"callbacks": STOPPING}, r"monitors 'val_loss', which this run does not have; eval"),
        ({"callbacks": [BOARD]}, r"has no meaning here. Use learn\(..., run_dir=...\)"),
    ],
)
def test_wrong_arguments_change_nothing(tmp_path, values, words):
    algorithm = build()
    options = {"total_timesteps": 9, "run_dir": tmp_path / "run", "progress": False}
    with pytest.raises(UsageError, match=words):
        algorithm.learn(**{**options, **values})
    assert algorithm.iteration == 0
    assert list(tmp_path.iterdir()) == []


# -- callbacks --------------------------------------------------------------------------------


class Counting(DefaultCallbacks):
    def __init__(self):
        self.seen = []

    def on_train_result(self, *, algorithm, result):
        self.seen.append(result["training_iteration"])
        result["custom_metrics"]["seen"] = len(self.seen)


def test_callbacks_are_called_with_each_result_and_a_function_can_end_training():
    counting, counts = Counting(), []

    def end_after_three(algorithm, result):
        counts.append(result["custom_metrics"]["seen"])
        return algorithm.iteration < 3

    algorithm = build()
    before = algorithm.callbacks
    callbacks = [Counting, counting, end_after_three, lambda algorithm, result: None]
    learned = learn(algorithm, 100, callbacks=callbacks)
    assert (learned.ended_by, counting.seen, counts) == ("callback", [1, 2, 3], [1, 2, 3])
    assert algorithm.callbacks is before
    algorithm.train()
    assert counting.seen == [1, 2, 3]


def test_one_function_needs_no_list_and_may_lower_the_learning_rate():
    def halve(algorithm, result):
        policy = algorithm.get_policy()
        policy.set_hyperparameter("lr", policy.cur_lr / 2)

    algorithm = build(lr=0.25)
    learned = learn(algorithm, 2, callbacks=halve)
    assert learned.result["info"]["learner"]["default_policy"]["learner_stats"]["cur_lr"] == 0.125
    assert algorithm.get_policy().cur_lr == 0.0625


def test_the_target_is_compared_with_recent_episodes_once_there_are_five():
    seen = []

    class Lagging(DefaultCallbacks):
        def on_train_result(self, *, algorithm, result):
            result["episode_reward_mean"] = -424.0  # of the last 100 episodes
            result["recent_returns"] = {"mean": -150.0, "episodes": 3 + algorithm.iteration}
            seen.append(algorithm.iteration)

    learned = learn(build(), 9, until=-150.0, callbacks=[Lagging])
    assert (learned.ended_by, seen) == ("target", [1, 2])


def test_the_result_of_learning_is_shown_in_one_line(tmp_path):
    learned = learn(build(), 2, tmp_path)
    mean = f"{learned.result['recent_returns']['mean']:.4g}"
    assert repr(learned) == (
        f"LearnResult(64 steps, mean return {mean}, ended by steps, run_dir={str(tmp_path)!r})"
    )
    recent = {"recent_returns": {"mean": float("nan")}}
    endless = learned._replace(result={**learned.result, **recent})
    assert "no episode has ended" in repr(endless)


def test_callbacks_that_workers_would_call_are_refused():
    class OfEpisodes(DefaultCallbacks):
        def on_episode_end(self, **about):
            raise AssertionError("this is never called")

    for values in (OfEpisodes, OfEpisodes()):
        with pytest.raises(UsageError, match=r"on_episode_end.*config\.callbacks\(OfEpisodes\)"):
            learn(build(), 1, callbacks=[values])


@pytest.mark.parametrize("change", [{}, {"recent_returns": None}])
def test_a_run_whose_callback_removes_the_mean_return_continues(change):
    class Replacing(DefaultCallbacks):
        def on_train_result(self, *, algorithm, result):
            del result["recent_returns"]
            result.update(change)

    learned = learn(build(), 2, until=-1.0, progress=True, callbacks=[Replacing])
    assert (learned.ended_by, learned.result["training_iteration"]) == ("steps", 2)


# -- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots_take_long", [False, True])
def test_an_error_in_a_callback_saves_the_last_whole_iteration(
    tmp_path, monkeypatch, snapshots_take_long
):
    if snapshots_take_long:
        monkeypatch.setattr(run_logger, "_FAST_SNAPSHOT_SECONDS", 0)
        monkeypatch.setattr(run_logger, "_MAX_SNAPSHOT_TIME_SHARE", 1e-9)

    def break_in_the_second(algorithm, result):
        if algorithm.iteration == 2:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        learn(build(), 9, tmp_path, callbacks=[break_in_the_second])
    assert read_latest(tmp_path)["progress"]["iteration"] == 2
    learn(build(), 3, tmp_path)
    assert read_iterations(tmp_path) == [1, 2, 3]


def test_ctrl_c_ends_after_the_iteration_saves_and_leaves_the_handlers(tmp_path, capsys):
    def press(algorithm, result):
        signal.raise_signal(signal.SIGINT)

    def get_handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    algorithm, before = build(), get_handlers()
    with pytest.raises(KeyboardInterrupt):
        learn(algorithm, 9, tmp_path, callbacks=[press])
    assert "training ends after this iteration" in capsys.readouterr().err
    assert get_handlers() == before
    assert read_iterations(tmp_path) == [1]
    assert RunFolder.open(tmp_path).has_checkpoint
    assert learn(algorithm, 2, tmp_path).ended_by == "steps"
    assert read_iterations(tmp_path) == [1, 2]


def test_a_second_ctrl_c_ends_training_within_the_iteration(tmp_path):
    class Pressing(DefaultCallbacks):
        def on_train_result(self, *, algorithm, result):
            if algorithm.iteration == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                raise AssertionError("not interrupted")

    with pytest.raises(KeyboardInterrupt):
        learn(build(), 9, tmp_path, callbacks=[Pressing])
    assert read_iterations(tmp_path) == [1]
    assert read_latest(tmp_path)["progress"]["iteration"] == 1


def test_it_learns_in_a_thread_too(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(learn, build(), 2, tmp_path).result().ended_by == "steps"


def test_numbers_that_are_not_finite_end_it_and_overwrite_no_checkpoint(tmp_path):
    def spoil(algorithm, result):
        if algorithm.iteration == 2:
            algorithm.get_policy().set_hyperparameter("lr", 1e38)

    with pytest.raises(NonFiniteError):
        learn(build(), 99, tmp_path, callbacks=[spoil], checkpoint_every=1)
    assert read_latest(tmp_path)["finite"] is True
