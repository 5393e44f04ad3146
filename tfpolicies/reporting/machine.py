"""How busy the machine is."""

from __future__ import annotations

import psutil


class MachineLoad:
    """Measures the processors between two readings in a thread, and the memory at each."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first reading is of the time from here on

    def read(self) -> dict[str, float]:
        """Returns `cpu_util_percent` since the last reading and `ram_util_percent` of now.

        Both are of the whole machine, from 0 to 100.
        """
        return {
            "cpu_util_percent": psutil.cpu_percent(),
            "ram_util_percent": psutil.virtual_memory().percent,
        }
