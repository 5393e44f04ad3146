"""Rows go to a tracker in a thread; a tracker that fails costs no training."""

import threading
import time

import pytest

from helpers.workers import make_small_config
from tfpolicies import PGConfig
from tfpolicies.errors import UsageError
from tfpolicies.loggers import background_logger
from tfpolicies.loggers.background_logger import BackgroundLogger, Tracker
from tfpolicies.reporting.progress_csv import read_progress

pytestmark = pytest.mark.usefixtures("kept_programs")

BATCH = 32  # steps of an iteration


class ListTracker(Tracker):
    """A tracker that keeps everything in lists."""

    def __init__(self):
        self.rows, self.uploads, self.ended_by = [], [], None

    def get_stored(self):
        return {"run_id": "7"}

    def write(self, rows):
        self.rows += [row.numbers for row in rows]

    def upload(self, path, name):
        assert path.exists()
        self.uploads.append(name)

    def close(self, ended_by):
        self.ended_by = ended_by


class ListLogger(BackgroundLogger):
    """Logs to a `ListTracker`; `failures` are raised first, one at each attempt to open it."""

    service, key = "Lists", "lists"

    def __init__(self, failures=(), **settings):
        super().__init__(**settings)
        self.tracker = ListTracker()
        self.failures = list(failures)
        self.facts = []

    def open_tracker(self, facts):
        self.facts.append(facts)
        if self.failures:
            raise self.failures.pop(0)
        return self.tracker


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(background_logger, "_SEND_INTERVAL", 0.01)


def build(**settings):
    config = make_small_config("CartPole-v1", PGConfig, seed=5)
    config.rollouts(rollout_fragment_length=8, batch_mode="truncate_episodes")
    return config.update_from_dict({"log_level": "WARN", **settings}).build()


def learn(algorithm, iterations, logger, **options):
    options = {"progress": False, **options}
    return algorithm.learn(iterations * BATCH, callbacks=[logger], **options)


def test_a_tracker_gets_the_rows_of_progress_csv_and_the_facts(tmp_path):
    logger = ListLogger()
    learn(build(lr=0.25), 3, logger, run_dir=tmp_path / "mine")
    assert logger.tracker.rows == read_progress(tmp_path / "mine" / "progress.csv")
    assert logger.tracker.ended_by == "steps"
    (facts,) = logger.facts
    assert (facts.name, facts.run_dir, facts.stored) == ("mine", tmp_path / "mine", {})
    settings = facts.settings
    assert (settings["algorithm"], settings["env"], settings["seed"]) == ("PG", "CartPole-v1", 5)
    assert (settings["lr"], settings["gamma"]) == (0.25, 0.99)
    assert {"tensorflow", "tfpolicies"} <= facts.versions.keys()
    assert facts.machine["cores"] >= 1


def test_a_resumed_run_is_given_what_identifies_it(tmp_path):
    learn(build(), 1, ListLogger(), run_dir=tmp_path)
    resumed = ListLogger()
    learn(build(), 2, resumed, run_dir=tmp_path)
    assert resumed.facts[0].stored == {"run_id": "7"}
    assert [row["iteration"] for row in resumed.tracker.rows] == [2]
    assert [x.name for x in (tmp_path / "trackers").iterdir()] == ["lists.json"]


def test_an_id_that_cannot_be_read_is_said(tmp_path, caplog):
    learn(build(), 1, ListLogger(), run_dir=tmp_path)
    (tmp_path / "trackers" / "lists.json").write_text("{")
    resumed = ListLogger()
    learn(build(), 2, resumed, run_dir=tmp_path)
    assert resumed.facts[0].stored == {}
    assert "lists.json cannot be read, so a new lists run begins" in caplog.text


def test_without_a_folder_rows_are_sent_and_nothing_is_stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = ListLogger()
    learn(build(), 1, logger)
    assert len(logger.tracker.rows) == 1
    assert logger.facts[0].name == "PG-CartPole-v1"
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(UsageError, match=r"uploads videos, which only a run with a folder has"):
        learn(build(), 1, ListLogger(files=["videos"]))


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_tracker_that_fails_at_first_gets_all_rows_later(caplog):
    logger = ListLogger([OSError("away"), OSError("still away")])

    def wait(algorithm, result):
        wait_until(lambda: len(logger.tracker.rows) == algorithm.iteration)

    build().learn(3 * BATCH, progress=False, callbacks=[logger, wait])
    assert [row["iteration"] for row in logger.tracker.rows] == [1, 2, 3]
    (record,) = caplog.records
    assert record.getMessage() == (
        "Lists does not take the numbers of this run: OSError: away. Training continues; they are "
        "kept, and sent if it does later."
    )


