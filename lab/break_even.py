"""From which micro-batch size on is FP8 training faster? One layer's forward and backward, in BF16 and FP8.

    python -m lab.break_even [--models qwen3-0.6b,qwen3-1.7b,qwen3-8b] [--out FOLDER]

A GEMM's gain grows with its size; the cost of quantising grows with its surface. With few tokens FP8 is slower, and the
narrower the model, the more tokens it needs. The figures are medians of alternating rounds, with checkpointing and
sequences of at most 2,048 tokens. Host time is included, as in training: with few tokens a layer waits for launches.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.compiled_layer import milliseconds, own_arm
from lab.record import RESULTS, need_hopper, write_result
from octetrl.config.schema import Fp8Config
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec

TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LONGEST, ROUNDS = 2048, 5
FP8 = Fp8Config(rollout=True, train=True)


def measure(spec: ModelSpec, tokens: int) -> tuple[float, float]:
    """Milliseconds of a layer's forward and backward: BF16, FP8."""
    arms = [own_arm(spec, fp8, tokens, min(tokens, LONGEST)) for fp8 in (Fp8Config(), FP8)]
    for step in arms:
        milliseconds(step)
    rounds = [[milliseconds(step) for step in arms] for _ in range(ROUNDS)]
    bf16, fp8 = (statistics.median(times) for times in zip(*rounds, strict=True))
    return bf16, fp8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-1.7b,qwen3-8b")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    need_hopper("break_even")
    rows: list[dict[str, object]] = []
    table = Table("tokens", title="BF16 / FP8, one layer, forward and backward")
    columns: list[list[str]] = []
    for model in asked.models.split(","):
        spec = replace(spec_from_config(preset_config(model)), num_layers=1, vocab_size=1024)
        table.add_column(f"{model} ({spec.hidden_size})")
        column = []
        for tokens in TOKENS:
            bf16, fp8 = measure(spec, tokens)
            shape = {"workload": f"{tokens} tokens, {model}", "hidden_size": spec.hidden_size, "tokens": tokens}
            rows.append({"precision": "bf16"} | shape | {"ms": bf16, "speedup": 1.0})
            rows.append({"precision": "fp8"} | shape | {"ms": fp8, "speedup": bf16 / fp8})
            column.append(f"{bf16 / fp8:.2f}  ({bf16:.2f} / {fp8:.2f} ms)")
        columns.append(column)
    for tokens, *cells in zip(TOKENS, *columns, strict=True):
        table.add_row(f"{tokens:,}", *cells)
    Console().print(table)
    write_result("break_even", "layer", rows, asked.out)


if __name__ == "__main__":
    main()
