"""The kernel for few rows beside the engine's: bits first, then times, with and without programmatic launch.

    python -m lab.kernels.few_rows [--limit 180] [--out FOLDER]

Linears of Qwen3-8B's layer at 1 to 64 rows, FP8 and BF16. Every step is a process of its own, which is killed after
`--limit` seconds: a kernel that hangs costs its step and is named. A variant is timed only if all its products had the
engine's bits.

    bits      every variant, at the four shapes and four odd ones
    products  each shape alone, one graph over copies of the weight of more than 220 MB
    layer     the four linears in turn, over three layers' weights, each by its fastest variant; bits too, in the graph

`of_peak`: bytes of the weight and its scales by the time, as a share of 4.8 TB/s. "programmatic": the products request
their weights before the product in front has ended.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lab.kernels.clock import quick_median_us
from lab.record import RESULTS, need_hopper, write_result
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm
from octetrl.kernels.gemm.few_rows_gluon import FewRows, few_rows_bf16, few_rows_fp8
from octetrl.kernels.gemm.fp8_gemm import check_operands, fp8_gemm
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_weight import quantize_weight

Row = dict[str, object]
Operand = Tensor | Quantized
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
ODD_SHAPES = ((576, 896), (896, 3584), (3584, 896), (896, 1152))
ROWS, LAYER_ROWS, CHECKED_ROWS = (1, 4, 8, 16, 32, 64), (1, 8, 16, 64), (1, 2, 7, 8, 16, 33, 64)
BYTES_PER_US = 4.8e6  # the H200's data sheet
ROTATED_BYTES = 220e6
LAYERS = 3
PRECISIONS, STEPS = ("fp8", "bf16"), ("bits", "products", "layer")
FORMS = {"few_rows": False, "programmatic": True}

# w_rows, stages and panels, by the rows of x in a panel: first with w on the MMA's long side, then with x
SWAPPED = {
    8: ((32, 8, 4), (32, 4, 4), (32, 4, 8), (64, 5, 4), (64, 5, 2), (64, 3, 2), (16, 6, 4)),
    16: ((32, 8, 4), (32, 4, 4), (64, 5, 4), (64, 5, 2), (64, 3, 2), (16, 6, 4)),
    32: ((32, 6, 4), (32, 3, 4), (32, 5, 2), (64, 4, 4), (64, 4, 2)),
    64: ((64, 3, 4), (64, 3, 2)),
}
PLAIN = {8: (), 16: ((32, 4, 4),), 32: ((32, 5, 2),), 64: ((32, 4, 4), (32, 4, 2), (64, 3, 2), (128, 4, 2))}


def variants(rows: int, programmatic: bool) -> list[FewRows]:
    """Those whose panel of x is the smallest that holds `rows`."""
    tokens = next(size for size in SWAPPED if rows <= size)
    forms = [(sizes, True) for sizes in SWAPPED[tokens]] + [(sizes, False) for sizes in PLAIN[tokens]]
    return [FewRows(w, tokens, stages, panels, swap, programmatic) for (w, stages, panels), swap in forms]


def label(variant: FewRows) -> str:
    sizes = f"{variant.w_rows}x{variant.tokens} s{variant.stages} u{variant.panels}"
    return sizes + " swap" * variant.swap


# ---------------------------------------------------------------- operands and products


def input_of(precision: str, m: int, k: int) -> Operand:
    generator = torch.Generator(device="cuda").manual_seed(m + k)
    x_MK = torch.randn(m, k, generator=generator, device="cuda") * torch.logspace(-1, 1, k, device="cuda")
    return quantize_activation(x_MK.bfloat16()) if precision == "fp8" else x_MK.bfloat16()


def weight_of(precision: str, n: int, k: int) -> Operand:
    generator = torch.Generator(device="cuda").manual_seed(n + k)
    w_NK = torch.randn(n, k, generator=generator, device="cuda") * torch.logspace(-1, 1, n, device="cuda")[:, None]
    return quantize_weight(w_NK.bfloat16()) if precision == "fp8" else w_NK.bfloat16()


def copy_of(w: Operand) -> Operand:
    return w.clone() if isinstance(w, Tensor) else Quantized(w.codes.clone(), w.scale.clone())


def product(x: Operand, w: Operand, variant: FewRows | None) -> Tensor:
    """By the engine's kernel if there is no variant."""
    if isinstance(x, Quantized) and isinstance(w, Quantized):
        return fp8_gemm(x, w) if variant is None else few_rows_fp8(x, w, check_operands(x, w), variant)
    assert isinstance(x, Tensor) and isinstance(w, Tensor)
    return bf16_gemm(x, w) if variant is None else few_rows_bf16(x, w, variant)


