"""How torch's threads wait for one another on a CPU."""

from __future__ import annotations

from collections.abc import Mapping


def short_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that has not loaded torch: between small matrices its threads spin for a short time and
    then sleep. Spinning for long takes the cores of other programs; sleeping at once halves the speed on a quiet
    machine (docs/log.md). Nothing if `environment` says how they wait."""
    if "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment:
        return {}
    return {"GOMP_SPINCOUNT": "10000"}
