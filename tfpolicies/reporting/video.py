"""Writes pictures with a line of captions as MP4 or GIF videos."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tfpolicies.errors import MissingPackageError, UsageError
from tfpolicies.system.atomic import make_folder, replace_on_success

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

VIDEO_SUFFIXES = (".mp4", ".gif")

_MIN_SIDE = 320  # pixels of the shorter side; smaller pictures are enlarged
_MAX_GIF_RATE = 30  # maximum pictures per second of a GIF
_BAR_COLOR, _LABEL_COLOR, _VALUE_COLOR = "#202124", "#9aa0a6", "#ffffff"
_FONT_SIZES = (13, 22)
_WIDTH_PER_FONT_SIZE = 32
_MAX_PREVIEW_FRAMES, _PREVIEW_RATE, _PREVIEW_SIDE = 100, 10.0, 320  # pictures, per second, pixels
_GAP = 0.45  # between a label and its value, and around both, in font sizes


@contextlib.contextmanager
def open_video(paths: Sequence[Path], fps: float) -> Iterator[VideoWriter]:
    """Opens a video for pictures; its files appear, complete, at the end without an error.

    Args:
        paths: files to write, which end in .mp4 or .gif; missing folders are created.
        fps: pictures per second.

    Raises:
        UsageError: for another suffix, or an invalid `fps`.
        MissingPackageError: if PyAV or Pillow is not installed.
        OSError: if a file cannot be written.
    """
    unsupported = [path.name for path in paths if path.suffix.lower() not in VIDEO_SUFFIXES]
    if unsupported:
        raise UsageError(
            f"A video file must end in {' or '.join(VIDEO_SUFFIXES)}, got {unsupported[0]!r}."
        )
    if not (math.isfinite(fps) and fps > 0):
        raise UsageError(f"fps must be a number of pictures per second, above 0, got {fps!r}.")
    require_video_packages()
    rate = Fraction(fps).limit_denominator(1000)
    with contextlib.ExitStack() as stack:
        files: list[_Mp4Writer | _GifWriter] = []
        for path in paths:
            make_folder(path.parent)
            temporary = stack.enter_context(replace_on_success(path))
            file_class = _GifWriter if path.suffix.lower() == ".gif" else _Mp4Writer
            files.append(file_class(temporary, rate))
            stack.callback(files[-1].close)
        video = VideoWriter(files, rate)
        yield video
        video.finish()


def require_video_packages() -> None:
    """Checks that the packages for writing videos are installed."""
    try:
        import av  # noqa: F401
        import PIL  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"Videos need the packages av and pillow: {error}. Install them: "
            "pip install 'tfpolicies[video]'."
        ) from error


class Preview(NamedTuple):
    """A small GIF of a video."""

    content: bytes
    width: int  # pixels
    height: int


def make_preview(path: Path) -> Preview:
    """Returns a GIF of at most 100 pictures, 10 per second, whose longer side is 320 pixels.

    Args:
        path: an MP4 file of `open_video`.

    Raises:
        OSError: if it cannot be read.
    """
    import av
    from PIL import Image

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or _PREVIEW_RATE)
        step = max(math.ceil(rate / _PREVIEW_RATE), math.ceil(stream.frames / _MAX_PREVIEW_FRAMES))
        images = [
            frame.to_image()
            for number, frame in enumerate(container.decode(stream))
            if number % step == 0
        ]
    scale = min(1.0, _PREVIEW_SIDE / max(images[0].size))
    width, height = (max(1, round(side * scale)) for side in images[0].size)
    first, *others = (
        _reduce_to_palette(image.resize((width, height), Image.Resampling.BILINEAR))
        for image in images
    )
    file = io.BytesIO()
    duration = max(20, round(1000 * step / rate))  # ms
    first.save(file, "GIF", save_all=True, append_images=others, duration=duration, loop=0)
    return Preview(file.getvalue(), width, height)


class VideoWriter:
    """Writes pictures to video files, without keeping them in memory.

    Args:
        files: writers of the frames.
        rate: frames per second.
    """

    def __init__(self, files: Sequence[_Mp4Writer | _GifWriter], rate: Fraction) -> None:
        self._files = files
        self._rate = rate
        self._canvas: _Canvas | None = None

    def add_picture(self, picture: np.ndarray, captions: Mapping[str, str]) -> None:
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
        self._last_frame = self._canvas.draw_frame(picture, captions)
        self.repeat_last(float(1 / self._rate))

    def repeat_last(self, seconds: float) -> None:
        for _ in range(round(seconds * self._rate)):
            for file in self._files:
                file.add(self._last_frame)

    def finish(self) -> None:
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
        self._scale = max(1, math.ceil(_MIN_SIDE / min(shape[:2])))
        height, width = (side * self._scale for side in shape[:2])
        min_size, max_size = _FONT_SIZES
        self._font_size = min(max(round(width / _WIDTH_PER_FONT_SIZE), min_size), max_size)
        self._font = ImageFont.load_default(self._font_size)
        self._width, self._height = width, height
        bar = 2 * self._font_size
        self.size = (_round_up_to_even(width), _round_up_to_even(height + bar))
        self._middle = (height + self.size[1]) / 2

    def draw_frame(self, picture: np.ndarray, captions: Mapping[str, str]) -> np.ndarray:
        """Returns a frame, uint8 `[height, width, 3]`, height and width even."""
        from PIL import Image, ImageDraw

        if picture.shape != self.shape:
            raise UsageError(
                f"The pictures of a video must have one size, but the first has {self.shape} and a "
                f"later one {picture.shape}. Let the environment render in one size."
            )
        image = Image.new("RGB", self.size, _BAR_COLOR)
        large = Image.fromarray(np.ascontiguousarray(picture))
        image.paste(large.resize((self._width, self._height), Image.Resampling.NEAREST))
        self._draw_captions(ImageDraw.Draw(image), captions)
        return np.asarray(image)

    def _draw_captions(self, draw: ImageDraw.ImageDraw, captions: Mapping[str, str]) -> None:
        """Draws captions next to each other: the first one left, the last one right."""
        gap = _GAP * self._font_size
        for i, (label, value) in enumerate(captions.items()):
            width = self._font.getlength(label) + gap + self._font.getlength(value)
            share = i / max(1, len(captions) - 1)
            x = 2 * gap + share * (self._width - 4 * gap - width)
            draw.text((x, self._middle), label, _LABEL_COLOR, self._font, "lm")
            x += self._font.getlength(label) + gap
            draw.text((x, self._middle), value, _VALUE_COLOR, self._font, "lm")


def _round_up_to_even(side: int) -> int:
    return side + side % 2


class _Mp4Writer:
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


class _GifWriter:
    """Writes a looping GIF frame by frame; each frame stores its difference from the one before.

    Args:
        path: the file.
        rate: frames per second of the input; at high rates some frames are skipped.
    """

    def __init__(self, path: Path, rate: Fraction) -> None:
        self._frames_per_picture = math.ceil(rate / _MAX_GIF_RATE)
        self._rate = rate / self._frames_per_picture
        self._count = 0
        self._file = path.open("wb")
        self._last: Image.Image | None = None

    def add(self, picture: np.ndarray) -> None:
        """Adds a picture, uint8 `[height, width, 3]`."""
        from PIL import GifImagePlugin, Image, ImageChops

        number, skipped = divmod(self._count, self._frames_per_picture)
        self._count += 1
        if skipped:
            return
        image = Image.fromarray(picture)
        box = (0, 0, *image.size)
        if self._last is None:
            header, _ = GifImagePlugin.getheader(_reduce_to_palette(image), info={"loop": 0})
            self._file.writelines(header)
        else:
            box = ImageChops.difference(image, self._last).getbbox() or (0, 0, 1, 1)
        start, end = (round(100 * (number + i) / self._rate) for i in (0, 1))  # in 1/100 s
        part, duration = _reduce_to_palette(image.crop(box)), 10 * (end - start)
        self._file.writelines(
            GifImagePlugin.getdata(part, box[:2], duration=duration, include_color_table=True)
        )
        self._last = image

    def finish(self) -> None:
        self._file.write(b";")
        self.close()

    def close(self) -> None:
        self._file.close()


def _reduce_to_palette(image: Image.Image) -> Image.Image:
    """Reduces an image to an adaptive palette of at most 256 colours."""
    from PIL import Image

    return image.convert("P", palette=Image.Palette.ADAPTIVE)
