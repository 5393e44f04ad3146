"""`tfpolicies compare`, on runs that were really trained."""

import sys

import pytest

from helpers.processes import run_python
from helpers.quick_configs import quick_config
from helpers.recorded_runs import write_run


def test_compare_prints_a_table_and_writes_a_page_and_pictures(here, succeed, refuse):
    for seed in range(2):
        algorithm = quick_config(env="CartPole-v1").debugging(seed=seed).build()
        steps = 2 * algorithm.config.train_batch_size
        algorithm.learn(steps, run_dir=here / "runs" / f"{seed}", progress=False)
        algorithm.stop()
    (here / "runs" / "bad").mkdir()
    (here / "runs" / "bad" / "run.json").write_text("{")
    output = succeed("compare runs")
    assert "CartPole-v1: training return over the last tenth of the steps" in output
    assert "all steps used" in output
    assert "left out  runs/bad: " in output
    assert "comparison/index.html" in output
    assert (here / "comparison" / "curves-CartPole-v1.png").read_bytes().startswith(b"\x89PNG")
    assert "seconds of training" not in (here / "comparison" / "index.html").read_text()
    assert "median" in succeed("compare runs/0 --to one --by time --estimate median")
    assert "is not a run folder" in refuse("compare nothing")
    assert "--by" in refuse("compare runs --by week")


def test_compare_needs_no_tensorflow(tmp_path):
    write_run(tmp_path / "one", [1.0, 2.0], algorithm="my_module:Own")  # not imported
    code = (
        "import sys; from tfpolicies.cli import main; "
        f"main(['compare', {str(tmp_path)!r}, '--to', {str(tmp_path / 'out')!r}]); "
        "assert not {'tensorflow', 'keras'} & {*sys.modules}"
    )
    assert "index.html" in run_python(code).stdout
    assert sys.modules


@pytest.mark.parametrize("text", ["0", "1,1", ",", "-1", "2000", "a"])
def test_wrong_seeds_are_refused(refuse, text):
    assert "--seeds" in refuse(["train", "CartPole-v1", f"--seeds={text}"])
