"""The row kernels of training around attention and norms, each beside the chain that it replaces.

Forward: q, K, V, scales and amax of QK-norm, RoPE and KV replay one after the other, in every mode of the cache.
Backward: also in float64. For the tests of bits, and for `lab.kernels.rows`, which times them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.kernels.attention.kv_store import kv_replay
from octetrl.kernels.attention.qkv_rotate import qkv_rotate
from octetrl.kernels.attention.qkv_rotate_backward import qkv_rotate_backward
from octetrl.kernels.attention.records import Replay, Rotation
from octetrl.kernels.optimizer.add_gradient import add_gradient
from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward, rms_norm_backward_reference
from octetrl.kernels.rows.rope import rope, rope_triton
from octetrl.layers.rotary import RotaryTable
from octetrl.models.blocks.attention.module import observe_amax
from octetrl.shapes.blocks import KVMode, KVTensors
from tests.gpu.compare import differing

EPS, NEVER = 1e-6, -1.0
REPLAYS: dict[str, tuple[KVMode, KVTensors]] = {
    "bf16": ("none", "both"),
    "fp8_calibrated": ("calibrated", "both"),
    "fp8_dynamic": ("dynamic", "both"),
    "fp8_v_calibrated": ("calibrated", "v"),
}
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


def rotation_of(shape: Shape, tokens: int) -> Rotation:
    q_weight, k_weight = (1 + normal(shape.head_size) / 10 if shape.qk_norm else None for _ in range(2))
    table = RotaryTable(shape.head_size, 1e6, None, 8192, device="cuda")
    return Rotation(q_weight, k_weight, EPS, *table(torch.randint(8192, (tokens,), device="cuda")))


def rotate_case(shape: Shape, tokens: int, precision: str, observe: bool = True) -> Case:
    """Per-head scales under which a few values saturate. Both sides raise an amax of their own."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    qkv, rotation = normal(tokens, sum(heads), shape.head_size), rotation_of(shape, tokens)
    q_weight, k_weight, _, cos, sin, _ = rotation
    v_scale = torch.linspace(0.004, 0.008, shape.kv_heads, device="cuda")
    mode, quantized = REPLAYS[precision]
    replay = Replay(mode, 1.5 * v_scale, v_scale, quantized)
    ours, theirs = (torch.full((2, 3, shape.kv_heads), NEVER, device="cuda")[:, 1] for _ in range(2))

    def fused() -> Outputs:
        q, kv = qkv_rotate(qkv, rotation, shape.kv_heads, replay, ours if observe else None)
        return [q, *(x for x in kv if x is not None), ours]

    def chain() -> Outputs:
        q, k, v = qkv.split(heads, dim=1)
        if q_weight is not None and k_weight is not None:
            q, k = rms_norm(q, q_weight, EPS), rms_norm(k, k_weight, EPS)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        if observe:
            observe_amax(theirs, k, v)
        kv = kv_replay(k, v, replay)
        return [q, *(x for x in kv if x is not None), theirs]

    read = sum(heads) if mode != "none" or observe else sum(heads[:2])
    written = sum(heads) if mode != "none" else sum(heads[:2])
    return Case("qkv_rotate", precision, fused, chain, None, 2 * tokens * shape.head_size * (read + written))


def rotate_back_case(shape: Shape, tokens: int) -> Case:
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    qkv, rotation = 2 * normal(tokens, sum(heads), shape.head_size), rotation_of(shape, tokens)
    q_weight, k_weight, _, cos, sin, _ = rotation
    dq, dk, dv = (normal(tokens, count, shape.head_size) for count in heads)

    def fused() -> Outputs:
        got = qkv_rotate_backward(dq, dk, dv, qkv, rotation)
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
