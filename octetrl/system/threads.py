"""How torch's threads on a CPU wait for one another, and how many cores are free for them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
STAT = Path("/proc/stat")  # times of each core, in ticks: user, nice, system, idle, iowait, ...
IDLE = slice(3, 5)


def short_waits(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that has not loaded torch.

    Threads that wait spin before they sleep, by default for milliseconds, and take the cores from other programs. Here
    they spin for a short time: sleeping at once halves the speed of a CPU on a quiet machine (lab/log.md). Nothing if
    `environment` says how they wait.
    """
    if "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment:
        return {}
    return {"GOMP_SPINCOUNT": "10000"}


def num_cores() -> int:
    """Cores that this process may use: those of its affinity, but no more than the CPU quota of its container, rounded
    up."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([own, *map(math.ceil, _quotas())]))


def _quotas() -> Iterator[float]:
    """The limits, in cores, of this process's control group and of those above it; cgroup v2 and v1."""
    with suppress(OSError, ValueError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = CGROUPS / "cpu" if controllers else CGROUPS
            for folder in (mount / path.lstrip("/"), *(mount / path.lstrip("/")).parents):
                if folder.is_relative_to(mount):  # a container may see only the mount
                    yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):  # no limit is -1 in v1 and "max" in v2
        if (one := folder / "cpu.max").exists():
            quota, period = map(int, one.read_text().split())
        else:
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if quota > 0 and period > 0:
            yield quota / period


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
