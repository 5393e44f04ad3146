"""The memory budget for requests that are being received, shared by HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable

from tfpolicies.errors import RequestError

TIMES = 8
"""The budget of all requests as a multiple of the largest body."""

SMALL = 65_536
"""Size up to which a body is not counted: each connection buffers this much anyway."""


class Arrival:
    """A request that is being received; a context manager, which frees its bytes at the end.

    Attributes:
        size: the bytes that are counted for it.
        can_be_aborted: whether it may be aborted when others need its bytes.
        abort: aborts it.

    Args:
        budget: the budget.
    """

    __slots__ = ("_arrivals", "can_give_way", "give_up", "size")

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self.size, self.can_give_way = 0, True
        self.give_up: Callable[[], object] = bool

    def grow(self, size: int) -> None:
        """Counts more bytes; if the budget is exceeded, the largest request is aborted.

        Raises:
            RequestError: if this is the largest, or no other one can be aborted.
        """
        self._arrivals.add(self, size)

    def __enter__(self) -> Arrival:
        return self

    def __exit__(self, *error: object) -> None:
        if self.size:
            self._arrivals.remove(self)


class Arrivals:
    """All requests that are being received, with a limit on their total size.

    Args:
        max_body: bytes of one request.
    """

    def __init__(self, max_body: int) -> None:
        self._most = TIMES * max_body
        self._used = 0
        self._all: dict[Arrival, None] = {}  # in the order of their beginning

    def begin(self) -> Arrival:
        """Returns a new request with a size of 0."""
        return Arrival(self)

    def add(self, arrival: Arrival, size: int) -> None:
        """Counts more bytes of a request; see `Arrival.grow`."""
        arrival.size += size
        self._used += size
        self._all[arrival] = None
        while self._used > self._most:
            others = [other for other in self._all if other.can_give_way]
            largest = max(others, key=lambda other: other.size, default=arrival)
            if largest is arrival:
                raise RequestError(
                    f"Incomplete requests take {self._used} bytes, but may take at most "
                    f"{self._most} ({TIMES} times --max-body). Try again later.",
                    503,
                )
            self.remove(largest)
            largest.give_up()

    def remove(self, arrival: Arrival) -> None:
        if self._all.pop(arrival, arrival) is None:
            self._used -= arrival.size
            arrival.size = 0
