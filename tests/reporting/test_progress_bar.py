import io
import math
import re

import pytest
from rich.console import Console

from tfpolicies.errors import UsageError
from tfpolicies.reporting.progress_display import TrainingProgress, make_summary_table


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_console(width: int = 80) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=width, force_terminal=False), output


@pytest.mark.core
def test_without_a_terminal_there_is_one_line_per_ten_seconds_and_a_last_one() -> None:
    console, output = plain_console()
    clock = Clock()
    with TrainingProgress(100_000, 475.0, console, clock=clock) as progress:
        for clock.now in (0.0, 4.0, 8.0, 12.0, 16.0):
            progress.update(2_000 + int(clock.now) * 1_000, 21.0 + clock.now, 1_000.0)
    assert output.getvalue().splitlines() == [
        "2,000/100,000 steps | 1,000/s | return 21 of 475 | at most 1:38 left",
        "14,000/100,000 steps | 1,000/s | return 33 of 475 | at most 1:26 left",
        "18,000/100,000 steps | 1,000/s | return 37 of 475 | at most 1:22 left",
    ]


def test_what_is_not_known_is_not_shown() -> None:
    console, output = plain_console()
    with TrainingProgress(None, None, console) as progress:
        progress.update(2_048, math.nan, math.nan)
    assert output.getvalue() == "2,048 steps | no episode has ended yet\n"


def test_no_time_is_left_once_the_total_is_passed() -> None:
    console, output = plain_console()
    with TrainingProgress(2_000, None, console) as progress:
        progress.update(2_048, 9.5, 500.0)
    assert output.getvalue() == "2,048/2,000 steps | 500/s | return 9.5 | 0:00 left\n"


def test_a_line_is_never_broken_however_narrow_the_output() -> None:
    console, output = plain_console(width=10)
    with TrainingProgress(100_000, 475.0, console) as progress:
        progress.update(2_000, 21.0, 1_000.0)
    assert len(output.getvalue().splitlines()) == 1


@pytest.mark.core
@pytest.mark.parametrize("total", [100_000, None])
def test_a_terminal_shows_a_bar_and_gets_its_cursor_back(total: int | None) -> None:
    output = io.StringIO()
    console = Console(
        file=output, width=80, force_terminal=True, _environ={"TERM": "xterm-256color"}
    )

    def interrupted() -> None:
        with TrainingProgress(total, 475.0, console) as progress:
            progress.update(12_288, 123.4, 8_412.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    shown = output.getvalue()
    assert "━" in shown
    assert "| 8,412/s | return 123.4 of 475" in shown
    assert ("0:10 left" in shown) == (total is not None)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_bar_says_what_is_done_beside_training_while_it_is_done() -> None:
    output = io.StringIO()
    console = Console(
        file=output, width=90, force_terminal=True, _environ={"TERM": "xterm-256color"}
    )
    with TrainingProgress(100_000, None, console) as progress:
        progress.update(12_288, 123.4, 8_412.0)
        with progress.show_activity("recording a video"):
            assert "return 123.4 | 0:10 left | recording a video" in output.getvalue()
        before = len(output.getvalue())
    assert "recording" not in output.getvalue()[before:]


def test_outside_of_the_context_nothing_is_printed() -> None:
    console, output = plain_console()
    progress = TrainingProgress(10, None, console)
    progress.update(5, 1.0, 1.0)
    assert output.getvalue() == ""


def test_a_total_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="`total_steps` must be at least 1 or None, got 0"):
        TrainingProgress(0, None)


def test_a_summary_folds_long_paths_and_shows_brackets_as_they_are() -> None:
    console, output = plain_console(width=30)
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
    output = io.StringIO()
    console = Console(
        file=output,
        width=240,
        force_terminal=True,
        color_system=None,
        _environ={"TERM": "xterm-256color"},
    )
    with TrainingProgress(total, target, console) as progress:
        progress.update(5, 20.0, 10.0)
        progress.update(10, mean_return, 10.0)
    last = output.getvalue().split("\r")[-1].splitlines()[0]
    bar = re.split(r" 10(?:/20)? steps", last)[0]
    assert 100 * bar.rstrip(" ").count("━") / len(bar) == pytest.approx(percent, abs=2.5)
