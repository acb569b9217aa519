"""How torch's threads on a CPU wait for one another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NVIDIA = Path("/dev/nvidiactl")  # exists where the driver of an NVIDIA GPU runs


def short_waits(environment: Mapping[str, str], *, on_gpu: bool) -> dict[str, str]:
    """Variables for a process that has not loaded torch.

    Threads that wait spin before they sleep, by default for milliseconds, and take the cores from other threads. A
    process that computes on a GPU needs its main thread for launches: it lets the others sleep at once, and a small
    model learns 1.5 times as fast. On a CPU they spin for a short time, because sleeping at once halves the speed on a
    quiet machine (docs/log.md has both). Nothing if `environment` says how they wait.
    """
    if "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment:
        return {}
    return {"GOMP_SPINCOUNT": "0" if on_gpu else "10000"}
