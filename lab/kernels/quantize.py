"""Quantising both ways in one read, SiLU's backward with it, weights for forward and dgrad, and wgrad with x in square
blocks.

    python -m lab.kernels.quantize [--out FOLDER] [--sweep]

First the bytes: against the separate kernels on large shapes, against plain torch on ragged ones. Then the times at
16,384 tokens of Qwen3-8B's shape: medians over replays of a CUDA graph, each launch on the next of several inputs,
more than 200 MB together. Bytes are those that a kernel must move; the floor is 4.3 TB/s. wgrad stands beside BF16's,
with x quantised in blocks of 128 tokens and in squares, and so does the error of dW against float32: on normal values,
and with a 64th of x's columns, or of its tokens, 50 times larger. `ordinary` is the error over the columns of dW that
are not such outliers. A weight is timed with the transposed codes and without, beside quantising it and copying its
codes transposed. Transposing codes alone stands beside that copy. `--sweep` times other warps, registers and orders of
the programs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lab.kernels.clock import median_us
from lab.record import RESULTS, need_hopper, write_result
from octetrl.bench.hardware import MEMORY_BYTES_PER_SECOND
from octetrl.fp8.backends import fp8_gemm_wgrad
from octetrl.fp8.format import E4M3
from octetrl.fp8.quantize import (
    Quantized,
    quantize_activation_reference,
    quantize_tokens_reference,
    quantize_weight_reference,
)
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.quantize import quantize_both as both_module
from octetrl.kernels.quantize import quantize_tokens as tokens_module
from octetrl.kernels.quantize import quantize_weight as weight_module
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_both import quantize_both
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from octetrl.kernels.quantize.transpose_codes import transpose_codes
from octetrl.kernels.rows import silu_mul_backward_quantize as silu_module
from octetrl.kernels.rows.silu_mul import silu_mul_backward_triton, silu_mul_triton
from octetrl.kernels.rows.silu_mul_backward_quantize import silu_mul_backward_quantize

TOKENS = 16_384
WIDTHS = (4096, 6144, 12288, 24576)
WEIGHT = (24576, 4096)  # N x K
WGRADS = ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096))  # N x K
ROTATED_BYTES = 200_000_000
TILES: tuple[tuple[int, int | None], ...] = (
    (4, None),
    (4, 168),
    (4, 128),
    (8, None),
    (8, 128),
    (8, 80),
    (16, None),
    (16, 64),
)

Row = dict[str, object]
Outputs = list[Quantized]


@dataclass(frozen=True)
class Case:
    """One kernel on one input, beside the calls that it replaces."""

    op: str
    fused: Callable[[], Outputs]
    separate: Callable[[], Outputs] | None
    moved: int  # bytes


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def both_case(tokens: int, width: int, square: bool = False, power_of_two: bool = False) -> Case:
    x = normal(tokens, width)
    return Case(
        f"quantize_both{' square' if square else ''}",
        lambda: [*quantize_both(x, power_of_two, square=square)],
        lambda: [quantize_activation(x, power_of_two), quantize_tokens(x, power_of_two, square)],
        int(tokens * width * (4 + (4 if square else 8) / 128)),
    )


def tokens_case(tokens: int, width: int, square: bool) -> Case:
    x = normal(tokens, width)
    name = f"quantize_tokens{' square' if square else ''}"
    return Case(name, lambda: [quantize_tokens(x, False, square)], None, tokens * width * 3)


def silu_case(tokens: int, size: int, square: bool, power_of_two: bool = False) -> Case:
    gate_up, dy = 2 * normal(tokens, 2 * size), normal(tokens, size)

    def fused() -> Outputs:
        both, y = silu_mul_backward_quantize(gate_up, dy, power_of_two, square=square)
        return [*both, y]

    def separate() -> Outputs:
        both = quantize_both(silu_mul_backward_triton(gate_up, dy), power_of_two)
        return [*both, quantize_tokens(silu_mul_triton(gate_up), power_of_two, square)]

    name = f"silu_mul_backward_quantize{' square' if square else ''}"
    return Case(name, fused, separate, int(tokens * size * (11 + 20 / 128)))


def weight_case(w: Tensor, transposed: bool, power_of_two: bool = False) -> Case:
    """Into buffers that are there already, as after an optimizer step. The transposed codes have the weight's scale."""
    w = w.cuda()
    held, apart = (quantize_weight(torch.zeros_like(w)) for _ in range(2))
    held_KN, apart_KN = (torch.zeros(w.t().shape, dtype=E4M3, device="cuda") for _ in range(2))

    def fused() -> Outputs:
        room_KN = held_KN if transposed else None
        quantize_weight(w, power_of_two, out=held, transposed_KN=room_KN, check=False)
        return [held, *([Quantized(held_KN, held.scale)] if transposed else [])]

    def separate() -> Outputs:
        quantize_weight(w, power_of_two, out=apart, check=False)
        apart_KN.copy_(apart.codes.t())
        return [apart, Quantized(apart_KN, apart.scale)]

    name = f"quantize_weight{' and transposed' if transposed else ''}"
    return Case(name, fused, separate if transposed else None, w.numel() * (4 if transposed else 3))


