"""The memory budget for requests that are being received, shared by HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable

from tfpolicies.errors import RequestError

BUDGET_FACTOR = 8
"""The budget of all requests as a multiple of the largest body."""

UNCOUNTED_BYTES = 65_536
"""Size up to which a body is not counted: each connection buffers this much anyway."""


class Upload:
    """A request that is being received; a context manager, which frees its bytes at the end.

    Attributes:
        size: the bytes that are counted for it.
        can_be_aborted: whether it may be aborted when others need its bytes.
        abort: aborts it.

    Args:
        budget: the budget.
    """

    __slots__ = ("_budget", "abort", "can_be_aborted", "size")

    def __init__(self, budget: UploadBudget) -> None:
        self._budget = budget
        self.size, self.can_be_aborted = 0, True
        self.abort: Callable[[], object] = bool

    def add_bytes(self, size: int) -> None:
        """Counts more bytes; if the budget is exceeded, the largest request is aborted.

        Raises:
            RequestError: if this is the largest, or no other one can be aborted.
        """
        self._budget.add(self, size)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *error: object) -> None:
        if self.size:
            self._budget.remove(self)


class UploadBudget:
    """All requests that are being received, with a limit on their total size.

    Args:
        max_body: bytes of one request.
    """

    def __init__(self, max_body: int) -> None:
        self._max_bytes = BUDGET_FACTOR * max_body
        self._used_bytes = 0
        self._uploads: dict[Upload, None] = {}  # in the order of their beginning

    def start_upload(self) -> Upload:
        """Returns a new request with a size of 0."""
        return Upload(self)

    def add(self, upload: Upload, size: int) -> None:
        """Counts more bytes of a request; see `Upload.grow`."""
        upload.size += size
        self._used_bytes += size
        self._uploads[upload] = None
        while self._used_bytes > self._max_bytes:
            candidates = [other for other in self._uploads if other.can_be_aborted]
            largest = max(candidates, key=lambda other: other.size, default=upload)
            if largest is upload:
                raise RequestError(
                    f"Incomplete requests take {self._used_bytes} bytes, but may take at most "
                    f"{self._max_bytes} ({BUDGET_FACTOR} times --max-body). Try again later.",
                    503,
                )
            self.remove(largest)
            largest.abort()

    def remove(self, upload: Upload) -> None:
        if self._uploads.pop(upload, upload) is None:
            self._used_bytes -= upload.size
            upload.size = 0