def test_a_tracker_that_never_answers_is_warned_of_once_and_at_the_end(caplog):
    learned = learn(build(), 3, ListLogger([ConnectionRefusedError("away")] * 99))
    assert learned.ended_by == "steps"
    first, last = [x.getMessage() for x in caplog.records]
    assert first.startswith("Lists does not take the numbers of this run: ConnectionRefusedError")
    assert last == "Lists did not get 3 iterations: ConnectionRefusedError: away. They are lost."


def test_the_end_says_where_rows_and_files_are_that_were_not_sent(tmp_path, caplog):
    class Broken(ListTracker):
        def upload(self, path, name):
            raise ValueError("too large")

    logger = ListLogger(files=["checkpoints", "learning_curve", "export"])
    logger.tracker = Broken()
    learn(build(), 2, logger, run_dir=tmp_path)
    assert len(logger.tracker.rows) == 2
    assert caplog.records[-1].getMessage() == (
        "Lists did not get checkpoints/latest, learning_curve.png: ValueError: too large. They "
        f"are in {tmp_path}."
    )


def test_a_tracker_that_hangs_is_left_after_the_given_time(caplog):
    release = threading.Event()

    class Hanging(ListTracker):
        def write(self, rows):
            release.wait()
            raise OSError("late")

    logger = ListLogger(close_seconds=0.1)
    logger.tracker = Hanging()
    learn(build(), 2, logger)
    assert caplog.records[-1].getMessage() == (
        "Lists did not get 2 iterations: it did not answer within 0.1 s. They are lost."
    )
    caplog.clear()
    release.set()
    (thread,) = [x for x in threading.enumerate() if x.name == "Lists logger"]
    thread.join()
    assert caplog.text == ""


def test_the_oldest_rows_are_dropped_if_there_are_too_many(monkeypatch, caplog):
    monkeypatch.setattr(background_logger, "_MAX_PENDING_ROWS", 2)
    logger = ListLogger([OSError("away")] * 99)
    learn(build(), 5, logger)
    assert "Lists did not get 5 iterations: OSError: away." in caplog.text


def test_rows_that_come_during_a_write_are_not_lost(monkeypatch, caplog):
    monkeypatch.setattr(background_logger, "_MAX_PENDING_ROWS", 2)
    logger = ListLogger()

    class Slow(ListTracker):
        def write(self, rows):
            if not self.rows:  # three iterations end meanwhile, for two of which there is space
                for number in (2, 3, 4):
                    logger._sender.add({"iteration": number})
            super().write(rows)

    def wait(algorithm, result):
        wait_until(lambda: len(logger.tracker.rows) == 3)

    logger.tracker = Slow()
    build().learn(BATCH, progress=False, callbacks=[logger, wait])
    assert [row["iteration"] for row in logger.tracker.rows] == [1, 3, 4]
    assert "Lists did not get 1 iterations" in caplog.text


def test_files_are_uploaded_once_videos_early_and_others_at_the_end(tmp_path):
    class Watching(ListTracker):
        def write(self, rows):
            super().write(rows)
            self.uploads += [f"row {row.numbers['iteration']}" for row in rows]

    logger = ListLogger(files=background_logger.FILES)
    logger.tracker = Watching()
    videos = tmp_path / "videos"

    def add_video(algorithm, result):
        videos.mkdir(exist_ok=True)
        if algorithm.iteration == 1:
            (videos / "iteration-000001.mp4").write_bytes(b"video")
        wait_until(lambda: len(logger.tracker.uploads) >= 2)

    build().learn(2 * BATCH, progress=False, callbacks=[logger, add_video], run_dir=tmp_path)
    uploads = logger.tracker.uploads
    assert sorted(uploads[:2]) == ["row 1", "videos/iteration-000001.mp4"]
    assert uploads[2:] == ["row 2", "checkpoints/latest", "learning_curve.png"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"files": ["curve"]}, r"files must be a list of learning_curve, .*; got \['curve'\]"),
        ({"files": "videos"}, "got 'videos'"),
        ({"close_seconds": -1}, "close_seconds must be a number >= 0, got -1"),
    ],
)
def test_wrong_arguments_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        ListLogger(**settings)


def test_the_end_of_a_run_that_fails_is_known():
    class Trouble(Exception):
        pass

    def fail(algorithm, result):
        raise Trouble

    logger = ListLogger()
    with pytest.raises(Trouble):
        build().learn(BATCH, progress=False, callbacks=[logger, fail])
    assert (logger.tracker.ended_by, len(logger.tracker.rows)) == ("error", 1)
