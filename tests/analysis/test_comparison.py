"""Runs side by side, from their folders to the page."""

import itertools
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from helpers.recorded_runs import VERSIONS, write_run
from tfpolicies import compare_runs
from tfpolicies.analysis.comparison import make_grid
from tfpolicies.analysis.comparison_files import write_files
from tfpolicies.analysis.run_groups import find_differences, format_setting
from tfpolicies.analysis.run_record import read_run
from tfpolicies.analysis.run_summary import choose_statistics, get_statistic
from tfpolicies.cli import main
from tfpolicies.errors import CheckpointError, UsageError
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.storage.checkpoint import write_checkpoint
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST

NAN = float("nan")
VOID = {"img", "meta", "source"}


@pytest.fixture
def runs(tmp_path):
    """A folder of two groups of runs."""
    for seed, value in enumerate((10.0, 20.0, 60.0)):
        write_run(tmp_path / "runs" / f"fast-{seed}", [0.0, value], seed=seed, config={"lr": 0.1})
    for seed in range(2):
        config = {"lr": 0.01, "model": {"fcnet_hiddens": [4]}}
        write_run(tmp_path / "runs" / f"slow-{seed}", [0.0, 5.0], seed=seed, config=config)
    return tmp_path / "runs"


class Page(HTMLParser):
    """Checks that elements are nested, and collects texts, elements and links."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    def find(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def read_page(comparison, folder, find=lambda run: ()):
    files = write_files(comparison, folder, find)
    text = files.page.read_text()
    return Page(text), text


def test_runs_that_differ_in_their_seed_form_a_group(runs):
    comparison = compare_runs(runs)
    assert repr(comparison) == "RunComparison(5 runs in 2 groups on 1 environment)"
    [section] = comparison.sections
    labels = [result.label for result in section.groups]
    assert labels == [
        "PPO, lr=0.1, model.fcnet_hiddens=default",
        "PPO, lr=0.01, model.fcnet_hiddens=[4]",
    ]
    assert [result.group.seeds for result in section.groups] == [(0, 1, 2), (0, 1)]
    fast, slow = section.groups
    np.testing.assert_array_equal(fast.scores, [10.0, 20.0, 60.0])
    assert fast.final.estimate == pytest.approx(30.0)
    assert slow.final == (5.0, 5.0, 5.0)
    assert section.probabilities[0, 1] == (1.0, 1.0, 1.0)
    assert section.probabilities[1, 0] == (0.0, 0.0, 0.0)
    np.testing.assert_allclose(fast.training.grid[[0, -1]], [100, 200])
    np.testing.assert_allclose(fast.training.estimate, np.linspace(0, 30, len(section.grid)))
    assert compare_runs([runs], by="time").sections[0].grid[-1] == 4.0
    assert compare_runs([runs], estimator="median").groups[0].final.estimate == 20.0


def test_environments_and_algorithms_are_told_apart(tmp_path):
    for i, (algorithm, env) in enumerate(
        [("PPO", "A-v0"), ("DQN", "A-v0"), ("my.module:PPO", "A-v0"), ("PPO", None)]
    ):
        write_run(tmp_path / f"{i}", [1.0, 2.0], algorithm=algorithm, env=env)
    sections = compare_runs(tmp_path).sections
    names = {section.env: [x.label for x in section.groups] for section in sections}
    assert names == {"A-v0": ["PPO", "DQN", "PPO #2"], "recorded experience": ["PPO"]}


def test_many_different_settings_are_shortened_and_labels_stay_different(tmp_path):
    for i in range(3):
        names = ("a", "b", "c", "d", "e")
        config = {name: int(i == 2 and name == "e") + i for name in names} if i else {}
        write_run(tmp_path / f"{i}", [1.0], config=config | {"a": 7, "b": 7, "c": 7})
    labels = [result.label for result in compare_runs(tmp_path).groups]
    assert labels == ["PPO, d=default, e=default", "PPO, d=1, e=1", "PPO, d=2, e=3"]
    assert len(set(labels)) == 3
    assert format_setting({"$import": "mine:Model"}) == "mine:Model"
    assert find_differences([]) == []


def test_the_score_is_the_mean_over_the_last_tenth_or_the_last_return(tmp_path):
    write_run(tmp_path / "long", [float(i) for i in range(20)])  # 2,000 steps
    write_run(tmp_path / "early", [3.0, NAN], seed=1)
    write_run(tmp_path / "none", [NAN, NAN], seed=2)
    [result] = compare_runs(tmp_path).groups
    np.testing.assert_array_equal(result.scores, [18.0, 3.0, NAN])
    assert result.num_scores == 2


def test_evaluations_give_the_scores_if_all_groups_have_them(tmp_path):
    write_run(tmp_path / "a", [1.0, 2.0], evaluations=[None, 50.0])
    write_run(tmp_path / "b", [1.0, 2.0], evaluations=[30.0, None], algorithm="DQN")
    section = compare_runs(tmp_path).sections[0]
    assert section.scored_by == "evaluation"
    assert [x.final.estimate for x in section.groups] == [50.0, 30.0]
    write_run(tmp_path / "c", [1.0, 2.0], algorithm="SAC")
    section = compare_runs(tmp_path).sections[0]
    assert section.scored_by == "training"
    assert section.groups[2].evaluation is None


def test_evaluations_before_the_last_tenth_are_named(tmp_path, capsys):
    for seed in range(2):
        late = [40.0] if seed else [None]
        evaluations = [None] * 7 + [30.0, None] + late
        write_run(tmp_path / f"run-{seed}", [1.0] * 10, seed=seed, evaluations=evaluations)
    write_run(tmp_path / "none", [1.0] * 10, seed=2)
    comparison = compare_runs(tmp_path)
    [section] = comparison.sections
    assert [run.name for run in section.early_scores] == ["run-0"]
    note = (
        "1 run had the last evaluation before the last tenth of the steps, so that one counts "
        "instead: run-0."
    )
    assert section.describe_early_scores().startswith(note)
    assert note in " ".join(read_page(comparison, tmp_path / "page")[0].text)
    assert main(["compare", str(tmp_path), "--to", str(tmp_path / "page")]) == 0
    assert note in " ".join(capsys.readouterr().out.split())


def test_labels_begin_with_well_known_settings_and_have_values_of_checkpoints(tmp_path):
    changes = {"lr": 0.1, "use_gae": False, "evaluation_interval": 2, "a": 1, "b": 2}
    changed = write_run(tmp_path / "changed", [1.0], config=changes)
    plain = write_run(tmp_path / "plain", [1.0])
    for run, settings in ((changed, {}), (plain, {"lr": 5e-05, "a": 0, "b": 0, "use_gae": True})):
        manifest = {"type": "Algorithm", "config": {"settings": settings}}
        write_checkpoint(run.latest, ALGORITHM_MANIFEST, manifest, {})
    labels = [result.label for result in compare_runs(tmp_path).groups]
    assert labels == ["PPO, lr=0.1, a=1, b=2, 2 more", "PPO, lr=5e-05, a=0, b=0, 2 more"]


def test_groups_have_the_names_that_the_caller_gives(tmp_path, capsys):
    for name, rate in (("a", 0.1), ("b", 0.2), ("c", 0.3)):
        write_run(tmp_path / name, [1.0], config={"lr": rate})
    paths = {"tuned": [tmp_path / "a"], "default": [tmp_path / "b"], "": [tmp_path / "c"]}
    labels = [result.label for result in compare_runs(paths).groups]
    assert labels == ["tuned", "default", "PPO, lr=0.3"]
    paths = {"mixed": [tmp_path / "a", tmp_path / "b"]}
    labels = [result.label for result in compare_runs(paths).groups]
    assert labels == ["mixed: PPO, lr=0.1", "mixed: PPO, lr=0.2"]

    words = [f"tuned={tmp_path / 'a'}", str(tmp_path / "b"), "--to", str(tmp_path / "page")]
    assert main(["compare", *words]) == 0
    shown = capsys.readouterr().out
    assert "tuned " in shown
    assert "PPO, lr=0.2" in shown


def test_settings_of_a_checkpoint_that_are_nested_too_deeply_are_not_shown(tmp_path):
    write_run(tmp_path / "changed", [1.0], config={"lr": 0.1})
    deep = {"x": 0.5}
    for _ in range(400):
        deep = {"x": deep}
    manifest = {"type": "Algorithm", "config": {"settings": {"lr": 5e-05, "deep": deep}}}
    plain = write_run(tmp_path / "plain", [1.0])
    write_checkpoint(plain.latest, ALGORITHM_MANIFEST, manifest, {})
    labels = [result.label for result in compare_runs(tmp_path).groups]
    assert labels == ["PPO, lr=0.1", "PPO, lr=default"]


def test_the_grid_ends_with_the_shortest_of_the_runs_of_full_length():
    grid = make_grid([np.array([10.0, 1000.0]), np.array([20.0, 995.0]), np.array([5.0, 400.0])])
    assert grid[[0, -1]].tolist() == [5.0, 995.0]
    assert len(make_grid([np.zeros(0)])) == 0
    assert make_grid([np.array([7.0])]).tolist() == [7.0]


def test_a_shorter_run_does_not_continue(tmp_path):
    write_run(tmp_path / "a", [0.0, 10.0], seed=0)
    write_run(tmp_path / "b", [0.0, 10.0, 20.0, 30.0], seed=1)
    [result] = compare_runs(tmp_path).groups
    counts = result.training.num_runs
    assert set(counts[result.training.grid <= 200]) == {2}
    assert set(counts[result.training.grid > 200]) == {1}
    assert result.training.estimate[-1] == 30.0


def test_damaged_runs_are_named_and_left_out(runs, tmp_path):
    write_run(runs / "bad-csv", [1.0]).progress_csv.write_text("no\nprogress\n")
    (runs / "bad-json").mkdir()
    (runs / "bad-json" / "run.json").write_text("{")
    comparison = compare_runs(runs)
    assert len(comparison.runs) == 5
    assert [path.rpartition("/")[2] for path in comparison.damaged] == ["bad-csv", "bad-json"]
    page, _ = read_page(comparison, tmp_path / "out")
    assert "2 runs cannot be read and were left out" in page.text
    with pytest.raises(CheckpointError, match=r"None of the runs can be read: .*bad-json"):
        compare_runs(runs / "bad-json")


def test_wrong_arguments_are_refused(runs, tmp_path):
    with pytest.raises(UsageError, match=r"by must be one of .*'step'\. Did you mean 'steps'"):
        compare_runs(runs, by="step")
    with pytest.raises(UsageError, match="estimator must be one of"):
        compare_runs(runs, estimator="best")
    with pytest.raises(UsageError, match="at least one"):
        compare_runs([])
    with pytest.raises(CheckpointError, match="is not a run folder"):
        compare_runs([runs, tmp_path / "missing"])


def test_the_page_is_whole_and_loads_nothing(runs, tmp_path):
    page, text = read_page(compare_runs(runs), tmp_path / "out")
    assert not page.find("script")
    assert not re.search(r"(?:https?:)?//\w", text)
    sources = [x["src"] for x in page.find("img")] + [x["srcset"] for x in page.find("source")]
    assert all(source.startswith("data:") for source in sources)
    assert all(attributes["alt"] for attributes in page.find("img"))
    assert {x["scope"] for x in page.find("th")} == {"col", "row"}
    assert len(page.find("caption")) == len(page.find("table"))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert page.find("html") == [{"lang": "en"}]
    words = " ".join(page.text)
    assert "2 or 3 runs tell little" in words
    assert "There are no evaluations" in words
    pictures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert pictures == ["curves-CartPole-v1.png", "final-CartPole-v1.png"]


def test_a_run_folder_of_a_stranger_cannot_inject_markup(tmp_path):
    evil = "<script>alert(1)</script>\" onload='x' \x1b[31m$\\frac$"
    run = write_run(
        tmp_path / "<b>run",
        [1.0, 2.0],
        env=evil,
        algorithm=evil,
        config={evil: evil, "model": {"a": [evil]}},
        ended_by=None,
        error=f"Traceback\n  {evil}\n",
        versions={evil: evil},
    )
    write_run(tmp_path / "other", [1.0], env=evil, config={"lr": evil}, versions=VERSIONS)
    run.videos.mkdir()
    (run.videos / "<i>&.mp4").write_bytes(b"video")
    (tmp_path / "<u>").mkdir()
    (tmp_path / "<u>" / "run.json").write_text(evil)
    page, text = read_page(
        compare_runs(tmp_path), tmp_path / "out", find=lambda run: [(evil, evil)]
    )
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "b", "i", "u"}
    assert not any("onload" in attributes for _, attributes in page.elements)
    assert "\x1b" not in text
    assert "<script>alert(1)</script>" in "".join(page.text)


def test_settings_that_are_nested_too_deeply_are_refused(runs):
    deep = {}
    for _ in range(200):
        deep = {"a": [deep]}
    write_run(runs / "deep", [1.0], config=deep)
    [(path, reason)] = compare_runs(runs).damaged.items()
    assert path.endswith("deep")
    assert "nested more than 30 levels" in reason


def test_the_page_shows_how_runs_ended_and_what_was_found(tmp_path):
    write_run(tmp_path / "a", [1.0, 2.0], seed=0, ended_by="target")
    error = "Traceback (most recent call last):\n  line 1\nValueError: boom\n"
    write_run(tmp_path / "b", [1.0], seed=1, ended_by=None, error=error)
    write_run(tmp_path / "c", [1.0], seed=2, ended_by=None, versions={"tfpolicies": "9"})
    running = RunFolder.open(tmp_path / "a").acquire()
    try:
        page, _ = read_page(compare_runs(tmp_path), tmp_path / "out")
    finally:
        running.release()
    words = "\n".join(page.text)
    for text in ("still training", "error", "stopped", "ValueError: boom", "0.1.0 or 9"):
        assert text in words
    findings = {"a": [("No exploration", "entropy is 0")], "b": (), "c": ()}
    page, _ = read_page(
        compare_runs(tmp_path), tmp_path / "out", find=lambda run: findings[run.name]
    )
    assert {"No exploration", "entropy is 0", "target reached"} <= {*page.text}
    assert "The diagnosis has no findings for 2 runs." in page.text


def test_numbers_that_cannot_be_diagnosed_do_not_end_the_comparison(tmp_path):
    columns = {"learner/default_policy/vf_loss": [-1.0] * 30}
    write_run(tmp_path / "one", [float(i) for i in range(30)], columns=columns)
    assert compare_runs(tmp_path).write(tmp_path / "out").page.exists()


def test_one_run_gives_a_report_without_intervals(tmp_path):
    columns = {
        "learner/a/kl": [1.0, 2.0],
        "learner/b/kl": [3.0, NAN],
        "learner/a/entropy": [0.5, 0.25],
    }
    run = write_run(tmp_path / "one", [1.0, 2.0], columns=columns)
    record = read_run(run.path)
    assert choose_statistics([record]) == ["entropy", "kl"]
    np.testing.assert_array_equal(get_statistic(record, "kl"), [2.0, 2.0])
    page, _ = read_page(compare_runs(run.path), tmp_path / "out")
    words = " ".join(page.text)
    assert "PPO on CartPole-v1: one" in page.text
    assert "One run has no interval" in words
    assert "Learning statistics" in words
    assert "Probability of improvement" not in words


def test_the_newest_video_is_shown_unless_it_is_large(tmp_path):
    run = write_run(tmp_path / "one", [1.0, 2.0])
    run.videos.mkdir()
    (run.videos / "iteration-000001.mp4").write_bytes(b"video")
    page, _ = read_page(compare_runs(run.path), tmp_path / "out")
    [video] = page.find("video")
    assert video["src"] == "data:video/mp4;base64,dmlkZW8="
    (run.videos / "iteration-000001.mp4").write_bytes(bytes(4 << 20))
    page, _ = read_page(compare_runs(run.path), tmp_path / "out")
    assert not page.find("video")
    assert "too large for this page" in " ".join(page.text)


def test_runs_without_iterations_or_returns_are_drawn(tmp_path):
    write_run(tmp_path / "new", [], ended_by=None)
    page, _ = read_page(compare_runs(tmp_path), tmp_path / "out")
    assert "not trained" in page.text
    write_run(tmp_path / "silent", [NAN], seed=1)
    read_page(compare_runs(tmp_path), tmp_path / "out")


def test_runs_of_seeds_in_folders_are_compared(tmp_path):
    for seed in range(3):
        write_run(tmp_path / "runs" / "ppo-1" / f"seed-{seed}", [1.0, 2.0], seed=seed)
    write_run(tmp_path / "runs" / "single", [1.0, 2.0], seed=7)
    [result] = compare_runs([tmp_path / "runs", tmp_path / "runs" / "ppo-1"]).groups
    assert result.group.seeds == (0, 1, 2, 7)
    [result] = compare_runs(tmp_path).groups  # a folder of folders of runs
    assert result.group.seeds == (0, 1, 2, 7)


def test_several_runs_of_one_seed_are_not_taken_for_independent_ones(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, [1.0, 2.0], seed=4)
    write_run(tmp_path / "ppo-1" / "seed-5", [1.0], seed=5)
    comparison = compare_runs(tmp_path)
    assert comparison.groups[0].group.duplicate_seeds == (4,)
    page, _ = read_page(comparison, tmp_path / "out")
    assert "several runs of a seed (4)" in " ".join(page.text)
    assert "ppo-1/seed-5" in page.text
