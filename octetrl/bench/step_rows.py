"""Turns the measurements of `octetrl bench step` into rows: phases, shares, ratios, the cost of calibration."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from octetrl.bench.memory import checkpointed_layers
from octetrl.bench.step import DIFFERENCE, PhaseTimes, StepBench, StepTurn, estimate_bytes
from octetrl.bench.turns import Row, compared
from octetrl.telemetry.metrics import MISMATCH


def rows_of(bench: StepBench, turns: Sequence[StepTurn]) -> list[Row]:
    """A row for each precision: medians over all steps; of memory and mismatch the largest value."""
    by_arm: dict[str, list[StepTurn]] = {}
    for turn in turns:
        by_arm.setdefault(turn.precision, []).append(turn)
    rows = {arm: _row(bench, rounds) for arm, rounds in by_arm.items()}
    for phase in ("step", "produce", "learn"):
        for arm, found in compared({arm: 1.0 / float(row[f"time/{phase}"]) for arm, row in rows.items()}).items():
            rows[arm] |= {f"step/{phase}_{name}": value for name, value in found.items()}
    return list(rows.values())


def _row(bench: StepBench, rounds: Sequence[StepTurn]) -> Row:
    steps = [step for turn in rounds for step in turn.steps]
    total = statistics.median(step.total for step in steps)
    phases = {
        "produce": statistics.median(step.produce for step in steps),
        "learn": statistics.median(step.learn for step in steps),
        "publish": statistics.median(step.publish for step in steps),
    }
    row: Row = {
        "precision": rounds[0].precision,
        "workload": bench.workload.name,
        "rounds": len(rounds),
        "steps": len(steps),
        "step/layers": bench.model.spec.num_layers,
        "step/learnt_groups_share": bench.learn_share,
        "step/micro_batches": steps[0].micro_batches,
        "step/checkpointing": bench.trainer.activation_checkpointing,
        "step/checkpointed_layers": checkpointed_layers(bench.trainer, bench.model.spec),
        "step/weight_codes": bench.trainer.weight_codes,
        "step/optimizer_states": bench.trainer.optimizer.states,
        "step/master": bench.trainer.optimizer.master,
        "step/gradient_sums": bench.trainer.gradients,
        "time/step": total,
        "step/tokens_per_second": sum(map(sum, bench.workload.siblings)) / total,
        "step/generated_tokens_per_second": bench.workload.generated_tokens / phases["produce"],
        "step/optimizer_ms": statistics.median(turn.optimizer_seconds for turn in rounds) * 1e3,
        "step/publish_ms": phases["publish"] * 1e3,
        "step/requantize_ms": statistics.median(step.requantize for step in steps) * 1e3,
        "rollout/preemptions": max(step.preemptions for step in steps),
        "rollout/kv_capacity_tokens": min(step.kv_capacity_tokens for step in steps),
        "time/calibrate": statistics.median(step.calibrate for step in steps),
        "time/startup": rounds[0].startup_seconds,
        "memory/estimate_gb": estimate_bytes(bench, rounds[0].precision) / 1e9,
        MISMATCH: max(step.mismatch for step in steps),
        DIFFERENCE: max(step.max_abs_diff for step in steps),
        "mismatch/tokens": sum(step.compared_tokens for step in steps),
    }
    for phase, seconds in phases.items():
        row[f"time/{phase}"] = seconds
        row[f"step/{phase}_share"] = seconds / total
    row |= capture_fields(steps)
    if bench.lora is not None:
        row |= {"step/lora_rank": bench.lora.rank, "step/lora_experts": bench.lora.experts}
    paces = [step.pace for step in steps if step.pace is not None]
    if paces:
        row["learn/before_s"] = statistics.median(pace.before for pace in paces)
        row["learn/settling_s"] = statistics.median(pace.settling for pace in paces)
        row["learn/us_per_token"] = statistics.median(pace.steady for pace in paces) * 1e6
    if rounds[0].published_bytes:
        row["step/publish_gb"] = rounds[0].published_bytes / 1e9
        row["step/publish_gb_per_second"] = rounds[0].published_bytes / 1e9 / phases["publish"]
    if steps[0].learn_peak is not None:
        row["memory/produce_peak_gb"] = max(step.produce_peak or 0.0 for step in steps)
        row["memory/learn_peak_gb"] = max(step.learn_peak or 0.0 for step in steps)
    return row


def capture_fields(steps: Sequence[PhaseTimes]) -> dict[str, float]:
    """`time/capture`; nothing where no graphs are captured, on a CPU."""
    captures = [step.capture for step in steps if step.capture is not None]
    return {"time/capture": statistics.median(captures)} if captures else {}


def calibration_rows(bench: StepBench, turns: Sequence[StepTurn]) -> list[Row]:
    """A row for each mode of each precision that calibrates: its time beyond `off`, and its share of the step."""
    rows: list[Row] = []
    for precision in bench.precisions:
        rounds = [turn for turn in turns if turn.precision == precision and turn.calibration]
        if not rounds:
            continue
        step = statistics.median(one.total for turn in rounds for one in turn.steps)
        all_tokens = sum(map(sum, bench.workload.siblings))
        times = {
            mode: [seconds for turn in rounds for seconds in turn.calibration[mode]] for mode in rounds[0].calibration
        }
        for mode, seconds in times.items():
            row: Row = {
                "precision": precision,
                "calibration": mode,
                "calibration/ms": statistics.median(seconds) * 1e3,
                "calibration/min_ms": min(seconds) * 1e3,
                "calibration/max_ms": max(seconds) * 1e3,
                "calibration/tokens": rounds[0].calibration_tokens,
            }
            if "off" in times:
                added = statistics.median(seconds) - statistics.median(times["off"])
                row["calibration/added_ms"] = added * 1e3
                row["calibration/step_share"] = added * all_tokens / rounds[0].calibration_tokens / step
            rows.append(row)
    return rows