def transposed_case(n: int, k: int) -> Case:
    """Codes that came from another worker, beside `copy_` of their transposed view."""
    codes_NK = torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda").view(E4M3)
    ours_KN, theirs_KN = (torch.zeros(k, n, dtype=E4M3, device="cuda") for _ in range(2))
    scale = torch.ones(1, device="cuda")
    return Case(
        "transpose_codes",
        lambda: [Quantized(transpose_codes(codes_NK, ours_KN), scale)],
        lambda: [Quantized(theirs_KN.copy_(codes_NK.t()), scale)],
        2 * n * k,
    )


def drawn_weight_case(transposed: bool) -> Case:
    return weight_case(normal(*WEIGHT), transposed)


# ---------------------------------------------------------------- bytes


def differing(got: Outputs, want: Outputs) -> int:
    """How many bytes of codes and scales are not the same."""
    count = 0
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            a_bytes, b_bytes = (x.clone(memory_format=torch.contiguous_format).view(torch.uint8).cpu() for x in (a, b))
            count += int((a_bytes != b_bytes).sum())
    return count


def any_value(*shape: int) -> Tensor:
    """Bit patterns drawn, not values: every exponent of BF16 occurs. Some NaN and infinities remain."""
    bits = torch.randint(0, 1 << 16, shape, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    keep = bits.isfinite() | (torch.rand(shape) < 1e-2)
    return torch.where(keep, bits, 0)


def differing_of(case: Case) -> int:
    assert case.separate is not None
    return differing(case.fused(), case.separate())


def bit_checks() -> Iterator[tuple[str, int]]:
    """(what, bytes that differ)"""
    for tokens, width in ((1, 1), (33, 129), (1000, 4096), (4097, 300), (1153, 640)):
        for option in range(4):
            square, power_of_two = bool(option & 1), bool(option & 2)
            name = f"[{tokens}, {width}]{' square' if square else ''}{' power of two' if power_of_two else ''}"
            for x in (any_value(tokens, width), normal(tokens, width).cpu()):
                rows = quantize_activation_reference(x, power_of_two)
                want = [rows, quantize_tokens_reference(x, power_of_two, square)]
                yield f"both {name}", differing([*quantize_both(x.cuda(), power_of_two, square=square)], want)
                yield f"tokens {name}", differing([quantize_tokens(x.cuda(), power_of_two, square)], want[1:])
            yield f"silu {name}", differing_of(silu_case(tokens, width, square, power_of_two))
    for n, k in ((1, 1), (33, 129), (128, 300), (1153, 640), (4096, 1100)):
        for power_of_two in (False, True):
            name = f"[{n}, {k}]{' power of two' if power_of_two else ''}"
            for w in (any_value(n, k).nan_to_num(0, 0, 0), normal(n, k).cpu()):
                q = quantize_weight_reference(w, power_of_two)
                want = [q, Quantized(q.codes.t(), q.scale)]
                yield f"weight {name}", differing(weight_case(w, True, power_of_two).fused(), want)
                yield f"weight alone {name}", differing(weight_case(w, False, power_of_two).fused(), want[:1])
    for n, k in ((4, 1), (132, 200), (1152, 640), (24576, 4096)):
        yield f"transposed [{n}, {k}]", differing_of(transposed_case(n, k))
    for square in (False, True):
        yield f"both [8192, 12288] square={square}", differing_of(both_case(8192, 12288, square))
        yield f"silu [4096, 12288] square={square}", differing_of(silu_case(4096, 12288, square))


def check_bits() -> bool:
    checks = list(bit_checks())
    wrong = [(name, count) for name, count in checks if count]
    for name, count in wrong:
        print(f"FAIL  {name}: {count} bytes differ")
    print(f"{'FAIL' if wrong else 'OK'}  {len(checks) - len(wrong)} of {len(checks)} comparisons equal byte for byte")
    return not wrong


# ---------------------------------------------------------------- times


def timed(make: Callable[[], Case], workload: str, separate: bool = True, **setting: object) -> Row:
    first = make()
    cases = [first, *(make() for _ in range(ROTATED_BYTES // first.moved))]
    us = median_us(*(case.fused for case in cases))
    row: Row = {"op": first.op, "precision": "fp8", "workload": workload, **setting, "us": us}
    row |= {"tb_per_s": first.moved / us / 1e6, "floor_share": first.moved * 1e6 / us / MEMORY_BYTES_PER_SECOND}
    calls = [case.separate for case in cases if case.separate is not None]
    return row | {"separate_us": median_us(*calls)} if separate and calls else row


def timings() -> Iterator[Row]:
    for width in WIDTHS:
        for square in (False, True):
            yield timed(partial(both_case, TOKENS, width, square), f"{TOKENS} x {width}")
    for square in (False, True):
        yield timed(partial(tokens_case, TOKENS, 12288, square), f"{TOKENS} x 12288")
        yield timed(partial(silu_case, TOKENS, 12288, square), f"{TOKENS} x 12288")
    for transposed in (False, True):
        yield timed(partial(drawn_weight_case, transposed), f"{WEIGHT[0]} x {WEIGHT[1]}")
    yield timed(partial(transposed_case, *WEIGHT), f"{WEIGHT[0]} x {WEIGHT[1]}")


def wgrad_timings() -> Iterator[Row]:
    for n, k in WGRADS:
        sets = 1 + ROTATED_BYTES // (TOKENS * (n + k))
        inputs = [(normal(TOKENS, n), normal(TOKENS, k)) for _ in range(sets)]
        calls: dict[str, list[Callable[[], Any]]] = {"bf16": [partial(torch.mm, dy.t(), x) for dy, x in inputs]}
        for name, square in (("fp8", False), ("fp8 square", True)):
            operands = [(quantize_tokens(dy), quantize_tokens(x, False, square)) for dy, x in inputs]
            calls[name] = [partial(fp8_gemm_wgrad, *pair, "scaled_mm", torch.bfloat16) for pair in operands]
        bf16_us = median_us(*calls["bf16"])
        for name, of_name in calls.items():
            us = bf16_us if name == "bf16" else median_us(*of_name)
            row: Row = {"op": "wgrad", "precision": name, "workload": f"{n} x {k}, {TOKENS} tokens", "us": us}
            yield row | {"tflop_per_s": 2 * TOKENS * n * k / us / 1e6, "bf16_share": bf16_us / us}


def errors(tokens: int = 8192, n: int = 1024, k: int = 2048) -> Iterator[Row]:
    for name in ("normal", "outlier columns", "outlier tokens"):
        dy, x = normal(tokens, n), normal(tokens, k)
        ordinary = torch.ones(k, dtype=torch.bool, device="cuda")
        if name == "outlier columns":
            ordinary[::64] = False
            x[:, ::64] *= 50
        if name == "outlier tokens":
            x[::64] *= 50
        exact = dy.float().t() @ x.float()
        for precision, square in (("fp8", False), ("fp8 square", True)):
            dw = fp8_gemm_wgrad(quantize_tokens(dy), quantize_tokens(x, False, square), "scaled_mm", torch.bfloat16)
            row: Row = {"op": "dW", "precision": precision, "workload": name, "error": relative_error(dw, exact)}
            yield row | {"ordinary": relative_error(dw[:, ordinary], exact[:, ordinary])}


def sweep() -> Iterator[Row]:
    """Other warps, registers and orders than those in use."""
    makers: dict[Any, list[Callable[[], Case]]] = {
        both_module: [partial(both_case, TOKENS, 4096, square) for square in (False, True)],
        tokens_module: [partial(tokens_case, TOKENS, 4096, False)],
        silu_module: [partial(silu_case, TOKENS, 12288, True)],
        weight_module: [partial(drawn_weight_case, transposed) for transposed in (False, True)],
    }
    for module, cases in makers.items():
        chosen: dict[str, object] = {name: getattr(module, name) for name in ("WARPS", "REGISTERS", "TOKEN_BLOCKS")}
        others: list[dict[str, object]] = [{"WARPS": warps, "REGISTERS": registers} for warps, registers in TILES]
        others += [{"TOKEN_BLOCKS": order} for order in (1, 8, 128)]
        if module is silu_module:
            chosen["PARTS_ADJACENT"] = silu_module.PARTS_ADJACENT
            others.append({"PARTS_ADJACENT": not silu_module.PARTS_ADJACENT})
        for setting in (chosen | other for other in others):
            for name, value in setting.items():
                setattr(module, name, value)
            for make in cases:
                yield timed(make, "", False, **{name.lower(): str(value) for name, value in setting.items()})
        for name, value in chosen.items():
            setattr(module, name, value)


def show(rows: list[Row], title: str) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title=title)
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    need_hopper("kernels.quantize")
    torch.manual_seed(0)
    good = check_bits()
    rows = list(timings())
    show(rows, f"quantising, {TOKENS} tokens")
    gemms, wrong = list(wgrad_timings()), list(errors())
    show(gemms, "wgrad")
    show(wrong, "relative error of dW against float32")
    print(f"wrote {write_result('kernels', 'quantize', [*rows, *gemms, *wrong], arguments.out)}")
    if arguments.sweep:
        show(list(sweep()), "other tiles")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
