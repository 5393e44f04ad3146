"""`Algorithm.learn`: in Python as on the command line."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tfpolicies import PG, Algorithm, DefaultCallbacks, PGConfig, PGTF2Policy, Policy
from tfpolicies.algorithms.run_logger import RunLogger, TrainingOptions
from tfpolicies.cli import main
from tfpolicies.errors import FolderInUseError, NonFiniteError, UsageError
from tfpolicies.reporting.progress_csv import read_progress
from tfpolicies.reporting.run_folder import RunFolder

pytestmark = [pytest.mark.usefixtures("kept_programs")]

BATCH = 32  # steps of an iteration


def build(**settings: Any) -> Algorithm:
    config = PGConfig().environment("CartPole-v1").debugging(seed=5, log_level="ERROR")
    config.rollouts(
        num_envs_per_worker=2, rollout_fragment_length=8, batch_mode="truncate_episodes"
    )
    config.training(train_batch_size=BATCH, model={"fcnet_hiddens": [4]})
    config.framework("tf2").resources().update_from_dict({"inference": "tf", "jit_compile": False})
    return config.update_from_dict(settings).build()


def iterations(run_dir: Path) -> list[float]:
    return [row["iteration"] for row in read_progress(run_dir / "progress.csv")]


def weights_of(checkpoint: Path) -> dict[str, np.ndarray]:
    (policy,) = Policy.from_checkpoint(checkpoint).values()
    return policy.get_weights()


def assert_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(actual[key], array)


# -- what it leaves behind --------------------------------------------------------------------


def test_learning_in_python_leaves_what_the_command_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [f"train_batch_size={BATCH}", "rollout_fragment_length=8", "inference=tf"]
    settings += ["model.fcnet_hiddens=[4]", "jit_compile=False", "log_level=ERROR"]
    settings += ["batch_mode=truncate_episodes"]
    words = ["train", "CartPole-v1", "--algo", "PG", "--num-envs", "2", "--seed", "5"]
    words += ["--steps", str(6 * BATCH), "--keep-best"]
    assert main([*words, *(word for each in settings for word in ("--set", each))]) == 0
    (by_command,) = (tmp_path / "runs").iterdir()
    algorithm = build()
    learned = algorithm.learn(6 * BATCH, run_dir="mine", progress=False, keep_best=True)

    assert (learned.ended_by, learned.run_dir) == ("steps", tmp_path / "mine")
    assert learned.result["training_iteration"] == 6
    assert {path.name for path in Path("mine").iterdir()} == {x.name for x in by_command.iterdir()}
    mine, theirs = (read_progress(run / "progress.csv") for run in (Path("mine"), by_command))
    clocks = {"time_s", "steps_per_s"}
    for own, other in zip(mine, theirs, strict=True):
        np.testing.assert_equal(
            {name: x for name, x in own.items() if name not in clocks},
            {name: x for name, x in other.items() if name not in clocks},
        )
    for name in ("latest", "best"):
        actual, expected = (
            weights_of(x / "checkpoints" / name) for x in (Path("mine"), by_command)
        )
        assert_equal(actual, expected)
    assert (tmp_path / "mine" / "learning_curve.png").stat().st_size > 10_000
    assert main(["evaluate", "mine", "--episodes", "2"]) == 0
    assert main(["train", "--resume", "mine"]) == 2


def test_without_a_folder_nothing_is_written_and_steps_count_as_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    algorithm = build()
    assert algorithm.learn(2 * BATCH, progress=False).run_dir is None
    assert algorithm.learn(3.0 * BATCH, progress=False).result["training_iteration"] == 3
    assert algorithm.learn(BATCH, progress=False).result == {}
    assert "leaves nothing to do" not in caplog.text  # log_level is ERROR
    assert algorithm.iteration == 3
    assert list(tmp_path.iterdir()) == []


def test_progress_is_shown_unless_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    algorithm = build()
    algorithm.learn(BATCH, progress=False)
    assert capsys.readouterr().out == ""
    algorithm.learn(2 * BATCH)
    assert capsys.readouterr().out.startswith("64/64 steps | ")


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    algorithm = build()
    weights = []
    algorithm.learn(
        5 * BATCH,
        run_dir=tmp_path / "run",
        progress=False,
        checkpoint_every=1,
        keep_checkpoints=3,
        keep_best=True,
        callbacks=[lambda algorithm, _: weights.append(algorithm.get_policy().get_weights())],
    )
    folder = tmp_path / "run" / "checkpoints"
    kept = [f"iteration-{i:06}" for i in (3, 4, 5)]
    assert sorted(path.name for path in folder.iterdir()) == ["best", *kept, "latest"]
    for name, expected in zip(kept, weights[2:], strict=True):
        assert_equal(weights_of(folder / name), expected)
    assert_equal(weights_of(folder / "latest"), weights[-1])


class OwnPolicy(PGTF2Policy):
    """A class that a file may not import."""


class OwnPG(PG):
    policy_classes = {"tf2": OwnPolicy}


def make_own_model(observation_space: Any, num_outputs: int) -> keras.Model:
    class OwnModel(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = keras.layers.Dense(num_outputs)

        def call(self, inputs: Any) -> Any:
            return self.out(inputs)

    return OwnModel()


def test_a_run_with_a_policy_and_a_model_of_the_user_measures_its_best_again(
    tmp_path: Path,
) -> None:
    for steps in (2 * BATCH, 3 * BATCH):
        config = PGConfig(algo_class=OwnPG).environment("CartPole-v1")
        config.rollouts(batch_mode="truncate_episodes", rollout_fragment_length=BATCH)
        config.training(train_batch_size=BATCH, model={"custom_model": make_own_model})
        config.evaluation(evaluation_interval=1, evaluation_duration=1)
        algorithm = config.framework(inference="tf", jit_compile=False).build()
        algorithm.learn(steps, run_dir=tmp_path / "run", progress=False, keep_best=True)
        algorithm.stop()
    assert iterations(tmp_path / "run") == [1, 2, 3]


def test_a_resumed_run_measures_its_best_checkpoint_as_it_evaluates_now(tmp_path: Path) -> None:
    run = tmp_path / "run"
    evaluates = {"evaluation_interval": 1, "evaluation_duration": 2}
    build(**evaluates).learn(2 * BATCH, run_dir=run, progress=False, keep_best=True)
    rows = (run / "progress.csv").read_text().splitlines()
    column = rows[0].split(",").index("evaluation/episode_reward_mean")
    cells = [row.split(",") for row in rows[1:]]
    for cell in cells:  # as if episodes had been sampled, or been others
        cell[column] = "1e6"
    lines = [rows[0], *(",".join(cell) for cell in cells)]
    (run / "progress.csv").write_text("\n".join(lines) + "\n")

    again = build(**evaluates)
    records = RunLogger(RunFolder.open(run), again, TrainingOptions(steps=1, keep_best=True))
    records.close()
    assert 8.0 < records._best_score < 500.0
    fresh = build(**evaluates)  # nothing else has changed
    assert_equal(again.get_policy().get_weights(), fresh.get_policy().get_weights())


def test_the_best_iteration_is_that_with_the_best_recent_returns(tmp_path: Path) -> None:
    recent = [(900.0, 4), (150.0, 5), (200.0, 5), (100.0, 5)]  # mean return of so many episodes
    weights: list[dict[str, np.ndarray]] = []

    class Scripted(DefaultCallbacks):
        def on_train_result(self, *, algorithm: Algorithm, result: dict[str, Any]) -> None:
            mean, episodes = recent[algorithm.iteration - 1]
            result["recent_returns"] = {"mean": mean, "episodes": episodes}
            result["episode_reward_mean"] = 10.0 * algorithm.iteration  # lags, and still grows
            weights.append(algorithm.get_policy().get_weights())

    algorithm, run = build(), tmp_path / "run"
    goal = {"run_dir": run, "progress": False, "keep_best": True, "callbacks": [Scripted]}
    algorithm.learn(4 * BATCH, **goal)
    assert_equal(weights_of(run / "checkpoints" / "best"), weights[1])  # sampled the third one
    assert stored_best(run, algorithm) == 200.0


def stored_best(run: Path, algorithm: Algorithm) -> float:
    """Returns the score that a resumed run compares with."""
    records = RunLogger(RunFolder.open(run), algorithm, TrainingOptions(steps=1, keep_best=True))
    records.close()
    return records._best_score


def test_the_best_of_a_run_without_recent_returns_is_that_of_the_last_episodes(
    tmp_path: Path,
) -> None:
    class Earlier(DefaultCallbacks):
        """Gives results as earlier versions did."""

        def on_train_result(self, *, algorithm: Algorithm, result: dict[str, Any]) -> None:
            del result["recent_returns"]
            result["episode_reward_mean"] = 10.0 * algorithm.iteration

    algorithm, run = build(), tmp_path / "run"
    goal = {"run_dir": run, "progress": False, "keep_best": True, "callbacks": [Earlier]}
    algorithm.learn(2 * BATCH, **goal)
    assert stored_best(run, algorithm) == 20.0


def test_a_checkpoint_that_training_goes_on_from_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    build().learn(BATCH, run_dir=run, progress=False, checkpoint_every=1, keep_checkpoints=2)
    first = run / "checkpoints" / "iteration-000001"
    again = Algorithm.from_checkpoint(first)
    again.run_dir = run
    again.learn(5 * BATCH, run_dir=run, progress=False, checkpoint_every=1, keep_checkpoints=2)
    results = sorted(path.name for path in first.parent.glob("iteration-*"))
    assert results == [f"iteration-{i:06}" for i in (1, 4, 5)]


# -- going on ---------------------------------------------------------------------------------


def test_a_script_that_is_run_again_goes_on_with_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "new" / "run"
    build(reset_episodes_at_checkpoint=True).learn(2 * BATCH, run_dir=run_dir, progress=False)
    again = build(reset_episodes_at_checkpoint=True)
    learned = again.learn(4 * BATCH, run_dir=run_dir)
    assert f"Training resumes in {run_dir} after iteration 2.\n" in capsys.readouterr().out
    assert learned.result["training_iteration"] == 4
    assert iterations(run_dir) == [1, 2, 3, 4]
    assert_equal(again.get_policy().get_weights(), weights_of(run_dir / "checkpoints" / "latest"))
    assert again.learn(5 * BATCH, run_dir=run_dir, progress=False).ended_by == "steps"
    assert iterations(run_dir) == [1, 2, 3, 4, 5]


def test_an_algorithm_that_trained_goes_on_in_its_own_run_and_in_no_other(tmp_path: Path) -> None:
    mine, other, new = tmp_path / "mine", tmp_path / "other", tmp_path / "new"
    algorithm = build()
    algorithm.learn(BATCH, run_dir=mine, progress=False)
    algorithm.train()
    algorithm.learn(3 * BATCH, run_dir=mine, progress=False)
    assert iterations(mine) == [1, 3]
    build().learn(BATCH, run_dir=other, progress=False)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"holds another run, at iteration 1.*from_checkpoint\("):
        algorithm.learn(4 * BATCH, run_dir=other, progress=False)
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert algorithm.iteration == 3
    restored = PG.from_checkpoint(other / "checkpoints" / "latest")
    restored.learn(2 * BATCH, run_dir=other, progress=False)
    assert iterations(other) == [1, 2]
    algorithm.learn(4 * BATCH, run_dir=new, progress=False)
    assert iterations(new) == [4]


def test_a_folder_that_is_not_for_this_algorithm_is_refused_and_left_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    build().learn(BATCH, run_dir=run_dir, progress=False)
    with pytest.raises(UsageError, match=r"other settings: lr \(there 0.0004, here 0.5\)"):
        build(lr=0.5).learn(BATCH, run_dir=run_dir, progress=False)
    others = {"lr": 0.5, "gamma": 0.5, "seed": 6, "grad_clip": 9.0}
    with pytest.raises(UsageError, match=r"gamma .*, grad_clip .*, lr .* and 1 more. Give another"):
        build(**others).learn(BATCH, run_dir=run_dir, progress=False)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"is not a run folder, but holds \['notes.txt', 'run'\]"):
        build().learn(BATCH, run_dir=tmp_path, progress=False)
    with RunFolder.open(run_dir).acquire(), pytest.raises(FolderInUseError):
        build().learn(BATCH, run_dir=run_dir, progress=False)
    assert iterations(run_dir) == [1]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"total_timesteps": 0}, "total_timesteps must be a whole number, 1 or more, got 0"),
        ({"total_timesteps": "1e5"}, "total_timesteps must be a whole number"),
        ({"total_timesteps": float("nan")}, "total_timesteps must be a whole number"),
        ({"total_timesteps": float("inf")}, "total_timesteps must be a whole number"),
        ({"total_timesteps": 9, "checkpoint_every": 0}, "checkpoint_every must be"),
        ({"total_timesteps": 9, "until": "high"}, "until must be a number or None"),
        ({"total_timesteps": 9, "callbacks": ["print"]}, "callbacks must be functions"),
        (
            {"total_timesteps": 9, "callbacks": keras.callbacks.EarlyStopping()},
            "with a function f\\(algorithm, result\\) that returns False",
        ),
        (
            {"total_timesteps": 9, "callbacks": [keras.callbacks.ReduceLROnPlateau()]},
            r'set_hyperparameter\("lr", lr\)',
        ),
    ],
)
def test_wrong_arguments_change_nothing(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    algorithm = build()
    with pytest.raises(UsageError, match=words):
        algorithm.learn(**values, run_dir=tmp_path / "run", progress=False)
    assert algorithm.iteration == 0
    assert list(tmp_path.iterdir()) == []


# -- callbacks --------------------------------------------------------------------------------


class Counting(DefaultCallbacks):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any]) -> None:
        self.seen.append(result["training_iteration"])
        result["custom_metrics"]["seen"] = len(self.seen)


def test_callbacks_are_told_of_each_iteration_and_a_function_can_end_training() -> None:
    counting, lines = Counting(), []

    def three_are_enough(algorithm: Algorithm, result: dict[str, Any]) -> bool:
        lines.append(result["custom_metrics"]["seen"])
        return algorithm.iteration < 3

    algorithm = build()
    own = algorithm.callbacks
    learned = algorithm.learn(
        100 * BATCH,
        progress=False,
        callbacks=[Counting, counting, three_are_enough, lambda algorithm, result: None],
    )
    assert (learned.ended_by, counting.seen, lines) == ("callback", [1, 2, 3], [1, 2, 3])
    assert algorithm.callbacks is own
    algorithm.train()
    assert counting.seen == [1, 2, 3]


def test_one_function_needs_no_list_and_may_lower_the_learning_rate() -> None:
    def halve(algorithm: Algorithm, result: dict[str, Any]) -> None:
        policy = algorithm.get_policy()
        policy.set_hyperparameter("lr", policy.cur_lr / 2)

    algorithm = build(lr=0.25)
    learned = algorithm.learn(2 * BATCH, progress=False, callbacks=halve)
    assert learned.result["info"]["learner"]["default_policy"]["learner_stats"]["cur_lr"] == 0.125
    assert algorithm.get_policy().cur_lr == 0.0625


def test_the_target_is_compared_with_recent_episodes_once_there_are_five() -> None:
    seen = []

    class Lagging(DefaultCallbacks):
        def on_train_result(self, *, algorithm: Algorithm, result: dict[str, Any]) -> None:
            result["episode_reward_mean"] = -424.0  # of the last 100 episodes
            result["recent_returns"] = {"mean": -150.0, "episodes": 3 + algorithm.iteration}
            seen.append(algorithm.iteration)

    learned = build().learn(9 * BATCH, until=-150.0, progress=False, callbacks=[Lagging])
    assert (learned.ended_by, seen) == ("target", [1, 2])


def test_what_learning_gave_is_shown_in_one_line(tmp_path: Path) -> None:
    learned = build().learn(2 * BATCH, progress=False, run_dir=tmp_path)
    mean = learned.result["recent_returns"]["mean"]
    shown = (
        f"LearnResult(64 steps, mean return {mean:.4g}, ended by steps, run_dir={str(tmp_path)!r})"
    )
    assert repr(learned) == shown
    recent = {"recent_returns": {"mean": float("nan")}}
    endless = learned._replace(result={**learned.result, **recent})
    assert "no episode has ended" in repr(endless)


def test_callbacks_that_workers_would_call_are_refused() -> None:
    class OfEpisodes(DefaultCallbacks):
        def on_episode_end(self, **about: Any) -> None:
            raise AssertionError("nobody calls this")

    for values in (OfEpisodes, OfEpisodes()):
        with pytest.raises(UsageError, match=r"on_episode_end.*config\.callbacks\(OfEpisodes\)"):
            build().learn(BATCH, progress=False, callbacks=[values])


@pytest.mark.parametrize("change", [{}, {"recent_returns": None}])
def test_a_run_whose_callback_takes_the_mean_return_away_goes_on(change: dict[str, Any]) -> None:
    def replace(algorithm: Algorithm, result: dict[str, Any]) -> None:
        del result["recent_returns"]
        result.update(change)

    class Replacing(DefaultCallbacks):
        def on_train_result(self, *, algorithm: Algorithm, result: dict[str, Any]) -> None:
            replace(algorithm, result)

    learned = build().learn(2 * BATCH, until=-1.0, progress=True, callbacks=[Replacing])
    assert (learned.ended_by, learned.result["training_iteration"]) == ("steps", 2)


# -- ends -------------------------------------------------------------------------------------


def test_an_error_in_a_callback_saves_the_last_whole_iteration(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def break_in_the_second(algorithm: Algorithm, result: dict[str, Any]) -> None:
        if algorithm.iteration == 2:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        build().learn(9 * BATCH, run_dir=run_dir, progress=False, callbacks=[break_in_the_second])
    saved = json.loads((run_dir / "checkpoints" / "latest" / "algorithm.json").read_text())
    assert saved["progress"]["iteration"] == 2
    build().learn(3 * BATCH, run_dir=run_dir, progress=False)
    assert iterations(run_dir) == [1, 2, 3]


def test_ctrl_c_ends_after_the_iteration_saves_and_leaves_the_handlers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def press(algorithm: Algorithm, result: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)

    algorithm, run_dir = build(), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        algorithm.learn(9 * BATCH, run_dir=run_dir, progress=False, callbacks=[press])
    assert "training ends after this iteration" in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == results
    assert iterations(run_dir) == [1]
    assert RunFolder.open(run_dir).has_checkpoint
    assert algorithm.learn(2 * BATCH, run_dir=run_dir, progress=False).ended_by == "steps"
    assert iterations(run_dir) == [1, 2]


def test_a_second_ctrl_c_ends_training_within_the_iteration(tmp_path: Path) -> None:
    class Pressing(DefaultCallbacks):
        def on_train_result(self, *, algorithm: Any, result: dict[str, Any]) -> None:
            if algorithm.iteration == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                raise AssertionError("not interrupted")

    run_dir = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        build().learn(9 * BATCH, run_dir=run_dir, progress=False, callbacks=[Pressing])
    assert iterations(run_dir) == [1]
    saved = json.loads((run_dir / "checkpoints" / "latest" / "algorithm.json").read_text())
    assert saved["progress"]["iteration"] == 1


def test_it_learns_in_a_thread_too(tmp_path: Path) -> None:
    algorithm, ended = build(), []
    thread = threading.Thread(
        target=lambda: ended.append(
            algorithm.learn(2 * BATCH, run_dir=tmp_path / "run", progress=False).ended_by
        )
    )
    thread.start()
    thread.join()
    assert ended == ["steps"]


def test_numbers_that_are_not_finite_end_it_and_overwrite_no_checkpoint(tmp_path: Path) -> None:
    def spoil(algorithm: Algorithm, result: dict[str, Any]) -> None:
        if algorithm.iteration == 2:
            algorithm.get_policy().set_hyperparameter("lr", 1e38)

    run_dir = tmp_path / "run"
    with pytest.raises(NonFiniteError):
        build().learn(
            99 * BATCH, run_dir=run_dir, progress=False, callbacks=[spoil], checkpoint_every=1
        )
    saved = json.loads((run_dir / "checkpoints" / "latest" / "algorithm.json").read_text())
    assert saved["finite"] is True
