"""The row kernels of training around attention and norms: first their bits and errors, then their time.

    python -m lab.kernels.training_rows [--out FOLDER] [--sweep]

Forward: q, K, V, scales and amax, byte for byte those of QK-norm, RoPE and KV replay one after the other, in every mode
of the cache. Backward: how many values are further from float64 than one rounding to BF16 allows, and whether a second
run has the same bits. Time: 16,384 tokens of Qwen3-8B, medians over replays of a CUDA graph; one set of inputs is
larger than L2. Beside it stands the chain of separate ops: for RMSNorm's backward plain torch, for QKV's the rotation
back, RMSNorm's backward and the concatenation, for a gradient's sum torch's `add_`. Bytes are those that a kernel must
read and write (weights and angles left out). `--sweep` times other tiles and numbers of programs too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lab.kernels.clock import median_us
from lab.record import RESULTS, need_hopper, write_result
from octetrl.bench.hardware import MEMORY_BYTES_PER_SECOND
from octetrl.kernels.attention import qkv_rotate as rotate_module
from octetrl.kernels.attention import qkv_rotate_backward as rotate_back_module
from octetrl.kernels.attention.kv_store import kv_replay
from octetrl.kernels.attention.qkv_rotate import qkv_rotate
from octetrl.kernels.attention.qkv_rotate_backward import qkv_rotate_backward
from octetrl.kernels.optimizer.add_gradient import add_gradient
from octetrl.kernels.rows import rms_norm_backward as norm_module
from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward, rms_norm_backward_reference
from octetrl.kernels.rows.rope import rope, rope_triton
from octetrl.layers.rotary import Rotary, RotaryTable
from octetrl.models.blocks.attention.module import observe_amax
from octetrl.shapes.blocks import KVMode, KVTensors

EPS, NEVER, TOKENS = 1e-6, -1.0, 16384
WEIGHT = (24576, 4096)  # gate and up of Qwen3-8B
REPLAYS: dict[str, tuple[KVMode, KVTensors]] = {
    "bf16": ("none", "both"),
    "fp8_calibrated": ("calibrated", "both"),
    "fp8_dynamic": ("dynamic", "both"),
    "fp8_v_calibrated": ("calibrated", "v"),
}
Row = dict[str, object]
Outputs = list[Tensor]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_size: int
    qk_norm: bool
    hidden: int


SHAPES = {
    "qwen3-8b": Shape(32, 8, 128, True, 4096),
    "qwen3-1.7b": Shape(16, 8, 128, True, 2048),
    "qwen2.5-7b": Shape(28, 4, 128, False, 3584),
    "odd": Shape(5, 3, 64, True, 1001),
    "wide heads": Shape(4, 1, 256, True, 8192),
    "small heads": Shape(3, 2, 16, True, 80),
}


class Case(NamedTuple):
    """One kernel on one set of inputs, beside the chain that it replaces."""

    op: str
    precision: str
    fused: Callable[[], Outputs]
    chain: Callable[[], Outputs]
    exact: Callable[[], Outputs] | None  # in float64, for a backward
    moved: int  # bytes


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def rotary_of(shape: Shape, tokens: int) -> Rotary:
    return RotaryTable(shape.head_size, 1e6, None, 8192, device="cuda")(torch.randint(8192, (tokens,), device="cuda"))


def weights_of(shape: Shape) -> tuple[Tensor | None, Tensor | None]:
    q_weight, k_weight = (1 + normal(shape.head_size) / 10 for _ in range(2))
    return (q_weight, k_weight) if shape.qk_norm else (None, None)


def rotate_case(shape: Shape, tokens: int, precision: str, observe: bool = True) -> Case:
    """Per-head scales under which a few values saturate. Both sides raise an amax of their own."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    qkv, (q_weight, k_weight) = normal(tokens, sum(heads), shape.head_size), weights_of(shape)
    cos, sin = rotary_of(shape, tokens)
    v_scale = torch.linspace(0.004, 0.008, shape.kv_heads, device="cuda")
    mode, quantized = REPLAYS[precision]
    ours, theirs = (torch.full((2, 3, shape.kv_heads), NEVER, device="cuda")[:, 1] for _ in range(2))

    def fused() -> Outputs:
        q, kv = qkv_rotate(
            qkv, q_weight, k_weight, EPS, cos, sin, *heads[:2], kv_mode=mode, quantized=quantized,
            k_scale_K=1.5 * v_scale, v_scale_K=v_scale, amax_2K=ours if observe else None,
        )  # fmt: skip
        return [q, *(x for x in kv if x is not None), ours]

    def chain() -> Outputs:
        q, k, v = qkv.split(heads, dim=1)
        if q_weight is not None and k_weight is not None:
            q, k = rms_norm(q, q_weight, EPS), rms_norm(k, k_weight, EPS)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        if observe:
            observe_amax(theirs, k, v)
        kv = kv_replay(k, v, mode, 1.5 * v_scale, v_scale, quantized)
        return [q, *(x for x in kv if x is not None), theirs]

    read = sum(heads) if mode != "none" or observe else sum(heads[:2])
    written = sum(heads) if mode != "none" else sum(heads[:2])
    return Case("qkv_rotate", precision, fused, chain, None, 2 * tokens * shape.head_size * (read + written))


