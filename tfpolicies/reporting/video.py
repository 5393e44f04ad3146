"""Videos of pictures with a line of figures under each, as MP4 or GIF."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfpolicies.errors import MissingPackageError, UsageError
from tfpolicies.system.atomic import make_folder, remove_file, replacing, temporary_beside

if TYPE_CHECKING:
    import av
    from PIL import ImageDraw

ENDINGS = (".mp4", ".gif")

_SMALL = 320  # pixels of the shorter side, up to which pictures are enlarged
_GIF_RATE = 30  # pictures a second of a GIF, at most
_BAR, _LABEL, _VALUE = "#202124", "#9aa0a6", "#ffffff"
_FONT_SIZES = (13, 22)
_WIDTH_PER_FONT_SIZE = 32
_GAP = 0.45  # between a label and its value, and around both, in sizes of the font


@contextlib.contextmanager
def new_video(paths: Sequence[Path], fps: float) -> Iterator[Video]:
    """Gives a video to show pictures in; its files are there, whole, when all went well.

    Args:
        paths: files to write, which end in .mp4 or .gif; missing folders are made.
        fps: pictures a second.

    Raises:
        UsageError: for another ending, or if `fps` is none.
        MissingPackageError: if PyAV or Pillow is not installed.
        OSError: if a file cannot be written.
    """
    strange = [path.name for path in paths if path.suffix.lower() not in ENDINGS]
    if strange:
        raise UsageError(f"A video ends in {' or '.join(ENDINGS)}, got {strange[0]!r}.")
    if not (math.isfinite(fps) and fps > 0):
        raise UsageError(f"fps must be a number of pictures a second, above 0, got {fps!r}.")
    require_video_packages()
    rate = Fraction(fps).limit_denominator(1000)
    with contextlib.ExitStack() as closing:
        files: list[_Film | _Gif] = []
        for path in paths:
            make_folder(path.parent)
            temporary = closing.enter_context(replacing(path))
            is_gif = path.suffix.lower() == ".gif"
            files.append(_Gif(temporary, rate) if is_gif else _Film(temporary, _MP4, rate))
            closing.callback(files[-1].close)
        video = Video(files, rate)
        yield video
        video.finish()


def require_video_packages() -> None:
    """Checks that there is what writes videos.

    Raises:
        MissingPackageError: if there is not.
    """
    try:
        import av  # noqa: F401
        import PIL  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"Videos need the packages av and pillow: {error}. Install them: "
            "pip install 'tfpolicies[video]'."
        ) from error


class Video:
    """Pictures on their way into files; none of them is kept.

    Args:
        files: take frames.
        rate: frames a second.
    """

    def __init__(self, files: Sequence[_Film | _Gif], rate: Fraction) -> None:
        self._files = files
        self._rate = rate
        self._canvas: _Canvas | None = None
        self._last: Any = None

    def show(self, picture: np.ndarray, figures: Mapping[str, str]) -> None:
        """Adds a picture.

        Small ones are enlarged by whole numbers, so that their pixels stay sharp.

        Args:
            picture: uint8 `[height, width, 3]`, of the same size as the first one.
            figures: what is written under it, by label.

        Raises:
            UsageError: if it has another size.
        """
        if self._canvas is None:
            self._canvas = _Canvas(picture.shape)
        self._last = self._canvas.drawn(picture, figures)
        self._add_last()

    def hold(self, seconds: float) -> None:
        """Goes on showing the last picture."""
        for _ in range(round(seconds * self._rate)):
            self._add_last()

    def _add_last(self) -> None:
        for file in self._files:
            file.add(self._last)

    def finish(self) -> None:
        """Writes what is left to write."""
        for file in self._files:
            file.finish()


class _Canvas:
    """Where pictures of one size are drawn, with a bar for figures below.

    Args:
        shape: of the pictures.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        from PIL import ImageFont

        self.shape = shape
        self._scale = max(1, math.ceil(_SMALL / min(shape[:2])))
        height, width = (side * self._scale for side in shape[:2])
        least, most = _FONT_SIZES
        self._font_size = min(max(round(width / _WIDTH_PER_FONT_SIZE), least), most)
        self._font = ImageFont.load_default(self._font_size)
        self._width, self._height = width, height
        bar = 2 * self._font_size
        self.size = (_even(width), _even(height + bar))
        self._middle = (height + self.size[1]) / 2

    def drawn(self, picture: np.ndarray, figures: Mapping[str, str]) -> np.ndarray:
        """Returns a picture with its figures, uint8 `[height, width, 3]`, both even."""
        from PIL import Image, ImageDraw

        if picture.shape != self.shape:
            raise UsageError(
                f"The pictures of a video have one size, but after {self.shape} came "
                f"{picture.shape}. Let the environment render in one size."
            )
        image = Image.new("RGB", self.size, _BAR)
        large = Image.fromarray(np.ascontiguousarray(picture))
        image.paste(large.resize((self._width, self._height), Image.Resampling.NEAREST))
        self._write(ImageDraw.Draw(image), figures)
        return np.asarray(image)

    def _write(self, draw: ImageDraw.ImageDraw, figures: Mapping[str, str]) -> None:
        """Writes figures next to each other: the first one left, the last one right."""
        gap = _GAP * self._font_size
        for i, (label, value) in enumerate(figures.items()):
            width = self._font.getlength(label) + gap + self._font.getlength(value)
            share = i / max(1, len(figures) - 1)
            x = 2 * gap + share * (self._width - 4 * gap - width)
            draw.text((x, self._middle), label, _LABEL, self._font, "lm")
            x += self._font.getlength(label) + gap
            draw.text((x, self._middle), value, _VALUE, self._font, "lm")


