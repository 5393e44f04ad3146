"""The progress of training on a terminal and elsewhere, and the summary table."""

import io
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tfpolicies.errors import UsageError
from tfpolicies.reporting.progress_display import TrainingProgress, make_summary_table


def make_console(width: int = 80, **options: Any) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    options = {"force_terminal": False, "_environ": {"TERM": "xterm-256color"}, **options}
    return Console(file=output, width=width, **options), output


def print_line(total: int | None, target: float | None, *progress: Any, **options: Any) -> str:
    console, output = make_console(**options)
    with TrainingProgress(total, target, console) as bar:
        bar.update(*progress)
    return output.getvalue()


@pytest.mark.core
def test_without_a_terminal_there_is_one_line_per_ten_seconds_and_a_last_one() -> None:
    console, output = make_console()
    clock = SimpleNamespace(now=0.0)
    with TrainingProgress(100_000, 475.0, console, clock=lambda: clock.now) as progress:
        for clock.now in (0.0, 4.0, 8.0, 12.0, 16.0):
            progress.update(2_000 + int(clock.now) * 1_000, 21.0 + clock.now, 1_000.0)
    assert output.getvalue().splitlines() == [
        "2,000/100,000 steps | 1,000/s | return 21 of 475 | at most 1:38 left",
        "14,000/100,000 steps | 1,000/s | return 33 of 475 | at most 1:26 left",
        "18,000/100,000 steps | 1,000/s | return 37 of 475 | at most 1:22 left",
    ]


def test_a_line_shows_what_is_known_and_is_never_broken() -> None:
    line = print_line(None, None, 2_048, math.nan, math.nan)
    assert line == "2,048 steps | no episode has ended yet\n"
    line = print_line(2_000, None, 2_048, 9.5, 500.0)  # no time is left
    assert line == "2,048/2,000 steps | 500/s | return 9.5 | 0:00 left\n"
    assert print_line(100_000, 475.0, 2_000, 21.0, 1_000.0, width=10).count("\n") == 1


@pytest.mark.core
@pytest.mark.parametrize("total", [100_000, None])
def test_a_terminal_shows_a_bar_and_gets_its_cursor_back(total: int | None) -> None:
    console, output = make_console(force_terminal=True)

    def interrupt() -> None:
        with TrainingProgress(total, 475.0, console) as progress:
            progress.update(12_288, 123.4, 8_412.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    text = output.getvalue()
    assert "━" in text
    assert "| 8,412/s | return 123.4 of 475" in text
    assert ("0:10 left" in text) == (total is not None)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_bar_names_an_activity_besides_training_while_it_runs() -> None:
    console, output = make_console(90, force_terminal=True)
    with TrainingProgress(100_000, None, console) as progress:
        progress.update(12_288, 123.4, 8_412.0)
        with progress.show_activity("recording a video"):
            assert "return 123.4 | 0:10 left | recording a video" in output.getvalue()
        before = len(output.getvalue())
    assert "recording" not in output.getvalue()[before:]


def test_nothing_is_printed_outside_of_the_context_and_a_total_is_above_zero() -> None:
    console, output = make_console()
    progress = TrainingProgress(10, None, console)
    progress.update(5, 1.0, 1.0)
    assert output.getvalue() == ""
    with pytest.raises(UsageError, match="`total_steps` must be at least 1 or None, got 0"):
        TrainingProgress(0, None)


def test_a_summary_folds_long_paths_and_shows_brackets_as_they_are() -> None:
    console, output = make_console(width=30)
    path = "runs/ppo-CartPole-v1/[export]/policy.onnx"
    console.print(make_summary_table("Done [1]", {"steps": 61_440, "onnx": path, "solved": True}))
    title, *lines = [line.rstrip() for line in output.getvalue().splitlines()]
    assert title == "Done [1]"
    assert lines[0] == "steps   61,440"
    assert "".join(line[8:] for line in lines[1:-1]) == path
    assert lines[-1] == "solved  True"


@pytest.mark.parametrize(
    ("target", "total", "mean_return", "percent"),
    [
        (100.0, 20, 20.0, 0),  # half of the steps, and nothing of the way to the return
        (100.0, 20, 60.0, 50),
        (100.0, None, 100.0, 100),
        (None, 20, 60.0, 50),
    ],
)
def test_the_bar_shows_the_way_to_the_target_and_without_one_to_the_last_step(
    target: float | None, total: int | None, mean_return: float, percent: int
) -> None:
    console, output = make_console(240, force_terminal=True, color_system=None)
    with TrainingProgress(total, target, console) as progress:
        progress.update(5, 20.0, 10.0)
        progress.update(10, mean_return, 10.0)
    last = output.getvalue().split("\r")[-1].splitlines()[0]
    bar = re.split(r" 10(?:/20)? steps", last)[0]
    assert 100 * bar.rstrip(" ").count("━") / len(bar) == pytest.approx(percent, abs=2.5)


def test_a_run_that_reads_data_shows_rows_and_its_loss():
    console = Console(file=io.StringIO(), width=200)
    with TrainingProgress(2_000, None, console, unit="rows") as progress:
        progress.update(1_000, math.nan, 500.0, "epoch 1.0 of 2.0 | loss 0.5")
    line = console.file.getvalue().strip()
    assert line == "1,000/2,000 rows | 500/s | epoch 1.0 of 2.0 | loss 0.5 | 0:02 left"
