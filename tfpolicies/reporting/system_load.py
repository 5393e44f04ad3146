"""CPU and memory load of the machine."""

from __future__ import annotations

import psutil


class SystemLoad:
    """Measures the CPU load between two readings in a thread, and the memory load at each."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # starts the interval of the first reading

    def read(self) -> dict[str, float]:
        """Returns `cpu_util_percent` since the last reading and the current `ram_util_percent`.

        Both are of the whole machine, from 0 to 100.
        """
        return {
            "cpu_util_percent": psutil.cpu_percent(),
            "ram_util_percent": psutil.virtual_memory().percent,
        }