def weight_bytes(precision: str, n: int, k: int) -> int:
    return 2 * n * k if precision == "bf16" else n * k + 4 * -(-n // 128) * -(-k // 128)


def same_bits(one_MN: Tensor, other_MN: Tensor) -> bool:
    return torch.equal(one_MN.view(torch.int16), other_MN.view(torch.int16))


# ---------------------------------------------------------------- the steps


def bits(precision: str, programmatic: bool, found: list[Row]) -> Iterator[Row]:
    """How many products of each variant have the engine's bits; x is written right in front of each."""
    tried = {variant for rows in ROWS for variant in variants(rows, programmatic)}
    form = "programmatic" if programmatic else "few_rows"
    for variant in sorted(tried):
        row: Row = {"precision": precision, "form": form, "variant": label(variant)}
        print(json.dumps(row | {"begun": True}), flush=True)
        equal, different = 0, 0
        for n, k in (*SHAPES, *ODD_SHAPES):
            w = weight_of(precision, n, k)
            for m in (m for m in CHECKED_ROWS if m <= variant.tokens):
                expected_MN = product(input_of(precision, m, k), w, None)
                try:
                    right = same_bits(product(input_of(precision, m, k), w, variant), expected_MN)
                except ValueError:  # does not fit in shared memory at this K
                    continue
                equal, different = equal + right, different + (not right)
        yield row | {"equal": equal, "different": different}


def products(precision: str, programmatic: bool, found: list[Row]) -> Iterator[Row]:
    """The engine's kernel and every variant with its bits."""
    form = "programmatic" if programmatic else "few_rows"
    right = {
        row["variant"] for row in found if (row["precision"], row["form"], row.get("different")) == (precision, form, 0)
    }
    for n, k in SHAPES:
        first = weight_of(precision, n, k)
        size = weight_bytes(precision, n, k)
        weights = [first, *(copy_of(first) for _ in range(max(3, int(ROTATED_BYTES / size))))]
        for m in ROWS:
            x = input_of(precision, m, k)
            usable = [variant for variant in variants(m, programmatic) if label(variant) in right]
            for variant in ([] if programmatic else [None]) + usable:
                row: Row = {"precision": precision, "workload": f"{m}x{n}x{k}", "rows": m}
                row |= {"form": "present"} if variant is None else {"form": form, "variant": label(variant)}
                print(json.dumps(row | {"begun": True}), flush=True)
                try:
                    us = quick_median_us([partial(product, x, w, variant) for w in weights])
                except ValueError:  # does not fit
                    continue
                yield row | {"us": us, "of_peak": size / us / BYTES_PER_US}


def fastest(precision: str, form: str, m: int, n: int, k: int, found: list[Row]) -> FewRows | None:
    """The variant with the shortest time at this product."""
    own = (precision, form, f"{m}x{n}x{k}")
    timed = [row for row in found if "us" in row and (row["precision"], row["form"], row["workload"]) == own]
    if not timed:
        return None
    best = min(timed, key=lambda row: float(str(row["us"])))["variant"]
    return next(variant for variant in variants(m, FORMS[form]) if label(variant) == best)


def layer(precision: str, programmatic: bool, found: list[Row]) -> Iterator[Row]:
    """The four linears in turn; the engine's kernels in the step without programmatic launch."""
    layers = [[weight_of(precision, n, k) for n, k in SHAPES] for _ in range(LAYERS)]
    size = sum(weight_bytes(precision, n, k) for n, k in SHAPES)
    for form in ("programmatic",) if programmatic else ("present", "few_rows"):
        for m in LAYER_ROWS:
            xs = [input_of(precision, m, k) for _, k in SHAPES]
            chosen = [None if form == "present" else fastest(precision, form, m, n, k, found) for n, k in SHAPES]
            if form != "present" and None in chosen:
                continue
            row: Row = {"precision": precision, "workload": f"{m}xlayer", "rows": m, "form": form}
            print(json.dumps(row | {"begun": True}), flush=True)
            calls = [partial(product, *of) for weights in layers for of in zip(xs, weights, chosen, strict=True)]
            us = quick_median_us(calls) * len(SHAPES)
            expected = [product(x, w, None) for x, w in zip(xs, layers[0], strict=True)]
            right = all(map(same_bits, outputs_of_a_graph(calls[: len(SHAPES)]), expected))
            yield row | {"us": us, "of_peak": size / us / BYTES_PER_US, "equal": right}


def outputs_of_a_graph(calls: list[partial[Tensor]]) -> list[Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    for _ in range(3):
        for y_MN in outputs:
            y_MN.zero_()
        torch.cuda.synchronize()
        graph.replay()
    torch.cuda.synchronize()
    return outputs


RUN: dict[str, Callable[[str, bool, list[Row]], Iterator[Row]]] = {"bits": bits, "products": products, "layer": layer}

# ---------------------------------------------------------------- processes


def run_step(step: str, precision: str, form: str, found: list[Row], limit: float) -> list[Row]:
    """The rows of one step, in a process of its own. Says what ran last if it fails or is killed."""
    with tempfile.TemporaryDirectory() as folder:
        known, printed, said = (Path(folder) / name for name in ("known.json", "printed", "said"))
        known.write_text(json.dumps(found), encoding="utf-8")
        command = [sys.executable, "-m", "lab.kernels.few_rows", "--step", step, precision, form, str(known)]
        with printed.open("wb") as out, said.open("wb") as errors:  # files: a killed process leaves its lines there
            try:
                status = subprocess.run(command, stdout=out, stderr=errors, timeout=limit, check=False).returncode
                ended = "" if status == 0 else f"exit {status}: {said.read_text(encoding='utf-8')[-800:].strip()}"
            except subprocess.TimeoutExpired:
                ended = f"killed after {limit:.0f} s"
        text = printed.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    if ended:
        last = lines[-1] if lines else "before its first measurement"
        print(f"FAIL {step} {precision} {form}: {ended}; last: {last}", flush=True)
    return [line for line in lines if "begun" not in line]


def show(rows: list[Row]) -> None:
    table = Table("precision", "workload", "form", "variant", "us", "of_peak", title="Linears of few rows")
    shortest: dict[tuple[object, ...], Row] = {}
    for row in sorted(rows, key=lambda row: float(str(row["us"]))):
        shortest.setdefault((row["precision"], row["workload"], row["form"]), row)
    for row in sorted(
        shortest.values(), key=lambda row: (str(row["precision"]), str(row["workload"]), str(row["form"]))
    ):
        names = [str(row.get(name, "")) for name in ("precision", "workload", "form", "variant")]
        table.add_row(*names, f"{row['us']:.2f}", f"{row['of_peak']:.0%}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--limit", type=float, default=180.0, help="seconds of one step (default 180; the first ones compile)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--step", nargs=4, metavar=("STEP", "PRECISION", "FORM", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    need_hopper("kernels.few_rows")
    if arguments.step:
        step, precision, form, known = arguments.step
        for row in RUN[step](precision, FORMS[form], json.loads(Path(known).read_text(encoding="utf-8"))):
            print(json.dumps(row), flush=True)
        return
    found: list[Row] = []
    for step in STEPS:
        for precision in PRECISIONS:
            for form in FORMS:
                found += run_step(step, precision, form, found, arguments.limit)
    checked, timed = ([row for row in found if ("us" in row) == of] for of in (False, True))
    right = sum(int(str(row["equal"])) for row in checked)
    wrong = [row for row in found if row.get("different") or row.get("equal") is False]
    print(f"{'FAIL' if wrong else 'OK  '} {right} products have the engine's bits; others: {wrong or 'none'}")
    show(timed)
    timed.sort(key=lambda row: not str(row["workload"]).endswith("layer"))
    print(f"wrote {write_result('kernels', 'few_rows', timed, arguments.out, bits=checked)}")


if __name__ == "__main__":
    main()
