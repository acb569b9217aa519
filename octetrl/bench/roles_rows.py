"""Turns the measurements of `octetrl bench step --roles` into rows with the names of a run's metrics.

A time is the mean over the timed steps of all rounds: a step that waits less makes the next one wait more, so a median
would leave waiting out. `time/step` is by the wall clock, from the end of one step to the end of the next. Differences
of log-probs and memory are the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from octetrl.bench.on_workers import cluster_fields
from octetrl.bench.roles import RolesArm, RolesBench, RolesTurn
from octetrl.bench.roles_memory import estimated_bytes
from octetrl.bench.step import DIFFERENCE
from octetrl.bench.turns import Row

LARGEST = ("max_abs_diff", "memory/peak_gb", "token_mult_prob_error")  # ends of names
ON_POLICY = "mismatch/age_0/max_abs_diff"


def rows_of(bench: RolesBench, turns: Sequence[RolesTurn]) -> list[Row]:
    """A row for each precision and arm, in the order of the turns."""
    by_arm: dict[tuple[str, RolesArm], list[RolesTurn]] = {}
    for turn in turns:
        by_arm.setdefault((turn.precision, turn.arm), []).append(turn)
    rows = {key: _row(bench, rounds) for key, rounds in by_arm.items()}
    for (precision, _), row in rows.items():
        both = rows.get((precision, RolesArm()))
        if both is not None:
            row["step/speedup_over_both"] = float(both["time/step"]) / float(row["time/step"])
    return list(rows.values())


def _row(bench: RolesBench, rounds: Sequence[RolesTurn]) -> Row:
    first, step = rounds[0], bench.step
    lines = [line for turn in rounds for line in turn.timed]
    seconds = fmean(one for turn in rounds for one in turn.seconds)
    siblings = step.workload.siblings
    trainers, engines = first.arm.roles or (bench.cluster.num_workers,) * 2
    row: Row = {
        "precision": first.precision,
        "arm": first.arm.name,
        **cluster_fields(bench.cluster, step.device, bench.cluster.num_workers),
        "cluster/trainers": trainers,
        "cluster/engines": engines,
        "cluster/max_staleness": first.arm.max_staleness,
        "cluster/weights_in_flight": first.arm.in_flight,
        "cluster/weight_buffer": first.weight_buffer,
        "workload": step.workload.name,
        "workload/longest_answer": max(answer for _, answer in siblings),
        "rounds": len(rounds),
        "steps": len(lines),
        "step/layers": step.model.spec.num_layers,
        "rollout/digest": first.digest,
        "memory/estimate_gb": estimated_bytes(bench, first.precision, first.arm) / 1e9,
        "time/startup": first.startup_seconds,
        **_metrics(lines),
        "time/step": seconds,
        "step/tokens_per_second": sum(map(sum, siblings)) / seconds,
        "step/samples_per_second": len(siblings) / seconds,
    }
    for name in ("wait_for_batch", "wait_for_weights"):
        if f"time/{name}" in row:
            row[f"step/{name}_share"] = float(row[f"time/{name}"]) / seconds
    return row | _on_policy(line for turn in rounds for line in turn.lines)


def _metrics(lines: Sequence[Mapping[str, float]]) -> Row:
    """Each metric's mean, or its largest value. A step without a time had none of it."""
    row: Row = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        found = [line.get(name, 0.0) for line in lines]
        if name.startswith("mismatch/age_"):  # of the tokens of some steps; `_on_policy` has all
            continue
        if name.startswith("time/") or all(name in line for line in lines):
            row[name] = max(found) if name.endswith(LARGEST) else fmean(found)
    return row


def _on_policy(lines: Iterable[Mapping[str, float]]) -> Row:
    """The largest difference of log-probs that the trainer's own weights sampled, over all steps, the untimed ones
    included, and the number of these tokens. Whole batches of the timed steps may be stale."""
    largest: list[float] = []
    tokens = 0.0
    for line in lines:
        if ON_POLICY in line:
            largest.append(line[ON_POLICY])
            tokens += line["mismatch/age_0/tokens"]
        elif line.get("rollout/on_policy_share", 1.0) == 1.0 and DIFFERENCE in line:
            largest.append(line[DIFFERENCE])
            tokens += line["mismatch/tokens"]
    return {ON_POLICY: max(largest), "mismatch/age_0/tokens": tokens} if largest else {}
