"""Segments: constant rows in array files that checkpoints share.

A checkpoint lists its segments by content, like its array files. The owner of the rows keeps the
`SegmentFileRef` of a segment: once it is written, the next checkpoint gets the same file, by a hard
link if it is in another folder, and nothing is packed or hashed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.errors import CheckpointError
from tfpolicies.storage.content_file import ContentFile
from tfpolicies.storage.hdf5_bytes import check_arrays, pack_arrays, unpack_arrays
from tfpolicies.storage.manifest import SEGMENT, sha256
from tfpolicies.system.atomic import write_atomically


@dataclass(eq=False)
class SegmentFileRef:
    """Reference to the file to which a segment was last written.

    Attributes:
        file: None if it was not written yet.
    """

    file: ContentFile | None = None

    @property
    def exists(self) -> bool:
        return self.file is not None and self.file.exists


class Segment:
    """Rows that never change.

    Args:
        arrays: arrays of the same length, by name; None if they are only in a file.
        file_ref: reference to the file of the rows.

    Raises:
        CheckpointError: if an array holds something else than numbers.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray] | None, file_ref: SegmentFileRef | None = None
    ) -> None:
        if arrays is not None:
            check_arrays(SEGMENT, arrays)
        self._arrays = arrays
        self.file_ref = file_ref or SegmentFileRef()

    def __reduce__(self) -> tuple[Any, ...]:
        return Segment, (dict(self.get_arrays()),)

    def get_arrays(self) -> Mapping[str, np.ndarray]:
        if self._arrays is not None:
            return self._arrays
        file = self._get_file()
        try:
            return unpack_arrays(file.read())
        except CheckpointError as error:
            raise CheckpointError(f"A segment of replayed rows is lost: {error}") from error

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the file into a folder, unless it is there; returns its entry in a manifest.

        Raises:
            CheckpointError: if the rows are only in a file, which is missing or damaged.
            OSError: if it cannot be written.
        """
        if not self.file_ref.exists and self._arrays is not None:
            image = pack_arrays(self._arrays)
            digest = sha256(image)
            path = folder / make_segment_name(digest)
            write_atomically(path, image)
            self.file_ref.file = ContentFile(path, digest, len(image))
        target = self.file_ref.file = self._get_file().link_into(folder)
        return {"file": target.path.name, "sha256": target.sha256, "bytes": target.size}

    def _get_file(self) -> ContentFile:
        if self.file_ref.file is None:
            raise CheckpointError("A segment has neither rows nor a file.")
        return self.file_ref.file


def make_segment_name(digest: str) -> str:
    """Returns the name of a segment's file.

    >>> make_segment_name("03b1e51cc59b8a0f66")
    'segment-03b1e51cc59b8a0f.h5'
    """
    return f"{SEGMENT}-{digest[:16]}.h5"
