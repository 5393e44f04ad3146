"""The picture of a learning curve."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from helpers.marks import telling
from helpers.processes import run_python
from tfpolicies.errors import UsageError
from tfpolicies.reporting.learning_curve import draw_learning_curve

BLUE, ORANGE, GREEN = (28, 109, 208), (232, 113, 10), (30, 142, 62)


def rows(means: list[float], **extra: float) -> list[dict[str, float]]:
    factors = {"mean": 1.0, "min": 0.5, "max": 1.5}
    return [
        {"env_steps": 2048 * (index + 1), "time_s": 0.5 * index}
        | {f"episode_reward_{name}": factor * mean for name, factor in factors.items()}
        | extra
        for index, mean in enumerate(means)
    ]


def pixels(png: Path, colour: tuple[int, int, int]) -> int:
    """Counts the pixels of exactly one colour below the legend."""
    image = np.round(imread(png)[140:, :, :3] * 255).astype(int)
    return int((image == colour).all(axis=-1).sum())


def test_the_picture_shows_curve_target_evaluations_and_a_reached_target(tmp_path: Path) -> None:
    png = tmp_path / "learning_curve.png"
    evaluated = rows([20.0, 100.0, 300.0], **{"evaluation/episode_reward_mean": 200.0})
    draw_learning_curve(evaluated, png, title="PPO on CartPole-v1", target=475)
    assert imread(png).shape[:2] == (825, 1500)
    assert pixels(png, BLUE) > 1000
    assert pixels(png, ORANGE) > 100
    assert pixels(png, GREEN) > 1000
    draw_learning_curve(rows([20.0, 100.0]), png, title="PPO on CartPole-v1")
    assert pixels(png, ORANGE) == pixels(png, GREEN) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["learning_curve.png"]
    below, above = tmp_path / "below.png", tmp_path / "above.png"
    draw_learning_curve(rows([20.0, 470.0, 474.9]), below, title="PPO", target=475)
    draw_learning_curve(rows([20.0, 470.0, 475.0]), above, title="PPO", target=475)
    assert pixels(above, GREEN) > pixels(below, GREEN) + 500


RED, PURPLE = (217, 48, 37), (147, 52, 230)


def test_several_policies_have_curves_beside_a_sum_that_changes(tmp_path: Path) -> None:
    png = tmp_path / "curve.png"
    left, right = ({f"policy/{name}/return_mean": x} for name, x in (("a", 0.5), ("b", -0.5)))
    learner, lowest = {"learner/b/kl": 0.1}, {"policy/a/return_min": -1.0}
    draw_learning_curve(rows([20.0, 100.0], **left, **right), png, title="Game", target=50)
    assert all(pixels(png, colour) > 500 for colour in (RED, PURPLE, BLUE, GREEN))
    draw_learning_curve(rows([0.0, 0.0], **left, **right, **lowest), png, title="Game", target=50)
    assert all(pixels(png, colour) > 500 for colour in (RED, PURPLE))
    assert pixels(png, BLUE) == pixels(png, GREEN) == 0
    many = {f"policy/{i}/return_mean": float(i) for i in range(9)} | left | right | lowest
    draw_learning_curve(rows([0.0, 0.0], **many, **learner), png, title="Game")
    constant = {**many, "evaluation/episode_reward_mean": 0.0}
    with_evaluation = tmp_path / "evaluated.png"
    draw_learning_curve(rows([0.0, 0.0], **constant, **learner), with_evaluation, title="Game")
    assert png.read_bytes() == with_evaluation.read_bytes()
    assert pixels(png, RED) > 500


def test_the_curve_shows_recent_episodes_where_rows_have_them(tmp_path: Path) -> None:
    lagging, old = tmp_path / "lagging.png", tmp_path / "old.png"
    means = {f"recent_returns/{name}": -150.0 for name in ("mean", "min", "max")}
    draw_learning_curve(rows([-600.0, -424.0], **means), lagging, title="SAC", target=-150)
    draw_learning_curve(rows([-150.0, -150.0], **means), old, title="SAC", target=-150)
    assert lagging.read_bytes() == old.read_bytes()
    draw_learning_curve(rows([-600.0, -424.0]), old, title="SAC", target=-150)
    assert lagging.read_bytes() != old.read_bytes()


FEW_RETURNS = [[], [0.0], [21.5], [-7.0], [math.nan], [math.nan] * 2, [math.nan, 21.5]]


@pytest.mark.parametrize("means", [*FEW_RETURNS, [5.0, math.inf]], ids=str)
@pytest.mark.parametrize("target", telling([None, 0.0, 475.0, -200.0], 475.0))
def test_few_points_and_missing_returns_still_make_a_picture(tmp_path, means, target):
    png = tmp_path / "curve.png"
    draw_learning_curve(rows(means), png, title="PPO on $x_Env_v0", target=target)
    returns = [mean for mean in means if math.isfinite(mean)]
    hidden = len(returns) == 1 and target is not None and returns[0] >= target  # by the mark on it
    assert (pixels(png, BLUE) > 0) == (len(returns) > 0 and not hidden)


def test_wrong_input_is_refused_and_the_old_picture_kept(tmp_path: Path) -> None:
    png = tmp_path / "curve.png"
    png.write_bytes(b"old")
    with pytest.raises(UsageError, match=r"`progress_rows\[0\]` must have the number 'env_steps'"):
        draw_learning_curve([{"episode_reward_mean": 1.0}], png, title="PPO")
    with pytest.raises(UsageError, match="`target` must be a finite number or None, got nan"):
        draw_learning_curve(rows([1.0]), png, title="PPO", target=math.nan)
    assert png.read_bytes() == b"old"


DRAW = """
import sys
import tfpolicies.reporting.learning_curve as module
assert "matplotlib" not in sys.modules
module.draw_learning_curve([], sys.argv[1], title="PPO")
print([name for name in ("matplotlib.pyplot", "tensorflow") if name in sys.modules])
"""


def test_matplotlib_is_imported_late_and_without_pyplot(tmp_path: Path) -> None:
    assert run_python(DRAW, tmp_path / "curve.png").stdout == "[]\n"


def test_a_run_that_reads_data_shows_its_loss_unless_it_evaluates(tmp_path):
    losses = [{"env_steps": 100 * i, "learner/p/total_loss": 1.0 / i} for i in range(1, 5)]
    loss, note, returns = (tmp_path / name for name in ("loss.png", "note.png", "returns.png"))
    draw_learning_curve(losses, loss, title="BC on log", from_data=True)
    draw_learning_curve([{"env_steps": 100}], note, title="BC on log", from_data=True)
    evaluated = [{**row, "evaluation/episode_reward_mean": 3.0} for row in losses]
    draw_learning_curve(evaluated, returns, title="BC on log", from_data=True)
    pictures = [path.read_bytes() for path in (loss, note, returns)]
    assert len({*pictures}) == 3
    draw_learning_curve(losses, note, title="BC on log", target=195.0, from_data=True)
    assert note.read_bytes() == pictures[0]  # the target is a return, not a loss
