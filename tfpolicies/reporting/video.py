"""Writes pictures with a line of captions as MP4 or GIF videos."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tfpolicies.errors import MissingPackageError, UsageError
from tfpolicies.system.atomic import make_folder, replacing

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

ENDINGS = (".mp4", ".gif")

_SMALL = 320  # pixels of the shorter side; smaller pictures are enlarged
_GIF_RATE = 30  # maximum pictures per second of a GIF
_BAR, _LABEL, _VALUE = "#202124", "#9aa0a6", "#ffffff"
_FONT_SIZES = (13, 22)
_WIDTH_PER_FONT_SIZE = 32
_GAP = 0.45  # between a label and its value, and around both, in font sizes


@contextlib.contextmanager
def new_video(paths: Sequence[Path], fps: float) -> Iterator[Video]:
    """Opens a video for pictures; its files appear, complete, at the end without an error.

    Args:
        paths: files to write, which end in .mp4 or .gif; missing folders are created.
        fps: pictures per second.

    Raises:
        UsageError: for another suffix, or an invalid `fps`.
        MissingPackageError: if PyAV or Pillow is not installed.
        OSError: if a file cannot be written.
    """
    strange = [path.name for path in paths if path.suffix.lower() not in ENDINGS]
    if strange:
        raise UsageError(f"A video file must end in {' or '.join(ENDINGS)}, got {strange[0]!r}.")
    if not (math.isfinite(fps) and fps > 0):
        raise UsageError(f"fps must be a number of pictures per second, above 0, got {fps!r}.")
    require_video_packages()
    rate = Fraction(fps).limit_denominator(1000)
    with contextlib.ExitStack() as closing:
        files: list[_Mp4 | _Gif] = []
        for path in paths:
            make_folder(path.parent)
            temporary = closing.enter_context(replacing(path))
            form = _Gif if path.suffix.lower() == ".gif" else _Mp4
            files.append(form(temporary, rate))
            closing.callback(files[-1].close)
        video = Video(files, rate)
        yield video
        video.finish()


def require_video_packages() -> None:
    """Checks that the packages for writing videos are installed.

    Raises:
        MissingPackageError: if they are not.
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
    """Writes pictures to video files, without keeping them in memory.

    Args:
        files: writers of the frames.
        rate: frames per second.
    """

    def __init__(self, files: Sequence[_Mp4 | _Gif], rate: Fraction) -> None:
        self._files = files
        self._rate = rate
        self._canvas: _Canvas | None = None

    def show(self, picture: np.ndarray, figures: Mapping[str, str]) -> None:
        """Adds a picture.

        Small ones are enlarged by an integer factor, so that their pixels stay sharp.

        Args:
            picture: uint8 `[height, width, 3]`, of the same size as the first one.
            captions: captions below it, by label.

        Raises:
            UsageError: if it has another size than the first one.
        """
        if self._canvas is None:
            self._canvas = _Canvas(picture.shape)
        self._last = self._canvas.drawn(picture, figures)
        self.hold(float(1 / self._rate))

    def hold(self, seconds: float) -> None:
        """Repeats the last picture."""
        for _ in range(round(seconds * self._rate)):
            for file in self._files:
                file.add(self._last)

    def finish(self) -> None:
        """Writes the remaining data."""
        for file in self._files:
            file.finish()


class _Canvas:
    """Draws pictures of one size, with a bar of captions below.

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
        """Returns a frame, uint8 `[height, width, 3]`, height and width even."""
        from PIL import Image, ImageDraw

        if picture.shape != self.shape:
            raise UsageError(
                f"The pictures of a video must have one size, but the first has {self.shape} and a "
                f"later one {picture.shape}. Let the environment render in one size."
            )
        image = Image.new("RGB", self.size, _BAR)
        large = Image.fromarray(np.ascontiguousarray(picture))
        image.paste(large.resize((self._width, self._height), Image.Resampling.NEAREST))
        self._write(ImageDraw.Draw(image), figures)
        return np.asarray(image)

    def _write(self, draw: ImageDraw.ImageDraw, figures: Mapping[str, str]) -> None:
        """Draws captions next to each other: the first one left, the last one right."""
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


class _Mp4:
    """Writes an H.264 MP4 file, which all browsers play, frame by frame.

    Args:
        path: the file.
        rate: frames per second.
    """

    def __init__(self, path: Path, rate: Fraction) -> None:
        import av

        muxing = {"movflags": "faststart"}
        self._container = av.open(str(path), "w", format="mp4", options=muxing)
        encoding = {"crf": "20", "preset": "veryfast"}
        self._stream = self._container.add_stream("libx264", rate=rate, options=encoding)
        self._stream.pix_fmt = "yuv420p"

    def add(self, picture: np.ndarray) -> None:
        """Adds a picture, uint8 `[height, width, 3]`."""
        import av

        frame = av.VideoFrame.from_ndarray(picture, "rgb24")
        if not self._stream.codec_context.is_open:
            self._stream.width, self._stream.height = frame.width, frame.height
        self._container.mux(self._stream.encode(frame))

    def finish(self) -> None:
        """Writes the remaining data."""
        self._container.mux(self._stream.encode(None))
        self.close()

    def close(self) -> None:
        self._container.close()


class _Gif:
    """Writes a looping GIF frame by frame; each frame stores its difference from the one before.

    Args:
        path: the file.
        rate: frames per second of the input; at high rates some frames are skipped.
    """

    def __init__(self, path: Path, rate: Fraction) -> None:
        self._each = math.ceil(rate / _GIF_RATE)
        self._rate = rate / self._each
        self._count = 0
        self._file = path.open("wb")
        self._last: Image.Image | None = None

    def add(self, picture: np.ndarray) -> None:
        """Adds a picture, uint8 `[height, width, 3]`."""
        from PIL import GifImagePlugin, Image, ImageChops

        number, skipped = divmod(self._count, self._each)
        self._count += 1
        if skipped:
            return
        image = Image.fromarray(picture)
        box = (0, 0, *image.size)
        if self._last is None:
            header, _ = GifImagePlugin.getheader(_with_palette(image), info={"loop": 0})
            self._file.writelines(header)
        else:
            box = ImageChops.difference(image, self._last).getbbox() or (0, 0, 1, 1)
        start, end = (round(100 * (number + i) / self._rate) for i in (0, 1))  # in 1/100 s
        part, duration = _with_palette(image.crop(box)), 10 * (end - start)
        self._file.writelines(
            GifImagePlugin.getdata(part, box[:2], duration=duration, include_color_table=True)
        )
        self._last = image

    def finish(self) -> None:
        """Writes the end of the file."""
        self._file.write(b";")
        self.close()

    def close(self) -> None:
        self._file.close()


def _with_palette(image: Image.Image) -> Image.Image:
    """Reduces an image to an adaptive palette of at most 256 colours."""
    from PIL import Image

    return image.convert("P", palette=Image.Palette.ADAPTIVE)
