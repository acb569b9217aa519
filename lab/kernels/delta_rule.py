"""Times gated DeltaNet's kernels at the sizes of a 35B mixture: 16 key heads, 32 value heads, 128 x 128.

Training: 8,192 tokens in 1, 8 or 64 sequences, forward and backward. Decode: one row of 1 to 256 sequences in the
middle of a chunk; the state's high plane and half of a chunk's open rows are what it must read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from lab.kernels.clock import Row, median_us, median_us_with_launches
from octetrl.kernels.delta_rule.conv_heads import Heads, conv_heads_backward, conv_heads_packed, conv_heads_slots
from octetrl.kernels.delta_rule.delta_rule_packed import delta_rule_packed_backward, delta_rule_packed_forward
from octetrl.kernels.delta_rule.delta_rule_slots import delta_rule_slots
from octetrl.kernels.delta_rule.gated_rms_norm import gated_rms_norm
from octetrl.kernels.delta_rule.state import SlotRows, empty_state
from octetrl.shapes.delta_rule import DeltaShape

SHAPE = DeltaShape(16, 32, 128, 128)
TOKENS, PREFIX = 8192, 32
SEQUENCES, BATCHES = (1, 8, 64), (1, 8, 32, 128, 256)


def _row(workload: str, us: float) -> Row:
    return {"precision": "bf16", "workload": workload, "us": us}


def _inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, Heads, torch.Tensor, torch.Tensor]:
    x, weight = (
        torch.randn(n, c, device="cuda").bfloat16() for n, c in ((tokens, SHAPE.channels), (SHAPE.channels, 4))
    )
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    g, beta = -0.1 * torch.rand(2, tokens, SHAPE.value_heads, device="cuda")
    return x, weight, conv_heads_packed(x, weight, bounds, tokens, SHAPE), g, -beta


def _training(sequences: int) -> list[Row]:
    x, weight, heads, g, beta = _inputs(TOKENS)
    length = TOKENS // sequences
    bounds = torch.arange(0, TOKENS + 1, length, device="cuda").int()
    calls: dict[str, Callable[[], object]] = {
        "conv": lambda: conv_heads_packed(x, weight, bounds, length, SHAPE),
        "conv backward": lambda: conv_heads_backward(*heads, x, weight, bounds, length, SHAPE),
        "forward": lambda: delta_rule_packed_forward(*heads, g, beta, bounds, length),
        "backward": lambda: delta_rule_packed_backward(heads.v, *heads, g, beta, bounds, length),
    }
    return [_row(f"{name}, {sequences} x {length}", median_us_with_launches(call)) for name, call in calls.items()]


def _decoding(batch: int) -> list[Row]:
    x, weight, heads, g, beta = _inputs(batch)
    norm = torch.ones(SHAPE.value_size, device="cuda").bfloat16()
    state = empty_state(SHAPE, batch, SHAPE.conv_rows(1), torch.bfloat16, "cuda")
    for kept in state:
        kept.zero_()
    slots = torch.arange(batch, device="cuda")
    bounds = torch.arange(batch + 1, device="cuda").int()
    state.chunk.fill_(1)
    rows = SlotRows(bounds, slots, torch.full_like(slots, 64 + PREFIX), 1, one_chunk=True)
    calls: dict[str, Callable[[], object]] = {
        "decode conv": lambda: conv_heads_slots(x, weight, rows, state, SHAPE),
        "decode": lambda: delta_rule_slots(*heads, g, beta, rows, state),
        "decode norm": lambda: gated_rms_norm(heads.v, heads.v, norm, 1e-6),
    }
    return [_row(f"{name}, {batch} rows", median_us(call)) for name, call in calls.items()]


def measure(arguments: argparse.Namespace) -> list[Row]:
    training = [row for sequences in SEQUENCES for row in _training(sequences)]
    return training + [row for batch in BATCHES for row in _decoding(batch)]
