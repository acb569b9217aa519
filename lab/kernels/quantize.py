"""Times the quantisers: both ways in one read, SiLU's backward with it, and weights for forward and dgrad; and wgrad.

16,384 tokens of Qwen3-8B's shape, each launch on the next of several inputs. Bytes are those that a kernel must move.
wgrad stands beside BF16's, with x quantised in blocks of 128 tokens and in squares, and so does the error of dW against
float32: on normal values, and with a 64th of x's columns, or of its tokens, 50 times larger. `ordinary` is the error
over the columns of dW that are not such outliers. A weight is timed with the transposed codes and without, beside
quantising it and copying its codes transposed; transposing codes alone beside that copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lab.kernels.clock import ROTATED_BYTES, Row, median_us, memory_row
from octetrl.fp8.backends import fp8_gemm_wgrad
from octetrl.fp8.format import E4M3
from octetrl.fp8.quantize import Quantized
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from octetrl.kernels.quantize.transpose_codes import transpose_codes
from tests.gpu.quantize_cases import Case, Outputs, both_case, normal, silu_case

TOKENS = 16_384
WIDTHS = (4096, 6144, 12288, 24576)
WEIGHT = (24576, 4096)  # N x K
WGRADS = ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096))  # N x K


def measure(arguments: argparse.Namespace) -> list[Row]:
    return [*_quantisers(), *_wgrad(), *_errors()]


def tokens_case(tokens: int, width: int, square: bool) -> Case:
    x = normal(tokens, width)
    name = f"quantize_tokens{' square' if square else ''}"
    return Case(name, lambda: [quantize_tokens(x, False, square)], None, tokens * width * 3)


def weight_case(transposed: bool) -> Case:
    """Into buffers that are there already, as after an optimizer step. The transposed codes have the weight's scale."""
    w = normal(*WEIGHT)
    held, apart = (quantize_weight(torch.zeros_like(w)) for _ in range(2))
    held_KN, apart_KN = (torch.zeros(w.t().shape, dtype=E4M3, device="cuda") for _ in range(2))

    def fused() -> Outputs:
        room_KN = held_KN if transposed else None
        quantize_weight(w, False, out=held, transposed_KN=room_KN, check=False)
        return [held, *([Quantized(held_KN, held.scale)] if transposed else [])]

    def separate() -> Outputs:
        quantize_weight(w, False, out=apart, check=False)
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


def _quantisers() -> Iterator[Row]:
    makers: list[tuple[str, Callable[[], Case]]] = []
    for square in (False, True):
        makers += [(f"{TOKENS} x {width}", partial(both_case, TOKENS, width, square)) for width in WIDTHS]
        makers += [(f"{TOKENS} x 12288", partial(make, TOKENS, 12288, square)) for make in (tokens_case, silu_case)]
    makers += [(f"{WEIGHT[0]} x {WEIGHT[1]}", partial(weight_case, transposed)) for transposed in (False, True)]
    makers.append((f"{WEIGHT[0]} x {WEIGHT[1]}", partial(transposed_case, *WEIGHT)))
    for workload, make in makers:
        first = make()
        cases = [first, *(make() for _ in range(ROTATED_BYTES // first.moved))]
        separate = [case.separate for case in cases if case.separate is not None]
        what: Row = {"op": first.op, "precision": "fp8", "workload": workload}
        yield memory_row(what, first.moved, [case.fused for case in cases], separate, "separate_us")


def _wgrad() -> Iterator[Row]:
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


def _errors(tokens: int = 8192, n: int = 1024, k: int = 2048) -> Iterator[Row]:
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
