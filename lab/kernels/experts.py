"""Times the experts of one layer, in decode and in training: the fused node (models/blocks/moe/experts.py) and the
separate operations.

At the shapes of Qwen3-30B-A3B and Moonlight, in BF16 and FP8, fused and separate. Decode: router's groups to the
rows' outputs at 64 to 512 tokens, in a CUDA graph, beside the time in which 4.3 TB/s read the matrices of the experts
that have a row. Training: forward and backward of 16,384 tokens with gradients of the weights, TFLOP/s of the products,
and the peak of memory over what was there; then the gradient of the experts' sum, by its kernel and by torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lab.kernels.clock import Row, median_us, median_us_with_launches
from octetrl.bench.rows import MEMORY_BYTES_PER_SECOND
from octetrl.kernels.rows.combine_experts_backward import (
    combine_experts_backward,
    combine_experts_backward_reference,
)
from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.layers.stacked import Float8StackedLinear, RowGroups, StackedLinear, group_rows
from octetrl.models.blocks.moe.experts import run_experts
from octetrl.models.blocks.moe.module import gather

Linears = tuple[StackedLinear | Float8StackedLinear, StackedLinear | Float8StackedLinear]
FORMS = ("fused", "separate")
DECODE, TRAINING = (64, 128, 256, 512), 16_384


class Shape(NamedTuple):
    experts: int
    chosen: int
    hidden: int
    inner: int


SHAPES = {"qwen3-30b-a3b": Shape(128, 8, 2048, 768), "moonlight-16b-a3b": Shape(64, 6, 2048, 1408)}


def _work(phase: str, tokens: int) -> Row:
    return {"phase": phase, "tokens": tokens, "workload": f"{phase} of {tokens} tokens"}


def linears_of(shape: Shape, precision: str) -> Linears:
    sizes = ((shape.hidden, 2 * shape.inner), (shape.inner, shape.hidden))
    made: list[StackedLinear | Float8StackedLinear] = []
    for columns, rows in sizes:
        if precision == "bf16":
            made.append(StackedLinear(columns, rows, shape.experts, device="cuda"))
        else:
            linear = Float8StackedLinear(columns, rows, shape.experts, device="cuda", backend="scaled_mm")
            linear.requantize()
            made.append(linear)
    return made[0], made[1]


def run(form: str, x_TE: Tensor, groups: RowGroups, linears: Linears) -> Tensor:
    gate_up, down = linears
    if form == "fused":
        return run_experts(x_TE, groups, gate_up, down).down_PE
    return down(silu_mul(gate_up(gather(x_TE, groups), groups)), groups)


def inputs_of(shape: Shape, tokens: int) -> tuple[Tensor, RowGroups]:
    x_TE = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, device="cuda")
    expert_TS = torch.rand(tokens, shape.experts, device="cuda").topk(shape.chosen).indices.sort(1).values
    return x_TE, group_rows(expert_TS, shape.experts)


def gradients(form: str, x_TE: Tensor, groups: RowGroups, linears: Linears) -> tuple[Tensor, ...]:
    leaf_TE = x_TE.detach().requires_grad_()
    out_PE = run(form, leaf_TE, groups, linears)
    weights = [linear.weight for linear in linears if linear.weight is not None]
    return out_PE, *torch.autograd.grad(out_PE, [leaf_TE, *weights], torch.ones_like(out_PE))


def measure(arguments: argparse.Namespace) -> list[Row]:
    kinds = [(name, shape, precision) for name, shape in SHAPES.items() for precision in ("bf16", "fp8")]
    return [row for kind in kinds for row in _layer(*kind)]


def _layer(name: str, shape: Shape, precision: str) -> Iterator[Row]:
    linears, head = linears_of(shape, precision), {"model": name, "precision": precision}
    matrix_bytes = 3 * shape.hidden * shape.inner * (2 if precision == "bf16" else 1)
    for form in FORMS:
        for tokens in DECODE:
            x_TE, groups = inputs_of(shape, tokens)
            read = matrix_bytes * int((groups.load_X > 0).sum())
            with torch.no_grad():
                us = median_us(partial(run, form, x_TE, groups, linears))
            row = head | {"form": form, **_work("decode", tokens), "us": us}
            yield row | {"floor_share": read / MEMORY_BYTES_PER_SECOND * 1e6 / us}
        x_TE, groups = inputs_of(shape, TRAINING)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        us = median_us_with_launches(partial(gradients, form, x_TE, groups, linears))
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        flops = 18 * shape.hidden * shape.inner * shape.chosen * TRAINING
        row = head | {"form": form, **_work("training", TRAINING), "us": us}
        yield row | {"tflop_per_s": flops / us / 1e6, "peak_gb": peak}
    x_TE, groups = inputs_of(shape, TRAINING)
    y_PE = torch.randn(TRAINING * shape.chosen, shape.hidden, dtype=torch.bfloat16, device="cuda")
    weight_TS = torch.rand(TRAINING, shape.chosen, device="cuda")
    for form, backward in (("kernel", combine_experts_backward), ("torch", combine_experts_backward_reference)):
        us = median_us_with_launches(partial(backward, x_TE, y_PE, weight_TS, groups.row_TS))
        yield head | {"form": form, **_work("gradient of the sum", TRAINING), "us": us}
