"""Files that never change and are named by their content, so that folders can share them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from tfpolicies.errors import CheckpointError
from tfpolicies.storage.manifest import sha256
from tfpolicies.system.atomic import replace_on_success, write_atomically
from tfpolicies.system.regular_files import get_size, open_regular, read_content


class ContentFile(NamedTuple):
    """A file, with the checksum and the size of its content."""

    path: Path
    sha256: str
    size: int

    @property
    def exists(self) -> bool:
        """True if there is a file of this name and size."""
        try:
            return self.path.stat().st_size == self.size
        except OSError:
            return False

    def read(self) -> bytes:
        """Returns the content.

        Raises:
            CheckpointError: if it cannot be read, or is damaged.
        """
        try:
            with open_regular(self.path) as file:
                content = read_content(file, self.size) if get_size(file) == self.size else b""
        except OSError as error:
            raise CheckpointError(f"{str(self.path)!r} cannot be read: {error}.") from error
        if sha256(content) != self.sha256:
            raise CheckpointError(
                f"{str(self.path)!r} is damaged: its size or its SHA-256 differs from the one in "
                "the manifest. Use another checkpoint, or copy the file again."
            )
        return content

    def link_into(self, folder: Path) -> ContentFile:
        """Returns the file of the same name in a folder: a hard link, or a copy on another disk.

        Raises:
            CheckpointError: if the file is damaged and has to be copied.
            OSError: if it cannot be written.
        """
        target = self._replace(path=folder / self.path.name)
        if not target.exists:
            try:
                with replace_on_success(target.path) as temporary:
                    os.link(self.path, temporary)
            except OSError:  # on another disk, or one without hard links
                write_atomically(target.path, self.read())
        return target
