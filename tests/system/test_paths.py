"""Paths of users: made absolute, with `~` expanded, and named in errors as they were written."""

import json
import os
import pickle
from pathlib import Path

import gymnasium as gym
import keras
import numpy as np
import pytest

from helpers.checkpoints import edit_manifest
from helpers.factories import OBS, TWO, assert_equal, batch_for, make, rows_of
from helpers.policy_maps import get_number, make_filled, make_map
from helpers.rendering_envs import Painted
from tfpolicies import (
    DQNConfig,
    PGConfig,
    Policy,
    PolicyMap,
    import_policy,
    record_video,
)
from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.cli import main
from tfpolicies.cli.arguments import parse
from tfpolicies.cli.serve import _parse_source
from tfpolicies.compat.import_rllib import import_checkpoint
from tfpolicies.errors import (
    CheckpointError,
    ConfigError,
    ExportError,
    MissingModelFileError,
    TfPoliciesError,
    UsageError,
)
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer
from tfpolicies.reporting.progress_csv import read_progress
from tfpolicies.reporting.run_folder import RunFolder, find_runs
from tfpolicies.serving.access import read_token
from tfpolicies.system.paths import describe_path, resolve_path

pytestmark = pytest.mark.usefixtures("kept_programs")


class Place:
    """A working folder and a home, both empty; `leave` changes the first to another folder.

    Attributes:
        written: the path as a user writes it.
        path: the absolute path.
    """

    def __init__(self, root, in_home):
        self.root = root
        self.written = "~/here" if in_home else "some/here"
        self.path = root / ("home/here" if in_home else "work/some/here")

    def leave(self):
        os.chdir(self.root / "other")

    def come_back(self):
        os.chdir(self.root / "work")


@pytest.fixture(params=["relative", "home"])
def place(request, tmp_path, monkeypatch):
    for name in ("home", "work", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    yield Place(tmp_path, request.param == "home")
    assert [*(tmp_path / "other").iterdir()] == []
    assert not (tmp_path / "work" / "~").exists()


class Wanderer(Painted):
    """Changes the working folder of its process when it is made, as simulators do."""

    leaves = True

    def __init__(self, config=None, **options):
        super().__init__(length=4, **options)
        if self.leaves:
            os.chdir(Path.cwd().parent / "other")


gym.register("tests/Wanderer-v0", lambda **options: Wanderer(**options))


def build(env=Painted, **settings):
    config = PGConfig().environment(env).debugging(log_level="ERROR")
    config = config.framework(inference="tf", jit_compile=False)
    config = config.training(train_batch_size=8, model={"fcnet_hiddens": [4]})
    return config.debugging(seed=1).update_from_dict(settings).build()


def test_a_path_becomes_absolute_and_keeps_its_links(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path)
    assert resolve_path("link/x") == tmp_path / "link" / "x"
    assert str(resolve_path("link/../x")) == f"{tmp_path}/link/../x"  # of the real folder's parent
    assert resolve_path("~") == tmp_path / "me"
    assert resolve_path(Path("~/a")) == tmp_path / "me" / "a"
    assert resolve_path("./~/a") == tmp_path / "~" / "a"
    assert resolve_path(resolve_path("a")) == resolve_path(".") / "a" == tmp_path / "a"
    assert resolve_path("~nobody-has-this-name/a") == tmp_path / "~nobody-has-this-name" / "a"
    assert describe_path("a", resolve_path("a")) == f"'a' ({tmp_path}/a)"
    assert describe_path(tmp_path, tmp_path) == repr(str(tmp_path))
    assert len(describe_path("a" * 999, Path("b" * 999))) < 420


@pytest.mark.parametrize("path", ["", b"runs", 5, None, type("Odd", (), {})()])
def test_other_objects_than_paths_are_refused(path):
    with pytest.raises(UsageError, match=r"A path must be a text or an os\.PathLike"):
        resolve_path(path)


def test_a_relative_path_in_a_folder_that_was_removed_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match=r"'runs/a' is relative to the working folder, which was"):
        resolve_path("runs/a")
    assert resolve_path(tmp_path) == tmp_path


