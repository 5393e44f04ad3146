"""Videos of pictures with a line of figures under each, as MP4 or GIF."""

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

    def __init__(self, files: Sequence[_Mp4 | _Gif], rate: Fraction) -> None:
        self._files = files
        self._rate = rate
        self._canvas: _Canvas | None = None

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
        self.hold(float(1 / self._rate))

    def hold(self, seconds: float) -> None:
        """Goes on showing the last picture."""
        for _ in range(round(seconds * self._rate)):
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


class _Mp4:
    """A file of video that all browsers play, written frame by frame.

    Args:
        path: the file.
        rate: frames a second.
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
        """Writes what is left to write."""
        self._container.mux(self._stream.encode(None))
        self.close()

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._container.close()


class _Gif:
    """A GIF that repeats, written frame by frame: of each, what differs from the one before.

    Args:
        path: the file.
        rate: frames a second of what is added; of high rates each second or third one, say, stays.
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
        """Closes the file; may be called again."""
        self._file.close()


def _with_palette(image: Image.Image) -> Image.Image:
    """Returns an image with at most 256 colours, those that fit it best."""
    from PIL import Image

    return image.convert("P", palette=Image.Palette.ADAPTIVE)
