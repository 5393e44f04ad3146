"""How busy the machine is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_TIMES = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user and nice
_IDLE = slice(3, 5)


class _CpuTime(NamedTuple):
    """Ticks of all processors since the machine was started."""

    busy: int
    all: int


class MachineLoad:
    """Measures the processors between two readings, and the memory at each.

    The numbers are the kernel's (`/proc/stat` and `/proc/meminfo`, see proc(5)). Machines without
    these files, others than Linux, tell nothing.

    Args:
        proc: where the files are.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = Path(proc)
        self._before = self._cpu_time()
        self._cpu_percent = 0.0

    def read(self) -> dict[str, float]:
        """Returns `cpu_util_percent` since the last reading and `ram_util_percent` of now.

        Both are of the whole machine, from 0 to 100; what the machine does not tell is left out.
        """
        found = {}
        before, now = self._before, self._cpu_time()
        if before is not None and now is not None:
            if now.all > before.all:  # a tick is 10 ms, so that there may be none
                share = (now.busy - before.busy) / (now.all - before.all)
                self._cpu_percent = 100.0 * min(1.0, max(0.0, share))
                self._before = now
            found["cpu_util_percent"] = self._cpu_percent
        ram = self._ram_percent()
        if ram is not None:
            found["ram_util_percent"] = ram
        return found

    def _cpu_time(self) -> _CpuTime | None:
        try:
            first = (self._proc / "stat").read_text().partition("\n")[0].split()
            times = [int(x) for x in first[1 : 1 + _TIMES]]
        except (OSError, ValueError):
            return None
        whole = sum(times)
        return _CpuTime(whole - sum(times[_IDLE]), whole) if len(times) == _TIMES else None

    def _ram_percent(self) -> float | None:
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
            parts = (line.partition(":") for line in lines)
            sizes = {name: int(size.split()[0]) for name, _, size in parts}
            return 100.0 * (1.0 - sizes["MemAvailable"] / sizes["MemTotal"])
        except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
            return None