def test_a_run_stays_in_its_folder(place):
    algorithm = build()
    options = {"progress": False, "callbacks": lambda *_: place.leave()}
    learned = algorithm.learn(16, run_dir=place.written, **options)
    algorithm.learn(32, run_dir=learned.run_dir, progress=False, keep_best=True)
    algorithm.stop()
    assert learned.run_dir == algorithm.run_dir == place.path
    names = {path.name for path in place.path.iterdir()}
    assert {"run.json", "progress.csv", "events", "checkpoints", "learning_curve.png"} <= names
    assert read_progress(place.path / "progress.csv")[-1]["env_steps"] >= 32
    assert (place.path / "checkpoints" / "latest" / "algorithm.json").exists()
    place.come_back()
    assert [run.path for run in find_runs(os.path.dirname(place.written))] == [place.path]
    run = RunFolder.open(place.written)
    place.leave()
    assert run.settings == {"learn": "PG", "finished": "steps"}


def test_a_run_whose_environments_leave_the_folder_stays_in_its_folder(place, monkeypatch):
    monkeypatch.setattr(Wanderer, "leaves", False)
    algorithm = build(Wanderer)
    monkeypatch.setattr(Wanderer, "leaves", True)  # when the first video is recorded
    learned = algorithm.learn(8, run_dir=place.written, progress=False, record_every=1)
    algorithm.stop()
    assert learned.run_dir == place.path
    assert [each.suffix for each in (place.path / "videos").iterdir()] == [".mp4"]


def test_checkpoints_are_found_by_the_result_of_saving_them(place):
    algorithm = build()
    algorithm.train()
    saved = algorithm.save(place.written)
    place.leave()
    assert saved.checkpoint.path == str(place.path)
    algorithm.restore(saved)
    assert algorithm._last_finite_checkpoint == str(place.path)
    place.come_back()
    algorithm.restore(place.written)
    loaded = [Algorithm.from_checkpoint(x, config={"env": Painted}) for x in (place.written, saved)]
    policies = Policy.from_checkpoint(place.written)
    place.leave()
    expected = algorithm.get_policy().get_weights()
    for each in (*(x.get_policy() for x in loaded), policies["default_policy"]):
        assert_equal(each.get_weights(), expected)
    for each in (algorithm, *loaded):
        assert each._last_finite_checkpoint == str(place.path)
        each.stop()


def test_a_checkpoint_without_a_name_stays_where_it_was_written(place):
    algorithm = build()
    path = algorithm.save().checkpoint.path
    place.leave()
    algorithm.restore(path)
    algorithm.stop()
    assert path == str(place.root / "work" / "checkpoint_000000")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_policys_checkpoint_and_weights_are_read_from_the_path_of_the_user(place):
    policy = make(export_native_model_files=False)
    policy.export_checkpoint(place.written)
    place.path.joinpath("policy.json").stat()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    model.save(place.path / "model.keras")
    policy.import_model_from_h5(f"{place.written}/model.keras", allow_missing=True)
    kernel = model.get_weights()[0]
    assert any(np.array_equal(array, kernel) for array in policy.get_weights().values())
    spaces = {"observation_space": OBS, "action_space": TWO}
    path = f"{place.written}/model.keras"
    imported = import_policy(path, **spaces, names={"logits": "output_0"})
    for each in (imported, Policy.from_checkpoint(place.written)):
        assert each.compute_actions(rows_of(OBS, 2))[0].shape == (2,)


def test_exports_stay_and_imports_travel_to_processes_in_other_folders(place):
    policy, rows = make(), rows_of(OBS, 3)
    saved = policy.export_model(f"{place.written}/saved")
    onnx = policy.export_model(f"{place.written}/onnx", onnx=True)
    imported = [import_policy(f"{place.written}/{name}") for name in ("saved", "onnx")]
    player = OnnxPolicy(f"{place.written}/onnx")
    place.leave()
    assert saved.path == place.path / "saved" / "1"
    assert onnx.path == place.path / "onnx" / "model.onnx"
    assert player.file == place.path / "onnx" / "model.onnx"
    expected = policy.compute_actions(rows, explore=False)[0]
    for each in (*imported, *map(pickle.loads, map(pickle.dumps, imported))):
        np.testing.assert_array_equal(each.compute_actions(rows, explore=False)[0], expected)