def rotate_back_case(shape: Shape, tokens: int) -> Case:
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    qkv, (q_weight, k_weight) = 2 * normal(tokens, sum(heads), shape.head_size), weights_of(shape)
    dq, dk, dv = (normal(tokens, count, shape.head_size) for count in heads)
    cos, sin = rotary_of(shape, tokens)

    def fused() -> Outputs:
        got = qkv_rotate_backward(dq, dk, dv, qkv, q_weight, k_weight, EPS, cos, sin)
        return [x for x in got if x is not None]

    def chain() -> Outputs:
        q, k, _ = qkv.split(heads, dim=1)
        back_q, back_k = rope_triton(dq, cos, sin, -1), rope_triton(dk, cos, sin, -1)
        if q_weight is None or k_weight is None:
            return [torch.cat([back_q, back_k, dv], 1)]
        back_q, dq_weight = rms_norm_backward(back_q, q, q_weight, EPS)
        back_k, dk_weight = rms_norm_backward(back_k, k, k_weight, EPS)
        return [torch.cat([back_q, back_k, dv], 1), dq_weight, dk_weight]

    def exact() -> Outputs:
        rows, weights = [], []
        c, s = cos.double()[:, None], sin.double()[:, None]
        for dy, x, weight in zip((dq, dk), qkv.split(heads, dim=1)[:2], (q_weight, k_weight), strict=True):
            first, second = dy.double().chunk(2, -1)
            back = torch.cat([first * c + second * s, second * c - first * s], -1)
            if weight is not None:
                back, dweight = exact_norm(back, x, weight)
                weights.append(dweight)
            rows.append(back)
        return [torch.cat([*rows, dv.double()], 1), *weights]

    elements = 2 * sum(heads) + (sum(heads[:2]) if shape.qk_norm else 0)
    return Case("qkv_rotate_backward", "bf16", fused, chain, exact, 2 * tokens * shape.head_size * elements)


