"""Output in notebooks."""

import base64
import math
import sys
import types

import pytest
from rich.console import Console

from tfpolicies.algorithms.episode_playback import Recording
from tfpolicies.reporting.notebook import make_media_html
from tfpolicies.reporting.progress_display import TrainingProgress


class Display:
    """Stands in for a cell: a list of the contents that it showed, one after the other."""

    def __init__(self):
        self.contents = []

    def __call__(self, content, *, raw, display_id):
        assert (raw, display_id) == (True, True)
        self.contents.append(content)
        return self

    def update(self, content, *, raw):
        self.contents.append(content)


@pytest.fixture
def display(monkeypatch):
    result = Display()
    module = types.ModuleType("IPython.display")
    module.display = result
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return result


def test_a_bar_in_a_notebook_is_updated_in_place_at_most_four_times_a_second(display):
    time = [0.0]
    console = Console(force_jupyter=True, force_terminal=False)
    with TrainingProgress(1000, None, console, clock=lambda: time[0]) as progress:
        progress.update(100, math.nan, 50.0)
        time[0] = 0.1
        progress.update(200, 3.0, 50.0)
        time[0] = 0.25
        progress.update(250, 4.0, 50.0)
        progress.update(500, 5.0, 50.0)
    assert [content["text/plain"].partition(" | ")[0] for content in display.contents] == [
        *("100/1,000 steps", "250/1,000 steps", "500/1,000 steps")
    ]
    assert 'value="0.2500"' in display.contents[1]["text/html"]


def test_files_become_elements_that_contain_them(tmp_path):
    picture, video = tmp_path / "a.png", tmp_path / "b.mp4"
    picture.write_bytes(b"picture")
    video.write_bytes(b"video")
    html = make_media_html([picture, video, tmp_path / "b.gif"], 'a "film"')
    data = base64.b64encode(b"picture").decode()
    assert f'<img alt="a &quot;film&quot;" src="data:image/png;base64,{data}">' in html
    assert html.count("data:video/mp4;base64,") == 1
    assert "b.gif" not in html


def test_missing_files_and_files_of_other_types_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    html = make_media_html([tmp_path / "a.txt", tmp_path / "<b>.png"], "")
    assert "a.txt</p>" in html
    assert "&lt;b&gt;.png</p>" in html


def test_a_recording_shows_its_video_and_returns(tmp_path):
    path = tmp_path / "episode.mp4"
    path.write_bytes(b"video")
    html = Recording([path], [12.5], [40])._repr_html_()
    assert 'aria-label="Video of episodes with the returns 12.5"' in html
