"""What follows the last layer of a decode step: logits, a token, its log-prob; checked first, then timed.

    python -m lab.kernels.sampling [--tiles] [--out FOLDER]

V = 151,936 and E = 4,096 where nothing else is said. `torch` is the float64 race for sampling, float32 torch operations
for log-probs, and a product always padded to 256 rows and copied for logits. Times are medians over replays of a CUDA
graph; logits and weights rotate over more than 200 MB, so that nothing is read from L2. The floor is the bytes of the
weight and of the logits read or written once, at 4.3 TB/s. `--tiles` times other tiles of the sampling kernel instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import octetrl.kernels.rows.sample_tokens as tiles
from lab.kernels.clock import median_us
from lab.record import RESULTS, need_hopper, write_result
from octetrl.bench.hardware import MEMORY_BYTES_PER_SECOND
from octetrl.kernels.gemm.linear_logprobs import LOGIT_ROWS, lm_head_logits, logprobs_alone, logprobs_of
from octetrl.kernels.rows.sample_tokens import sample_tokens, sample_tokens_reference

VOCAB, HIDDEN = 151_936, 4096
BATCHES = (16, 64, 128, 256)
ROTATED_BYTES = 250e6

Row = dict[str, object]


def draw_rows(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    key_N = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device="cuda")
    return key_N, torch.arange(num_rows, device="cuda"), torch.full((num_rows,), 0.8, device="cuda")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def check_paddings() -> Iterator[tuple[str, int, int]]:
    """(what, values that differ, values) of every padding against the largest."""
    for vocab_size, hidden_size in product((VOCAB, 128_256), (1024, 2048, 4096)):
        hidden_NE, weight_VE = normal(LOGIT_ROWS[-1], hidden_size), normal(vocab_size, hidden_size) / 8
        whole_NV = torch.mm(hidden_NE, weight_VE.t(), out_dtype=torch.float32)
        for rows in LOGIT_ROWS[:-1]:
            part_NV = torch.mm(hidden_NE[-rows:], weight_VE.t(), out_dtype=torch.float32)
            differ = int((part_NV != whole_NV[-rows:]).sum())
            yield f"logits {vocab_size} x {hidden_size}: {rows} rows as {LOGIT_ROWS[-1]}", differ, part_NV.numel()


def check_tokens() -> Iterator[tuple[str, int, int]]:
    for spread in (0.1, 3.0, 20.0):
        logits_NV, rows = torch.randn(4096, VOCAB, device="cuda").mul_(spread), draw_rows(4096)
        tokens = sample_tokens(logits_NV, *rows)
        differ = int((tokens != sample_tokens_reference(logits_NV, *rows)).sum())
        yield f"tokens as the float64 race's, spread {spread} (4 may differ)", max(0, differ - 4), 4096
        one = slice(777, 784)
        alone = sample_tokens(logits_NV[one], *(row[one] for row in rows))
        yield f"tokens alone as in company, spread {spread}", int((alone != tokens[one]).sum()), 7


def check_logprobs() -> Iterator[tuple[str, int, int]]:
    logits_NV, targets_N = torch.randn(256, VOCAB, device="cuda"), torch.arange(256, device="cuda")
    whole_N, _ = logprobs_of(logits_NV, targets_N, 0.7)
    for rows in (1, 16, 100):
        differ = int((logprobs_of(logits_NV[-rows:], targets_N[-rows:], 0.7)[0] != whole_N[-rows:]).sum())
        yield f"log-probs of {rows} rows as of 256", differ, rows
    differ = int((logprobs_alone(logits_NV, targets_N, 0.7) != whole_N).sum())
    yield "log-probs without the entropy as with it", differ, 256


def check() -> bool:
    good = True
    for checks in (check_paddings, check_tokens, check_logprobs):
        for what, differ, total in checks():
            good = good and differ == 0
            print(f"{'OK  ' if differ == 0 else 'FAIL'} {what}: {differ} of {total} differ")
    torch.cuda.empty_cache()
    return good


def copied_logits(hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
    rows = hidden_NE.shape[0]
    padded_NE = torch.nn.functional.pad(hidden_NE, (0, 0, 0, 256 - rows))
    return torch.mm(padded_NE, weight_VE.t(), out_dtype=torch.float32)[:rows].clone()


def torch_logprobs(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> Tensor:
    z_NV = logits_NV / temperature_N[:, None]
    return z_NV.gather(1, targets_N[:, None])[:, 0] - z_NV.logsumexp(1)


def rotated_logits(num_rows: int) -> list[Tensor]:
    copies = 1 + int(ROTATED_BYTES / (4 * VOCAB * num_rows))
    return [torch.randn(num_rows, VOCAB, device="cuda").mul_(3) for _ in range(copies)]


def timings(num_rows: int) -> Iterator[Row]:
    logits, rows = rotated_logits(num_rows), draw_rows(num_rows)
    targets = rows[1:]
    hidden_NE, weight_VE = normal(num_rows, HIDDEN), normal(VOCAB, HIDDEN)
    logit_bytes, weight_bytes = 4 * VOCAB * num_rows, 2 * VOCAB * HIDDEN
    cases: list[tuple[str, str, int, list[Callable[[], Any]]]] = [
        ("sample", "kernels", logit_bytes, [partial(sample_tokens, x, *rows) for x in logits]),
        ("sample", "torch", logit_bytes, [partial(sample_tokens_reference, logits[0], *rows)]),
        ("log-probs", "kernels", logit_bytes, [partial(logprobs_alone, x, *targets) for x in logits]),
        ("log-probs + entropy", "kernels", logit_bytes, [partial(logprobs_of, x, *targets) for x in logits]),
        ("log-probs", "torch", logit_bytes, [partial(torch_logprobs, x, *targets) for x in logits]),
        ("logits", "kernels", logit_bytes + weight_bytes, [partial(lm_head_logits, hidden_NE, weight_VE)]),
        ("logits", "torch", logit_bytes + weight_bytes, [partial(copied_logits, hidden_NE, weight_VE)]),
    ]  # fmt: skip
    for op, form, moved, calls in cases:
        us = median_us(*calls)
        floor = 100 * moved * 1e6 / us / MEMORY_BYTES_PER_SECOND
        what: Row = {"op": op, "form": form, "precision": "bf16", "workload": f"{num_rows}x{VOCAB}", "rows": num_rows}
        yield what | {"us": us, "tb_per_s": moved / us / 1e6, "floor_percent": floor}


def tile_timings() -> Iterator[Row]:
    logits, rows = rotated_logits(128), draw_rows(128)
    for chunk, block, in_program, warps in product((2048, 4096), (128, 256, 512), (2, 4, 8), (1, 2, 4)):
        if not 8 <= block * in_program // (32 * warps) <= 32:  # elements a thread has at a time
            continue
        tiles.CHUNK, tiles.BLOCK, tiles.ROWS, tiles.WARPS = chunk, block, in_program, warps
        us = median_us(*(partial(sample_tokens, x, *rows) for x in logits))
        yield {"op": "sample", "form": f"{chunk} {block} x {in_program}, {warps} warps", "rows": 128, "us": us}


def show(rows: list[Row]) -> None:
    columns = [name for name in ("op", "form", "rows", "us", "tb_per_s", "floor_percent") if name in rows[0]]
    table = Table(*columns, title=f"sampling, V = {VOCAB:,}, E = {HIDDEN:,}")
    for row in rows:
        cells = [row[name] for name in columns]
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_hopper("kernels.sampling")
    torch.manual_seed(0)
    if arguments.tiles:
        show(sorted(tile_timings(), key=lambda row: float(str(row["us"]))))
        return
    good = check()
    rows = [row for num_rows in BATCHES for row in timings(num_rows)]
    show(rows)
    print(f"wrote {write_result('kernels', 'sampling', rows, arguments.out)}")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