def exact_norm(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm's backward in float64."""
    x, g = x.double(), dy.double() * weight.double()
    rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    xhat = x * rstd
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx, (dy.double() * xhat).reshape(-1, weight.numel()).sum(0)


def norm_case(x: Tensor, residual: bool) -> Case:
    dy, added = torch.randn_like(x), torch.randn_like(x) if residual else None
    weight = 1 + normal(x.shape[-1]) / 10

    def fused() -> Outputs:
        return [*rms_norm_backward(dy, x, weight, EPS, added)]

    def chain() -> Outputs:
        dx, dweight = rms_norm_backward_reference(dy, x, weight, EPS)
        return [dx if added is None else dx + added, dweight]

    def exact() -> Outputs:
        dx, dweight = exact_norm(dy, x, weight)
        return [dx if added is None else dx + added.double(), dweight]

    name = "rms_norm_backward" + (" + residual" if residual else "")
    return Case(name, "bf16", fused, chain, exact, x.numel() * (8 if residual else 6))


def sum_case(rows: int, columns: int) -> Case:
    """A weight's gradient added to its sum."""
    total, gradient = torch.zeros(rows, columns, device="cuda"), normal(rows, columns)

    def fused() -> Outputs:
        add_gradient(total, gradient)
        return [total]

    def chain() -> Outputs:
        return [total.add_(gradient)]

    return Case("add_gradient", "bf16", fused, chain, None, 10 * rows * columns)


# ---------------------------------------------------------------- right?


def differing(got: Outputs, want: Outputs) -> int:
    """How many bytes differ."""
    count = 0
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        a, b = (x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in (ours, theirs))
        count += int((a != b).sum())
    return count


def too_far(got: Outputs, exact: Outputs) -> int:
    """How many values are further away than half a step of BF16 and a little of the largest value in float32."""
    count = 0
    for ours, want in zip(got, exact, strict=True):
        bound = want.abs() * 2**-7.99 + 1e-5 * want.abs().max()
        count += int((~((ours.double() - want).abs() <= bound)).sum())
    return count


def backward_cases(shape: Shape, tokens: int) -> Iterator[Case]:
    yield rotate_back_case(shape, tokens)
    yield norm_case(3 * normal(tokens, shape.hidden), False)
    yield norm_case(3 * normal(tokens, shape.hidden), True)
    yield norm_case(normal(tokens, shape.heads + 2, shape.head_size)[:, 1:-1], False)


def faults(shape: Shape, tokens: int) -> dict[str, int]:
    """What is wrong, with counts."""
    counts: dict[str, int] = {}
    for precision in REPLAYS:
        case = rotate_case(shape, tokens, precision)
        counts[f"{case.op} {precision}"] = differing(case.fused(), case.chain())
    for case in backward_cases(shape, tokens):
        assert case.exact is not None
        got = case.fused()
        counts[case.op] = counts.get(case.op, 0) + too_far(got, case.exact())
        counts[f"{case.op} again"] = counts.get(f"{case.op} again", 0) + differing(case.fused(), got)
    return {what: count for what, count in counts.items() if count}


def check() -> bool:
    good = True
    for name, shape in SHAPES.items():
        for tokens in (7, 3001):
            wrong = faults(shape, tokens)
            print(f"{'FAIL' if wrong else 'OK'}  {name}, {tokens} tokens  {wrong or ''}")
            good = good and not wrong
    return good


# ---------------------------------------------------------------- times


def timed(case: Case, chain: bool = True, **setting: object) -> Row:
    us = median_us(case.fused)
    row: Row = {"op": case.op, "precision": case.precision, "workload": f"{TOKENS} tokens", "us": us, **setting}
    row |= {"tb_per_s": case.moved / us / 1e6, "floor_share": case.moved * 1e6 / us / MEMORY_BYTES_PER_SECOND}
    return row | {"chain_us": median_us(case.chain)} if chain else row


def timings() -> Iterator[Row]:
    shape = SHAPES["qwen3-8b"]
    for precision in REPLAYS:
        yield timed(rotate_case(shape, TOKENS, precision))
    yield timed(rotate_case(shape, TOKENS, "bf16", observe=False), observe=False)
    yield timed(rotate_back_case(shape, TOKENS))
    for residual in (False, True):
        yield timed(norm_case(normal(TOKENS, shape.hidden), residual))
    yield timed(sum_case(*WEIGHT), workload=f"{WEIGHT[0]} x {WEIGHT[1]}")


def sweep() -> Iterator[Row]:
    """Other tiles than those in use."""
    shape = SHAPES["qwen3-8b"]
    case = rotate_case(shape, TOKENS, "fp8_calibrated")
    for warps in (1, 2, 4, 8):
        rotate_module.WARPS = warps
        yield timed(case, False, tile=f"{warps} warps")
    case = rotate_back_case(shape, TOKENS)
    for programs, stages, warps in [
        (264, 2, 8), (264, 3, 8), (528, 1, 4), (528, 2, 4), (528, 3, 4), (660, 1, 4), (660, 2, 4), (660, 3, 4),
        (1056, 1, 2), (1056, 2, 2), (1056, 3, 2),
    ]:  # fmt: skip
        rotate_back_module.PROGRAMS, rotate_back_module.STAGES, rotate_back_module.WARPS = programs, stages, warps
        yield timed(case, False, tile=f"{programs} programs, {stages} stages, {warps} warps")
    case = norm_case(normal(TOKENS, shape.hidden), True)
    for programs, stages, elements in [
        (132, 3, 16), (264, 1, 16), (264, 2, 16), (264, 3, 16), (264, 4, 16), (264, 2, 8), (264, 3, 8), (396, 3, 32),
        (528, 2, 32), (528, 3, 32),
    ]:  # fmt: skip
        norm_module.PROGRAMS, norm_module.STAGES, norm_module.THREAD_ELEMENTS = programs, stages, elements
        yield timed(case, False, tile=f"{programs} programs, {stages} stages, {elements} elements a thread")


def show(rows: list[Row]) -> None:
    names = ("op", "precision", "observe", "tile", "us", "tb_per_s", "floor_share", "chain_us")
    columns = [name for name in names if any(name in row for row in rows)]
    table = Table(*columns, title=f"row kernels of training, {TOKENS} tokens, Qwen3-8B's shape")
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    need_hopper("kernels.training_rows")
    torch.manual_seed(0)
    good = check()
    rows = list(timings())
    show(rows)
    print(f"wrote {write_result('kernels', 'training_rows', rows, arguments.out)}")
    if arguments.sweep:
        show(list(sweep()))
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
