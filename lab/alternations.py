"""Measures what it costs when the engine frees its cache for training and allocates it again, many times.

    python -m lab.alternations [--model qwen3-8b] [--precision bf16 fp8_full] [--turns 20]

In a turn the engine frees its cache. A stand-in for the trainer allocates and frees half of the free memory. Then the
engine generates 64 answers of 32 tokens, with a cache sized by the free memory. Each turn has: bytes that stay
allocated without the cache, the cache's tokens, and the seconds to free it, to a first token with a new cache, and to
capture graphs. Needs a GPU; `--model tiny --device cpu` shows the form of the output.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lab.record import RESULTS, need_hopper, write_result
from octetrl.bench.model import find_model, give_memory_back
from octetrl.bench.rollout import Arm, Bench, build_arm, first_token
from octetrl.bench.workload import Shape, fixed_lengths
from octetrl.config.load import PRECISIONS
from octetrl.records import GenerationRequest
from octetrl.shapes.presets import PRESETS

ANSWERS = Shape(64, 100, 32)
STAND_IN = 0.5  # of the free memory
COLUMNS = (
    "precision", "turns", "GB after the first", "after the last", "bytes more",
    "cache tokens", "least", "free s", "first token s", "capture s",
)  # fmt: skip
Row = dict[str, str | int | float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="qwen3-8b")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16", "fp8_full"])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.turns < 1:
        parser.error(f"argument --turns: {arguments.turns} are none; give 1 or more")
    if arguments.device == "cuda":
        need_hopper("alternations", ", or with --model tiny --device cpu")
    model, device = find_model(arguments.model), torch.device(arguments.device)
    workload = fixed_lengths(ANSWERS, 8, model.spec.vocab_size, seed=0)
    rows: list[Row] = []
    for precision in arguments.precision:
        arm = build_arm(Bench(model, (precision,), (workload,), device), precision, workload)
        arm.engine.generate(workload.requests)  # compiles and captures
        for turn in range(1, arguments.turns + 1):
            rows.append(
                {"precision": precision, "workload": f"turn {turn}"} | alternation(arm, workload.requests, device)
            )
        arm.engine.sleep()
        del arm
        give_memory_back(device)
    show(rows)
    print(f"wrote {write_result('alternations', model.name, rows, arguments.out)}")


def alternation(arm: Arm, requests: tuple[GenerationRequest, ...], device: torch.device) -> Row:
    """One turn, measured."""
    began = time.perf_counter()
    arm.engine.sleep()
    give_memory_back(device)
    given = time.perf_counter()
    left = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0  # a cache by what is free would hide it
    if device.type == "cuda":
        torch.empty(int(STAND_IN * torch.cuda.mem_get_info(device)[0]), dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
    give_memory_back(device)
    taking = time.perf_counter()
    arm.engine.generate((first_token(requests[0]),))
    taken = time.perf_counter()
    first = arm.engine.metrics
    arm.engine.generate(requests)
    metrics = arm.engine.metrics
    assert first is not None and metrics is not None, "the engine says nothing about the calls"
    return {
        "memory/without_cache_bytes": left,
        "rollout/kv_capacity_tokens": metrics.kv_capacity_tokens,
        "time/give_back": given - began,
        "time/first_token": taken - taking,
        "time/capture": (first.session_capture_seconds or 0.0) + (metrics.session_capture_seconds or 0.0),
    }


def show(rows: list[Row]) -> None:
    """A line per precision: the first turn, the last, and medians of the seconds."""
    table = Table(title="giving the cache back and taking it again")
    for name in COLUMNS:
        table.add_column(name)
    for precision in dict.fromkeys(str(row["precision"]) for row in rows):
        mine = [row for row in rows if row["precision"] == precision]
        held = [int(row["memory/without_cache_bytes"]) for row in mine]
        capacity = [int(row["rollout/kv_capacity_tokens"]) for row in mine]
        seconds = [
            f"{statistics.median(float(row[name]) for row in mine):.3f}"
            for name in ("time/give_back", "time/first_token", "time/capture")
        ]
        told = [f"{held[0] / 1e9:.3f}", f"{held[-1] / 1e9:.3f}", f"{held[-1] - held[0]:,}"]
        table.add_row(precision, str(len(mine)), *told, f"{capacity[0]:,}", f"{min(capacity):,}", *seconds)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
