"""The gated delta rule: the one order in which it is computed, and that order in plain torch.

Of one value head, with S [V, K] float32, row by row (Yang et al. 2024, arXiv:2412.06464):

    S = exp(g) S        d = beta (v - S k)        S = S + d k^T        o = S q

Training, prefill in any pieces and decode compute a row in the same way, from earlier rows alone. A sequence's rows are
divided into chunks of 64 from its first token, and chunks into blocks of 16. With Gamma, the sum of g over the rows of
the chunk, added one after another in float32, and `round` to v's dtype, row i of a chunk that starts with state S is

    x_i = beta_i (v_i - exp(Gamma_i) (round(S) k_i))
    a_ij = (beta_i exp(Gamma_i - Gamma_j)) (k_i . k_j)
    x_i = x_i - sum_j round(a_ij) d_j      rows j of earlier blocks, in one accumulator that starts from x_i
    x_i = x_i - a_ij d_j                   earlier rows j of its own block, one after another, in float32
    d_i = round(x_i)
    o_i = exp(Gamma_i) (round(S) q_i) + sum_{j <= i} round(exp(Gamma_i - Gamma_j) (q_i . k_j)) d_j      accumulated

and the next chunk starts with

    S' = exp(Gamma_63) S + sum_j d_j round(exp(Gamma_63 - Gamma_j) k_j)^T      accumulated, float32

Here round(S) rounds ties away from zero (state.py). In float32 nothing is rounded. This form needs one reading of S a
row, where the recurrence also writes it, and a chunk's rows become products of matrices.

In this file every product is a float64 sum, rounded once to float32, and every exponential is computed in float64. So
neither the batch, nor pieces, nor threads matter. `Triton` kernels add in ascending order on tensor cores; zeros behind
a row, and blocks that a row does not read, change no accumulator.

B sequences, T tokens, A sequences with rows in the current block, H value heads, G key heads, R rows of a block, J rows
of a chunk, K and V sizes of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.kernels.delta_rule.state import DeltaState, join_planes, split_planes
from octetrl.shapes.delta_rule import CHUNK, DeltaShape

SUB = 16  # rows of a block
BLOCKS = CHUNK // SUB


class Rows(NamedTuple):
    """The inputs of every token, in any strides."""

    q: Tensor  # [T, G, K]
    k: Tensor  # [T, G, K]
    v: Tensor  # [T, H, V]
    g: Tensor  # [T, H] float32, at most 0
    beta: Tensor  # [T, H] float32


class Kept(NamedTuple):
    """The state and the open rows of B sequences; `DeltaState` explains them."""

    s: Tensor  # [B, H, V, K] float32
    k: Tensor  # [B, G, J, K]
    d: Tensor  # [B, H, J, V]
    gamma: Tensor  # [B, H, J]
    chunk: Tensor  # [B] int64


def shape_of(k: Tensor, v: Tensor) -> DeltaShape:
    """Of [T, G, K] and [T, H, V], which the kernels need contiguous."""
    assert k.is_contiguous() and v.is_contiguous(), "delta_rule: q, k and v must be contiguous"
    assert max(k.numel(), v.numel()) < 2**31, f"delta_rule: {len(v)} tokens are more than 32 bits can address"
    return DeltaShape(k.shape[1], v.shape[1], k.shape[2], v.shape[2])


def nothing_kept(num_sequences: int, rows: Rows) -> Kept:
    """Of sequences that start with these rows."""
    (G, K), (H, V) = rows.k.shape[1:], rows.v.shape[1:]
    device = rows.v.device
    return Kept(
        torch.zeros(num_sequences, H, V, K, device=device),
        torch.zeros(num_sequences, G, CHUNK, K, dtype=rows.v.dtype, device=device),
        torch.zeros(num_sequences, H, CHUNK, V, dtype=rows.v.dtype, device=device),
        torch.zeros(num_sequences, H, CHUNK, device=device),
        torch.zeros(num_sequences, dtype=torch.int64, device=device),
    )


def load_slots(state: DeltaState, slot_B: Tensor) -> Kept:
    s = join_planes(state.high[slot_B], state.low[slot_B])
    chunk_B = state.chunk[slot_B, 0, 0].long()
    k, gamma = _halves(state)
    return Kept(s, k[slot_B, :, chunk_B % 2], state.open_d[slot_B], gamma[slot_B, :, chunk_B % 2], chunk_B)


def store_slots(kept: Kept, state: DeltaState, slot_B: Tensor) -> None:
    state.high[slot_B], state.low[slot_B] = split_planes(kept.s)
    k, gamma = _halves(state)
    k[slot_B, :, kept.chunk % 2], state.open_d[slot_B], gamma[slot_B, :, kept.chunk % 2] = kept.k, kept.d, kept.gamma
    state.chunk[slot_B] = kept.chunk[:, None, None].to(torch.int32)


def _halves(state: DeltaState) -> tuple[Tensor, Tensor]:
    """Rows of k and of the decays, of even chunks and of odd ones."""
    return state.open_k.unflatten(2, (2, CHUNK)), state.open_gamma.unflatten(2, (2, CHUNK))


def run_rows(rows: Rows, bounds: Sequence[int], first_positions: Sequence[int], kept: Kept) -> Tensor:
    """o [T, H, V] in v's dtype; `kept` moves on. Sequence b has the rows bounds[b] : bounds[b + 1]."""
    out_THV = torch.zeros_like(rows.v, memory_format=torch.contiguous_format)
    spans = [
        (sequence, start, first, end - start)
        for sequence, (start, end, first) in enumerate(zip(bounds[:-1], bounds[1:], first_positions, strict=True))
        if end > start
    ]
    step = 0
    while spans:
        _run_block(rows, out_THV, kept, torch.tensor(spans, device=rows.v.device).unbind(1), step)
        step += 1
        spans = [span for span in spans if (span[2] + span[3] - 1) // SUB - span[2] // SUB >= step]
    return out_THV


def _run_block(rows: Rows, out_THV: Tensor, kept: Kept, spans: Sequence[Tensor], step: int) -> None:
    """The rows of block `step` of each span, counted from the block of its first row."""
    sequence_A, start_A, first_A, count_A = spans
    block_A = first_A // SUB + step
    _start_chunks(kept, sequence_A, block_A // BLOCKS)
    position_AR = block_A[:, None] * SUB + torch.arange(SUB, device=block_A.device)
    offset_AR = position_AR - first_A[:, None]
    is_new_AR = (offset_AR >= 0) & (offset_AR < count_A[:, None])
    token_AR = start_A[:, None] + torch.minimum(offset_AR.clamp(min=0), count_A[:, None] - 1)
    row_AR = position_AR % CHUNK
    q_AHRK, v_AHRV = (x[token_AR].transpose(1, 2) for x in (rows.q, rows.v))
    g_AHR, beta_AHR = (x[token_AR].transpose(1, 2) for x in (rows.g, rows.beta))
    new = is_new_AR.nonzero(as_tuple=True)
    at, row_N, token_N = sequence_A[new[0]], row_AR[new], token_AR[new]
    kept.k[at, :, row_N] = rows.k[token_N]
    gamma_AHR = _sum_decays(g_AHR, kept.gamma[sequence_A], row_AR, is_new_AR)
    kept.gamma[at, :, row_N] = gamma_AHR.transpose(1, 2)[new]

    group = kept.d.shape[1] // kept.k.shape[1]
    k_AHJK = kept.k[sequence_A].repeat_interleave(group, 1)
    q_AHRK = q_AHRK.repeat_interleave(group, 1)
    row_A1R1 = row_AR[:, None, :, None]
    k_AHRK = k_AHJK.gather(2, row_A1R1.expand(-1, k_AHJK.shape[1], -1, k_AHJK.shape[3]))
    row_J = torch.arange(CHUNK, device=row_AR.device)
    decay_AHRJ = _exp((gamma_AHR[..., None] - kept.gamma[sequence_A][:, :, None]).clamp(max=0.0))
    a_AHRJ = (beta_AHR[..., None] * decay_AHRJ) * _product(k_AHRK, k_AHJK.mT)
    p_AHRJ = torch.where(row_J <= row_A1R1, decay_AHRJ * _product(q_AHRK, k_AHJK.mT), 0.0)

    s_AHVK = kept.s[sequence_A]
    if rows.v.dtype != torch.float32:
        s_AHVK = split_planes(s_AHVK)[0].float()
    weight_AHR1 = _exp(gamma_AHR)[..., None]
    x_AHRV = beta_AHR[..., None] * (v_AHRV.float() - weight_AHR1 * _product(k_AHRK, s_AHVK.mT))
    first_A11J = row_AR[:, :1, None, None]
    d_AHJV = torch.where((row_J[:, None] < first_A11J), kept.d[sequence_A], 0.0)
    earlier_AHRJ = torch.where(row_J < first_A11J, a_AHRJ, 0.0).to(d_AHJV.dtype)
    x_AHRV = _product(-earlier_AHRJ, d_AHJV, x_AHRV)
    d_AHRV = _own_block(x_AHRV, a_AHRJ, kept.d[sequence_A], row_AR, is_new_AR)
    kept.d[at, :, row_N] = d_AHRV.transpose(1, 2)[new]
    d_AHJV = d_AHJV.scatter(2, row_A1R1.expand_as(d_AHRV), d_AHRV)
    o_AHRV = _product(p_AHRJ.to(d_AHJV.dtype), d_AHJV, weight_AHR1 * _product(q_AHRK, s_AHVK.mT))
    out_THV[token_N] = o_AHRV.transpose(1, 2)[new].to(out_THV.dtype)


def _own_block(x_AHRV: Tensor, a_AHRJ: Tensor, kept_AHJV: Tensor, row_AR: Tensor, is_new_AR: Tensor) -> Tensor:
    """d of the block's rows. Rows that are kept already are read, and rows behind the last new one are zero."""
    x_AHRV = x_AHRV.clone()
    d_AHRV = torch.zeros_like(x_AHRV, dtype=kept_AHJV.dtype)
    row_A = row_AR[:, 0]
    last_A = (is_new_AR * torch.arange(SUB, device=row_A.device)).amax(1)
    each = torch.arange(len(row_A), device=row_A.device)
    for column in range(int(last_A.max()) + 1):
        here_A = row_A + column
        is_new_A11 = is_new_AR[:, column, None, None]
        d_AHV = torch.where(is_new_A11, x_AHRV[:, :, column].to(d_AHRV.dtype), kept_AHJV[each, :, here_A])
        d_AHV = torch.where((column <= last_A)[:, None, None], d_AHV, 0.0)
        d_AHRV[:, :, column] = d_AHV
        a_AHR1 = a_AHRJ[each, :, column + 1 :, here_A][..., None]
        x_AHRV[:, :, column + 1 :] -= a_AHR1 * d_AHV.float()[:, :, None]
    return d_AHRV


def _sum_decays(g_AHR: Tensor, kept_AHJ: Tensor, row_AR: Tensor, is_new_AR: Tensor) -> Tensor:
    """Gamma of the block's rows, one addition after another."""
    each = torch.arange(len(row_AR), device=row_AR.device)
    gamma_AH = kept_AHJ[each, :, row_AR[:, 0] - 1]
    gamma_AH = torch.where((row_AR[:, 0] == 0)[:, None], 0.0, gamma_AH)
    gamma_AHR = torch.empty_like(g_AHR)
    for column in range(SUB):
        kept_AH = kept_AHJ[each, :, row_AR[:, column]]
        gamma_AH = torch.where(is_new_AR[:, column, None], gamma_AH + g_AHR[..., column], kept_AH)
        gamma_AHR[..., column] = gamma_AH
    return gamma_AHR


def _start_chunks(kept: Kept, sequence_A: Tensor, chunk_A: Tensor) -> None:
    """Let the open rows of the chunk before enter the state of sequences that start a chunk."""
    behind = kept.chunk[sequence_A] != chunk_A
    zero = sequence_A[chunk_A == 0]
    kept.s[zero], kept.chunk[zero] = 0.0, 0
    behind &= chunk_A > 0
    if not behind.any():
        return
    at = sequence_A[behind]
    assert torch.equal(kept.chunk[at] + 1, chunk_A[behind]), "delta_rule: rows do not follow those that a slot has"
    group = kept.d.shape[1] // kept.k.shape[1]
    gamma_AHJ = kept.gamma[at]
    weight_AHJ1 = _exp(gamma_AHJ[..., -1:] - gamma_AHJ)[..., None]
    w_AHJK = (weight_AHJ1 * kept.k[at].float().repeat_interleave(group, 1)).to(kept.k.dtype)
    decay_AH11 = _exp(gamma_AHJ[..., -1])[..., None, None]
    kept.s[at] = _product(kept.d[at].mT, w_AHJK, decay_AH11 * kept.s[at])
    kept.chunk[at] = chunk_A[behind]


def _product(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """start + a b, a float64 sum, rounded once to float32."""
    product = torch.matmul(a.double(), b.double())
    return (product if start is None else product.add_(start)).float()


def _exp(x: Tensor) -> Tensor:
    """Of float32; torch's own is vectorised, and differs in the last bit between a loop's body and its tail."""
    return x.double().exp_().float()
