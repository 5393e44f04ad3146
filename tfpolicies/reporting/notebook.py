"""Output in Jupyter notebooks: a progress bar, pictures and videos."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MAX_EMBEDDED_BYTES = 16 << 20  # bytes of a file that becomes part of a notebook
_VIDEO_TYPES = {".mp4": "video/mp4", ".webm": "video/webm"}
_PICTURE_TYPES = {".png": "image/png", ".gif": "image/gif"}


class NotebookBar:
    """A progress bar in the output of a cell, which is updated in place.

    It needs IPython, which every notebook has, but no widgets.
    """

    def __init__(self) -> None:
        self._display: Any = None  # the handle of IPython

    def show(self, share: float | None, status: str) -> None:
        """Shows the progress.

        Args:
            share: the part that is done, in [0, 1]; None if it is unknown.
            status: a text next to the bar.
        """
        value = "" if share is None else f' value="{share:.4f}"'
        bar = f'<progress max="1"{value} aria-label="Training" style="width: 16em"></progress>'
        content = {"text/html": f"{bar} {html.escape(status)}", "text/plain": status}
        if self._display is None:
            from IPython.display import display

            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)


def make_media_html(paths: Sequence[Path], description: str) -> str:
    """Returns elements that show pictures and videos; they contain the files.

    Of a video that is there in several formats, the first one is shown. Files that are missing,
    large or of another type are only named.

    Args:
        paths: of the files.
        description: of the content, for readers who cannot see it.
    """
    elements: dict[str, str] = {}
    for path in paths:
        elements.setdefault(path.stem, _make_element(path, html.escape(description)))
    return "".join(elements.values())


def _make_element(path: Path, description: str) -> str:
    video, picture = (types.get(path.suffix.lower()) for types in (_VIDEO_TYPES, _PICTURE_TYPES))
    is_embedded = path.is_file() and path.stat().st_size <= _MAX_EMBEDDED_BYTES
    if not is_embedded or not (video or picture):
        return f"<p>{html.escape(str(path))}</p>"
    data = base64.b64encode(path.read_bytes()).decode()
    if video:
        source = f"data:{video};base64,{data}"
        return f'<video controls loop muted aria-label="{description}" src="{source}"></video>'
    return f'<img alt="{description}" src="data:{picture};base64,{data}">'