def test_a_stash_stays_in_its_folder(place):
    policies = make_map("a", capacity=1, path=place.written)
    place.leave()
    policies["b"] = make_filled(2)
    policies.freeze("b")
    policies.close()
    place.come_back()
    with PolicyMap(capacity=1, path=place.written) as again:
        place.leave()
        assert [get_number(again[name]) for name in "ab"] == [1, 2]
    assert {path.name for path in place.path.iterdir()} >= {"worker_0", "frozen"}


def test_a_replay_buffer_keeps_its_folder(place):
    place.path.mkdir(parents=True)
    buffer = MultiAgentReplayBuffer(capacity=32, memory_limit_bytes=0, storage_path=place.written)
    config = DQNConfig().training(replay_buffer_config={"storage_path": place.written})
    place.leave()
    buffer.add(batch_for(make(), 8))
    assert buffer.allocator.bytes_in_files > 0
    for each in (config, config.copy()):
        assert each.replay_buffer_config["storage_path"] == str(place.path)
    with pytest.raises(ConfigError, match="must be an existing folder, or None, but got 'no'"):
        config.copy().training(replay_buffer_config={"storage_path": "no"})


@pytest.mark.soak
def test_a_run_with_a_relative_folder_of_its_buffer_continues(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()

    def train(steps):
        buffer = {"capacity": 64, "storage_path": "rows"}
        config = DQNConfig().environment(Painted).debugging(seed=1, log_level="ERROR")
        config = config.training(replay_buffer_config=buffer, train_batch_size=4, lr=1e-3)
        algorithm = config.framework(inference="tf").reporting(
            min_time_s_per_iteration=None, min_sample_timesteps_per_iteration=4
        ).build()  # fmt: skip
        learned = algorithm.learn(steps, run_dir="run", progress=False)
        algorithm.stop()
        return learned

    train(4)
    manifest = tmp_path / "run" / "checkpoints" / "latest" / "algorithm.json"
    absolute = str(tmp_path / "rows")
    assert absolute in manifest.read_text()
    with edit_manifest(manifest) as content:
        text = json.dumps(content).replace(json.dumps(absolute), json.dumps("rows"))
        content.update(json.loads(text))
    assert train(8).result["training_iteration"] == 2


def test_a_video_is_written_to_the_path_of_the_user(place):
    policy = make(obs=Painted.observation_space)
    recorded = record_video(policy, [f"{place.written}.mp4"], "tests/Wanderer-v0")
    assert recorded.paths == [place.path.with_suffix(".mp4")]
    assert recorded.paths[0].exists()


@pytest.mark.soak
def test_commands_read_and_write_at_the_paths_of_their_options(place, capsys):
    settings = place.root / "home" / "settings.json"
    settings.write_text('{"inference": "tf", "jit_compile": false, "train_batch_size": 8}')
    words = ["train", "tests/Wanderer-v0", "--algo", "PG", "--steps", "8", "--seed", "1"]
    assert main([*words, "--config", "~/settings.json", "--run-dir", place.written]) == 0
    (run,) = place.path.iterdir()
    place.come_back()
    assert main(["train", "--resume", place.written, "--steps", "16"]) == 0
    place.come_back()
    assert main(["evaluate", place.written, "--episodes", "2"]) == 0
    place.come_back()
    assert main(["export", place.written, "--to", "~/exported", "--onnx"]) == 0
    assert (place.root / "home/exported/onnx/model.onnx").exists()
    assert main(["play-exported", "~/exported", "--env", "CartPole-v1"]) == 2  # of another space
    assert "does not exist" not in capsys.readouterr().err
    assert main(["record", place.written, "--to", "~/film.mp4", "--episodes", "1"]) == 0
    assert (place.root / "home/film.mp4").exists()
    assert run.name.startswith("pg-")


def test_the_server_and_porting_read_the_paths_of_their_options(place):
    place.path.mkdir(parents=True)
    (place.path / "token").write_text("secret\n")
    (place.path / "token").chmod(0o600)
    script = place.path / "script.py"
    script.write_text("from ray.rllib.algorithms.ppo import PPO\n")
    assert _parse_source(place.written) == ("", place.path)
    assert _parse_source(f"cart={place.written}") == ("cart", place.path)
    assert read_token(Path(f"{place.written}/token"), print) == "secret"
    assert main(["port", f"{place.written}/script.py"]) == 0
    assert "tfpolicies" in script.read_text()


def run_command(*words):
    """Runs a command that fails; raises its error."""
    args = parse([*words])
    args.debug = False
    args.run(args)


def deploy(path):
    pytest.importorskip("ray.serve")
    from tfpolicies.serving.ray_serve import deployment

    deployment(path)


CARTPOLE = ("--env", "CartPole-v1")
MISSING = {
    "Algorithm.from_checkpoint": (Algorithm.from_checkpoint, CheckpointError),
    "Policy.from_checkpoint": (Policy.from_checkpoint, CheckpointError),
    "policy of an algorithm": (lambda x: Policy.from_checkpoint(x, ["a"]), CheckpointError),
    "import_policy": (import_policy, MissingModelFileError),
    "import_model_from_h5": (lambda x: make().import_model_from_h5(x), MissingModelFileError),
    "OnnxPolicy": (OnnxPolicy, FileNotFoundError),
    "ort_web": (lambda x: make().export_model("x", onnx=True, web=True, ort_web=x), ExportError),
    "import-rllib": (import_checkpoint, CheckpointError),
    "evaluate": (lambda x: run_command("evaluate", x), CheckpointError),
    "export": (lambda x: run_command("export", x, "--to", "never"), CheckpointError),
    "play-exported": (lambda x: run_command("play-exported", x, *CARTPOLE), ExportError),
    "serve": (lambda x: run_command("serve", x), ExportError),
    "deployment": (deploy, UsageError),
}
UNREADABLE = {
    "restore": (lambda x: build().restore(x), CheckpointError),
    "--config": (lambda x: run_command("train", "CartPole-v1", "--config", x), UsageError),
    "--resume": (lambda x: run_command("train", "--resume", x), CheckpointError),
    "token": (lambda x: read_token(Path(x), print), UsageError),
    "storage_path": (
        lambda x: DQNConfig().training(replay_buffer_config={"storage_path": x}),
        ConfigError,
    ),
    "replay buffer": (lambda x: MultiAgentReplayBuffer(9, storage_path=x), ConfigError),
}


@pytest.mark.parametrize("name", [*MISSING, *UNREADABLE])
def test_missing_paths_are_named_as_the_user_wrote_them_and_most_in_full(place, name):
    read, error = (MISSING | UNREADABLE)[name]
    with pytest.raises(error) as raised:
        read(place.written)
    assert repr(place.written) in str(raised.value)
    if name in MISSING:
        assert f"({place.path}" in str(raised.value)
    else:
        assert isinstance(raised.value, TfPoliciesError)


@pytest.mark.parametrize(
    "how", [{}, {"onnx": True}, {"litert": True}], ids=["SavedModel", "ONNX", "LiteRT"]
)
def test_names_of_export_folders_may_have_characters_of_patterns(how, tmp_path):
    policy, rows = make(), rows_of(OBS, 3)
    folder = tmp_path / "a[1] *b*" / "c\\d[x]?"
    for _ in range(2):
        assert policy.export_model(folder, **how).path.exists()
    if "litert" not in how:
        expected = policy.compute_actions(rows, explore=False)[0]
        actual = import_policy(folder).compute_actions(rows, explore=False)[0]
        np.testing.assert_array_equal(actual, expected)
    assert [each.name for each in tmp_path.iterdir()] == ["a[1] *b*"]
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]
