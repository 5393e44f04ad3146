"""Video files: whole, of even size, sharp, with figures that can be read."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest

from helpers.videos import decode_video
from tfpolicies.errors import MissingPackageError, UsageError
from tfpolicies.reporting.video import open_video

pytestmark = pytest.mark.core


def paint(step: int, height: int = 10, width: int = 13) -> np.ndarray:
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:, step % width] = (250, 100, 0)
    return picture


def write(
    *paths: Path, sizes: Sequence[tuple[int, int]] = [(10, 13)] * 12, fps: float = 10
) -> None:
    with open_video(paths, fps) as video:
        for step, size in enumerate(sizes):
            video.add_picture(paint(step, *size), {"step": f"{step}", "return": f"{-step}"})
        video.repeat_last(0.5)


def test_files_have_all_pictures_in_even_sizes_at_the_wanted_rate(tmp_path: Path) -> None:
    write(tmp_path / "new" / "a.mp4", tmp_path / "b.gif")
    for name in ("new/a.mp4", "b.gif"):
        frames, rate = decode_video(tmp_path / name)
        assert frames.shape == (12 + 5, 320 + 2 * 13, 416, 3)
        assert rate == 10
        assert frames.shape[1] % 2 == frames.shape[2] % 2 == 0
    with av.open(str(tmp_path / "new" / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
    assert {path.name for path in tmp_path.rglob("*")} == {"new", "a.mp4", "b.gif"}


def test_small_pictures_are_enlarged_sharply_and_large_ones_stay(tmp_path: Path) -> None:
    write(tmp_path / "small.gif", tmp_path / "large.gif")
    frames, _ = decode_video(tmp_path / "small.gif")
    for step in range(12):
        enlarged = frames[step, :320, 32 * step : 32 * step + 32]
        np.testing.assert_array_equal(enlarged, [[(250, 100, 0)] * 32] * 320)
    write(tmp_path / "large.gif", sizes=[(401, 601)] * 2)
    frames, _ = decode_video(tmp_path / "large.gif")
    assert frames.shape[1:3] == (402 + 2 * 19, 602)


@pytest.mark.parametrize("ending", [".mp4", ".gif"])
def test_figures_change_below_the_picture_and_cover_none_of_it(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"a{ending}")
    frames, _ = decode_video(tmp_path / f"a{ending}")
    bars = frames[:12, 320:].astype(int)
    assert all((np.abs(a - b).max() > 60) for a, b in itertools.pairwise(bars))
    assert np.abs(frames[12:].astype(int) - frames[11]).max() <= 12  # held
    assert (frames[0, :320, 48:400] < 40).all()


def test_a_gif_of_a_high_rate_leaves_pictures_out_and_keeps_the_time(tmp_path: Path) -> None:
    write(tmp_path / "a.gif", sizes=[(10, 13)] * 100, fps=50)
    frames, rate = decode_video(tmp_path / "a.gif")
    assert (len(frames), rate) == (62 + 1, 25)


def test_an_error_leaves_the_file_that_was_there_before(tmp_path: Path) -> None:
    for name in ("a.mp4", "a.gif"):
        (tmp_path / name).write_text("before")
    with pytest.raises(UsageError, match=r"first has \(10, 13, 3\) and a later one \(4, 4, 3\)"):
        write(tmp_path / "a.mp4", tmp_path / "a.gif", sizes=[(10, 13), (4, 4)])
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.gif"}
    assert (tmp_path / "a.mp4").read_text() == (tmp_path / "a.gif").read_text() == "before"


def test_files_that_cannot_be_written_are_refused_with_the_next_step(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"must end in \.mp4 or \.gif, got 'a\.avi'"):
        write(tmp_path / "a.avi")
    with pytest.raises(UsageError, match="above 0, got nan"):
        write(tmp_path / "a.mp4", fps=float("nan"))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tfpolicies\[video\]'"):
        write(tmp_path / "a.mp4")
    assert list(tmp_path.iterdir()) == []