def _even(side: int) -> int:
    return side + side % 2


class _Kind(NamedTuple):
    """How frames are written."""

    container: str
    codec: str
    pixels: str
    options: Mapping[str, str]
    muxing: Mapping[str, str] = {}


_MP4 = _Kind(
    "mp4",
    "libx264",
    "yuv420p",  # what all browsers play
    {"crf": "20", "preset": "veryfast"},
    {"movflags": "faststart"},
)
_LOSSLESS = _Kind("matroska", "libx264rgb", "rgb24", {"qp": "0", "preset": "ultrafast"})
_GIF = _Kind("gif", "gif", "pal8", {}, {"loop": "0"})  # for ever
_CLOCK = Fraction(1, 1000)


class _Film:
    """A file of video, written frame by frame.

    Args:
        path: the file.
        kind: of video.
        rate: frames a second.
    """

    def __init__(self, path: Path, kind: _Kind, rate: Fraction) -> None:
        import av

        options = dict(kind.muxing)
        self._kind = kind
        self._rate = rate
        self._stream: Any = None
        self._container = av.open(str(path), "w", format=kind.container, options=options)

    def add(self, picture: np.ndarray) -> None:
        """Adds a picture, uint8 `[height, width, 3]`."""
        import av

        self.add_frame(av.VideoFrame.from_ndarray(picture, "rgb24"))

    def add_frame(self, frame: av.VideoFrame) -> None:
        """Adds a frame of PyAV's."""
        if self._stream is None:
            kind = self._kind
            self._stream = self._container.add_stream(
                kind.codec, rate=self._rate, options=dict(kind.options)
            )
            self._stream.width, self._stream.height = frame.width, frame.height
            self._stream.pix_fmt = kind.pixels
        self._container.mux(self._stream.encode(frame))

    def finish(self) -> None:
        """Writes what is left to write."""
        self._container.mux(self._stream.encode(None))
        self.close()

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._container.close()


class _Gif:
    """A GIF that repeats, with one palette of all its frames, which are kept in a file until then.

    Args:
        path: the file.
        rate: frames a second of what is added; of high rates each second or third one, say, stays.
    """

    def __init__(self, path: Path, rate: Fraction) -> None:
        self._path = path
        self._each = math.ceil(rate / _GIF_RATE)
        self._rate = rate / self._each
        self._count = 0
        self._kept = temporary_beside(path.with_name("frames"))
        self._frames = _Film(self._kept, _LOSSLESS, self._rate)

    def add(self, picture: np.ndarray) -> None:
        """Adds a picture, uint8 `[height, width, 3]`."""
        if self._count % self._each == 0:
            self._frames.add(picture)
        self._count += 1

    def finish(self) -> None:
        """Chooses the palette and writes the GIF."""
        self._frames.finish()
        palette = _Filter("palettegen", [self._first()])
        for frame in self._stored():
            palette.push(frame)
        (colours,) = palette.end()
        coloured = _Filter("paletteuse", [self._first(), colours])
        coloured.push(colours, 1)
        gif = _Film(self._path, _GIF, self._rate)
        try:
            for frame in self._stored():
                coloured.push(frame)
                for done in coloured.ready():
                    gif.add_frame(done)
            for done in coloured.end():
                gif.add_frame(done)
            gif.finish()
        finally:
            gif.close()

    def _stored(self) -> Iterator[Any]:
        import av

        with av.open(str(self._kept)) as container:
            yield from container.decode(video=0)

    def _first(self) -> Any:
        return next(self._stored())

    def close(self) -> None:
        """Closes the file of frames and removes it; may be called again."""
        self._frames.close()
        remove_file(self._kept)


class _Filter:
    """A filter of FFmpeg's.

    Args:
        name: of the filter.
        likes: a frame like those of each input.
    """

    def __init__(self, name: str, likes: Sequence[Any]) -> None:
        from av.filter import Graph

        self._graph = Graph()
        made, out = self._graph.add(name), self._graph.add("buffersink")
        self._inputs = [
            self._graph.add_buffer(
                width=like.width,
                height=like.height,
                format=like.format.name,
                time_base=like.time_base or _CLOCK,
            )
            for like in likes
        ]
        for i, each in enumerate(self._inputs):
            each.link_to(made, 0, i)
        made.link_to(out)
        self._graph.configure()

    def push(self, frame: av.VideoFrame, to: int = 0) -> None:
        """Gives a frame to an input."""
        self._inputs[to].push(frame)

    def ready(self) -> Iterator[Any]:
        """Gives the frames that have come out."""
        from av.error import BlockingIOError, EOFError

        with contextlib.suppress(BlockingIOError, EOFError):
            while True:
                yield self._graph.pull()

    def end(self) -> list[Any]:
        """Ends all inputs; returns the frames that still come out."""
        for each in self._inputs:
            each.push(None)
        return list(self.ready())
