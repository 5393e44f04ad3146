"""Video files: whole, of even size, sharp, with figures that can be read."""

import itertools
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from tfpolicies.errors import MissingPackageError, UsageError
from tfpolicies.reporting.video import open_video

pytestmark = pytest.mark.core


def decoded(path: Path) -> tuple[np.ndarray, Fraction]:
    """Returns the frames of a file, `[frames, height, width, 3]`, and their rate."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return np.stack(frames), container.streams.video[0].average_rate


def painted(step: int, height: int = 10, width: int = 13) -> np.ndarray:
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:, step % width] = (250, 100, 0)
    return picture


def write(
    *paths: Path, steps: int = 12, fps: float = 10, height: int = 10, width: int = 13
) -> None:
    with open_video(paths, fps) as video:
        for step in range(steps):
            video.add_picture(
                painted(step, height, width), {"step": f"{step}", "return": f"{-step}"}
            )
        video.repeat_last(0.5)


def write_two_sizes(*paths: Path) -> None:
    with open_video(paths, 10) as video:
        video.add_picture(painted(0), {"step": "0"})
        video.add_picture(painted(0, 4, 4), {"step": "1"})


def test_files_have_all_pictures_in_even_sizes_at_the_rate_that_was_asked_for(
    tmp_path: Path,
) -> None:
    write(tmp_path / "new" / "a.mp4", tmp_path / "b.gif")
    for name in ("new/a.mp4", "b.gif"):
        frames, rate = decoded(tmp_path / name)
        assert frames.shape == (12 + 5, 320 + 2 * 13, 416, 3)
        assert rate == 10
        assert frames.shape[1] % 2 == frames.shape[2] % 2 == 0
    with av.open(str(tmp_path / "new" / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
    assert {path.name for path in tmp_path.rglob("*")} == {"new", "a.mp4", "b.gif"}


def test_small_pictures_are_enlarged_sharply_and_large_ones_stay(tmp_path: Path) -> None:
    write(tmp_path / "small.gif", tmp_path / "large.gif")
    frames, _ = decoded(tmp_path / "small.gif")
    for step in range(12):
        left = 32 * step
        np.testing.assert_array_equal(
            frames[step, :320, left : left + 32], [[(250, 100, 0)] * 32] * 320
        )
    write(tmp_path / "large.gif", steps=2, height=401, width=601)
    frames, _ = decoded(tmp_path / "large.gif")
    assert frames.shape[1:3] == (402 + 2 * 19, 602)


@pytest.mark.parametrize("ending", [".mp4", ".gif"])
def test_figures_change_below_the_picture_and_cover_none_of_it(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"a{ending}")
    frames, _ = decoded(tmp_path / f"a{ending}")
    bars = frames[:12, 320:].astype(int)
    assert all((np.abs(a - b).max() > 60) for a, b in itertools.pairwise(bars))
    assert np.abs(frames[12:].astype(int) - frames[11]).max() <= 12  # held
    assert (frames[0, :320, 48:400] < 40).all()


def test_a_gif_of_a_high_rate_leaves_pictures_out_and_keeps_the_time(tmp_path: Path) -> None:
    write(tmp_path / "a.gif", steps=100, fps=50)
    frames, rate = decoded(tmp_path / "a.gif")
    assert (len(frames), rate) == (62 + 1, 25)


def test_an_error_leaves_the_file_that_was_there_before(tmp_path: Path) -> None:
    for name in ("a.mp4", "a.gif"):
        (tmp_path / name).write_text("before")
    with pytest.raises(UsageError, match=r"first has \(10, 13, 3\) and a later one \(4, 4, 3\)"):
        write_two_sizes(tmp_path / "a.mp4", tmp_path / "a.gif")
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.gif"}
    assert (tmp_path / "a.mp4").read_text() == (tmp_path / "a.gif").read_text() == "before"


def test_what_cannot_be_written_is_refused_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"must end in \.mp4 or \.gif, got 'a\.avi'"):
        write(tmp_path / "a.avi")
    with pytest.raises(UsageError, match="above 0, got nan"):
        write(tmp_path / "a.mp4", fps=float("nan"))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tfpolicies\[video\]'"):
        write(tmp_path / "a.mp4")
    assert list(tmp_path.iterdir()) == []
