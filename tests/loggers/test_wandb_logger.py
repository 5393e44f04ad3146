"""Runs are logged to W&B in its offline mode, whose files are read back."""

import json
import struct
import time

import pytest

from helpers.rendering_envs import Painted
from helpers.workers import make_small_config
from tfpolicies import PGConfig, WandbLogger
from tfpolicies.errors import MissingPackageError, UsageError
from tfpolicies.loggers import wandb_logger
from tfpolicies.reporting.progress_csv import read_progress

pytestmark = [
    pytest.mark.loggers,
    pytest.mark.usefixtures("kept_programs"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of W&B's packages
]

BATCH = 32  # steps of an iteration


def build(**settings):
    config = make_small_config("CartPole-v1", PGConfig, seed=5)
    config.rollouts(rollout_fragment_length=8, batch_mode="truncate_episodes")
    return config.update_from_dict({"log_level": "WARN", **settings}).build()


def learn(algorithm, iterations, logger, run_dir):
    return algorithm.learn(iterations * BATCH, progress=False, callbacks=[logger], run_dir=run_dir)


def read_records(folder):
    """Returns the records of an offline run, in order, when W&B's process has written the last."""
    deadline = time.monotonic() + 60
    while True:
        records = parse_records(folder)
        if records and records[-1].HasField("exit"):
            return records
        assert time.monotonic() < deadline
        time.sleep(0.1)


def parse_records(folder):
    """Returns the complete records of an offline run.

    The file is a log of blocks of 32 KiB after 7 bytes; each part of a record has a header: its
    checksum, its length, and whether it is the whole, first, middle or last part.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    content, position, records, parts = path.read_bytes(), 7, [], []
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # the whole, or the last part
            records.append(Record.FromString(b"".join(parts)))
            parts.clear()
    return records


def read_history(records):
    rows = []
    for record in records:
        if record.HasField("history"):
            items = record.history.item
            rows.append({".".join(x.nested_key) or x.key: json.loads(x.value_json) for x in items})
    return rows


def test_a_run_has_config_metrics_and_files(tmp_path):
    files = ["learning_curve", "checkpoints"]
    logger = WandbLogger("mine", mode="offline", tags=["a"], files=files)
    learn(build(lr=0.25), 3, logger, tmp_path / "run")
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    records = read_records(folder)
    (run, *_) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name, [*run.tags]) == ("mine", "run", ["a"])
    config = {x.key: json.loads(x.value_json) for x in run.config.update}
    assert (config["algorithm"], config["env"], config["lr"]) == ("PG", "CartPole-v1", 0.25)
    assert config["model"]["fcnet_hiddens"] == [4]
    assert config["versions"]["tensorflow"].startswith("2.")
    assert config["machine"]["cores"] >= 1
    history = read_history(records)
    rows = read_progress(tmp_path / "run" / "progress.csv")
    for row, logged in zip(rows, history, strict=False):
        name = "learner/default_policy/policy_loss"
        assert (logged["env_steps"], logged[name]) == (row["env_steps"], row[name])
    assert history[-1]["learning_curve.format"] == "png"
    artifacts = [record.request.log_artifact.artifact for record in records]
    artifacts += [record.artifact for record in records if record.HasField("artifact")]
    assert "checkpoints" in [artifact.type for artifact in artifacts]
    stored = json.loads((tmp_path / "run" / "trackers" / "wandb.json").read_text())
    assert stored == {"run_id": run.run_id}


def test_a_resumed_run_has_the_same_id(tmp_path):
    for iterations in (1, 2):
        learn(build(), iterations, WandbLogger(mode="offline"), tmp_path)
    folders = [*(tmp_path / "wandb").glob("offline-run-*")]
    ids = {folder.name.split("-")[3] for folder in folders}  # a number may follow
    assert len(ids) == 1
    numbers = [
        logged["iteration"] for folder in folders for logged in read_history(read_records(folder))
    ]
    assert sorted(numbers) == [1, 2]


def test_videos_are_logged(tmp_path):
    config = make_small_config(Painted, PGConfig, seed=5, log_level="WARN")
    logger = WandbLogger(mode="offline", files=["videos"])
    config.build().learn(
        BATCH, progress=False, callbacks=[logger], run_dir=tmp_path, record_every=1
    )
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert len([*folder.glob("files/media/videos/*.mp4")]) == 1


def test_a_missing_key_package_or_mode_is_said(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(UsageError, match=r"W&B has no API key. Run `wandb login`, set WANDB_API"):
        WandbLogger(mode="online")
    with pytest.raises(UsageError, match="mode must be None or one of online, offline, disabled"):
        WandbLogger(mode="on")
    monkeypatch.setattr(wandb_logger, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tfpolicies\[wandb\]'"):
        WandbLogger()
