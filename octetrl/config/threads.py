"""How torch's threads on a CPU wait for one another."""

from __future__ import annotations

from collections.abc import Mapping


def short_waits(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that has not loaded torch.

    Threads that wait spin before they sleep, by default for milliseconds, and take the cores from other programs. Here
    they spin for a short time: sleeping at once halves the speed of a CPU on a quiet machine (docs/log.md). Nothing if
    `environment` says how they wait.
    """
    if "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment:
        return {}
    return {"GOMP_SPINCOUNT": "10000"}
