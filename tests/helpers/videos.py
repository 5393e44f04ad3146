"""Video files as arrays."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def decode_video(path: Path) -> tuple[np.ndarray, Fraction]:
    """Returns the frames of a file, `[frames, height, width, 3]`, and their rate."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return np.stack(frames), container.streams.video[0].average_rate
