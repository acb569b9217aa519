"""The machine of this process: how torch's threads on a CPU wait for one another, how many cores are free for them, how
much memory is available, and what becomes of freed memory."""

from __future__ import annotations

import ctypes
import math
import os
import sys
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


MEMINFO = Path("/proc/meminfo")
LIMITS = (  # files of the kernel's two cgroup versions: the limit, the use, and the cached files counted in the use
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
USABLE_HOST = 0.9  # share of the available memory that a checkpoint's copy may take


def available_host_bytes() -> int | None:
    """Return the bytes that can be allocated without swapping. None: the system does not report them."""
    found = [_fields(MEMINFO).get("MemAvailable"), *(_left_of(Path(folder), *names) for folder, *names in LIMITS)]
    return min((number for number in found if number is not None), default=None)


def _left_of(folder: Path, limit: str, used: str, cached: str) -> int | None:
    """Return the unused bytes of a container's limit. None: there is no such limit."""
    try:
        allowed, taken = (int((folder / name).read_text(encoding="ascii")) for name in (limit, used))
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return allowed - taken + _fields(folder / "memory.stat").get(cached, 0)


def _fields(file: Path) -> dict[str, int]:
    """Parse lines such as `MemAvailable:  1024 kB` or `inactive_file 1048576` into bytes by name."""
    try:
        lines = [line.replace(":", " ").split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) * (1024 if words[-1] == "kB" else 1) for words in lines if len(words) > 1}


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_KEPT_BYTES = 1 << 30


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Let this process keep up to 1 GiB of memory that it has freed, for its next tensors. No result changes.

    By default glibc returns large blocks to the kernel at once. torch on a CPU allocates the temporary tensors of a
    forward and a backward again and again, and the kernel clears each page when it is next used (lab/log.md has
    measurements).

    False, and nothing is done, if `environment` sets glibc's thresholds, or if the C library is not glibc.
    """
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in environment for name in chosen):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return all(mallopt(option, _KEPT_BYTES) == 1 for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
