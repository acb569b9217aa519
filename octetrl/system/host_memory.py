"""Read how much host memory is available to this process, within its container's limit if there is one."""

from __future__ import annotations

from pathlib import Path

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
