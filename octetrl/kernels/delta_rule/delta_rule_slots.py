"""The gated delta rule of new rows in the engine: prefill in any pieces, decode, and drafts, over slots.

A row's bits are those that `delta_rule_packed` computes (delta_rule_reference.py has the order).

T tokens, H value heads, V their size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.kernels.delta_rule.delta_rule_chunks import delta_rule_chunks
from octetrl.kernels.delta_rule.delta_rule_decode import delta_rule_decode
from octetrl.kernels.delta_rule.delta_rule_reference import Rows, load_slots, run_rows, shape_of, store_slots
from octetrl.kernels.delta_rule.delta_rule_rows import delta_rule_rows
from octetrl.kernels.delta_rule.state import DeltaState, SlotRows


def delta_rule_slots(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: SlotRows, state: DeltaState
) -> Tensor:
    """o [T, H, V] in v's dtype. `state` moves on, in place, and no row behind these is kept. Shapes as in
    `delta_rule_packed`, all contiguous. On a GPU, `rows.one_chunk` selects the decode kernel."""
    on_gpu = v.is_cuda and v.dtype == torch.bfloat16
    run = delta_rule_slots_triton if on_gpu else delta_rule_slots_reference
    return run(q, k, v, g, beta, rows, state)


def delta_rule_slots_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: SlotRows, state: DeltaState
) -> Tensor:
    """The same by kernels."""
    shape = shape_of(k, v)
    if rows.one_chunk:
        return delta_rule_decode(q, k, v, g, beta, rows, state, shape)
    chunks = delta_rule_chunks(q, k, g, beta, rows.cu_seqlens_B1, shape, rows, state)
    return delta_rule_rows(q, k, v, beta, rows.cu_seqlens_B1, chunks, shape, rows, state)[0]


def delta_rule_slots_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: SlotRows, state: DeltaState
) -> Tensor:
    """The same in plain torch."""
    bounds, slots, first = rows.cu_seqlens_B1.tolist(), rows.slot_B.tolist(), rows.first_position_B.tolist()
    live = [b for b, slot in enumerate(slots) if slot >= 0 and bounds[b] < bounds[b + 1]]
    kept = load_slots(state, rows.slot_B[live])
    inputs = Rows(q, k, v, g, beta)
    if len(live) == len(slots):
        out_THV = run_rows(inputs, bounds, first, kept)
    else:
        token_N = torch.cat([torch.arange(bounds[b], bounds[b + 1]) for b in live] or [torch.arange(0)]).to(v.device)
        ends = torch.tensor([bounds[b + 1] - bounds[b] for b in live]).cumsum(0).tolist()
        out_THV = torch.zeros_like(v, memory_format=torch.contiguous_format)
        out_THV[token_N] = run_rows(Rows(*(x[token_N] for x in inputs)), [0, *ends], [first[b] for b in live], kept)
    store_slots(kept, state, rows.slot_B[live])
    return out_THV
