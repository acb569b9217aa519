"""Turns the measurements of `octetrl bench step` on several workers into rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from octetrl.bench.cluster import ClusterBench, ClusterTurn
from octetrl.bench.cluster_memory import estimated_bytes
from octetrl.bench.on_workers import Arm, cluster_fields, compare_workers, peak_fields
from octetrl.bench.step import DIFFERENCE
from octetrl.bench.step_rows import capture_fields
from octetrl.bench.turns import Row
from octetrl.telemetry.metrics import MISMATCH

PHASES = ("step", "produce", "learn")


def rows_of(bench: ClusterBench, turns: Sequence[ClusterTurn]) -> list[Row]:
    """A row for each precision and number of workers: medians over all steps; of memory and mismatch the
    largest value."""
    by_arm: dict[Arm, list[ClusterTurn]] = {}
    for turn in turns:
        by_arm.setdefault((turn.precision, turn.workers), []).append(turn)
    rows = {arm: _row(bench, rounds) for arm, rounds in by_arm.items()}
    compare_workers(rows, PHASES)
    return list(rows.values())


def _row(bench: ClusterBench, rounds: Sequence[ClusterTurn]) -> Row:
    first, step = rounds[0], bench.step
    steps = [one for turn in rounds for one in turn.steps]
    count = max(1, first.workers)
    phases = {name: statistics.median(getattr(one, name) for one in steps) for name in ("produce", "learn", "publish")}
    total = statistics.median(one.total for one in steps)
    tokens = sum(map(sum, step.workload.siblings))
    row: Row = {
        "precision": first.precision,
        **cluster_fields(bench.cluster, step.device, first.workers),
        "workload": step.workload.name,
        "rounds": len(rounds),
        "steps": len(steps),
        "step/layers": step.model.spec.num_layers,
        "step/micro_batches": steps[0].micro_batches,
        "step/optimizer_states": step.trainer.optimizer.states,
        "step/master": step.trainer.optimizer.master,
        "step/gradient_sums": step.trainer.gradients,
        "step/beside_tail_share": statistics.median(one.beside_tail_share for one in steps),
        "time/step": total,
        "step/tokens_per_second": tokens / total,
        "step/tokens_per_second_per_worker": tokens / total / count,
        "produce/tokens_per_second": step.workload.generated_tokens / phases["produce"],
        "learn/tokens_per_second": tokens / phases["learn"],
        "step/publish_ms": phases["publish"] * 1e3,
        "time/calibrate": statistics.median(one.calibrate for one in steps),
        "time/startup": first.startup_seconds,
        "rollout/preemptions": max(one.preemptions for one in steps),
        "rollout/digest": first.digest,
        "memory/estimate_gb": estimated_bytes(bench, first.precision, first.workers) / 1e9,
        MISMATCH: max(one.mismatch for one in steps),
        DIFFERENCE: max(one.max_abs_diff for one in steps),
        "mismatch/tokens": sum(one.compared_tokens for one in steps),
    }
    row |= {f"time/{name}": seconds for name, seconds in phases.items()} | capture_fields(steps)
    row |= _exchange(rounds, phases["publish"])
    return row | peak_fields([turn.peak_gb for turn in rounds])


def _exchange(rounds: Sequence[ClusterTurn], publish_seconds: float) -> Mapping[str, float]:
    """Bytes of publishing and their speed: of codes by the embedded worker, of what several workers exchange."""
    steps = [one for turn in rounds for one in turn.steps]
    if rounds[0].code_bytes:
        size = rounds[0].code_bytes / 1e9
        return {"step/publish_gb": size, "step/publish_gb_per_second": size / publish_seconds}
    received = max(one.received_bytes for one in steps) / 1e9
    if not received:
        return {}
    gather = statistics.median(one.gather for one in steps)
    return {
        "step/publish_gb": received,
        "step/publish_gb_per_second": received / publish_seconds,
        "publish/gather_ms": gather * 1e3,
        "publish/gather_gb_per_second": received / gather,
        "publish/link_gb_per_second": statistics.median(one.link_gb_per_second for one in steps),
    }
