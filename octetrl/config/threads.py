"""How torch's threads on a CPU wait for one another, and how many cores are free for them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

STAT = Path("/proc/stat")  # times of each core, in ticks: user, nice, system, idle, iowait, ...
IDLE = slice(3, 5)


def short_waits(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that has not loaded torch.

    Threads that wait spin before they sleep, by default for milliseconds, and take the cores from other programs. Here
    they spin for a short time: sleeping at once halves the speed of a CPU on a quiet machine (docs/log.md). Nothing if
    `environment` says how they wait.
    """
    if "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment:
        return {}
    return {"GOMP_SPINCOUNT": "10000"}


def free_cores(seconds: float = 0.3) -> int | None:
    """How many of this process's cores others leave idle, rounded, at least 1; looks for that long. None: not Linux."""
    try:
        before = _ticks()
        time.sleep(seconds)
        after = _ticks()
    except (OSError, ValueError):
        return None
    shares = []
    for core, now in after.items():
        spent = [late - early for late, early in zip(now, before.get(core, now), strict=True)]
        shares.append(sum(spent[IDLE]) / sum(spent) if sum(spent) > 0 else 1.0)
    return max(1, round(sum(shares))) if shares else None


def _ticks() -> dict[int, list[int]]:
    """The times of each core that this process may use."""
    own = os.sched_getaffinity(0)
    lines = (line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu") and line[3].isdigit())
    return {core: list(map(int, times[:8])) for name, *times in lines if (core := int(name[3:])) in own}
