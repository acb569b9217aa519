"""The gated delta rule of packed training sequences, forward and backward.

The forward has the bits of the engine's rows (delta_rule_reference.py has the order). The backward owes nobody its
bits. It differentiates the formula without roundings, by chunks. Of one chunk and one value head, as matrices of rows,
with G = exp(Gamma), E_ij = exp(Gamma_i - Gamma_j), A = strictly lower (beta E K K^T), P = lower (E Q K^T), W = E_63 K:

    X = beta (V - G K S^T)    D = (1 + A)^-1 X    O = G Q S^T + P D    S' = G_63 S + D^T W
    dD = P^T dO + W dS'^T     dX = (1 + A)^-T dD                       dS = G_63 dS' + (G dO)^T Q - (beta G dX)^T K
    dA = -strictly lower (dX D^T)      dP = lower (dO D^T)
    dV = beta dX                       dbeta = rows of dX . (V - G K S^T - (A / beta) D)
    dQ = G dO S + (E dP) K             dK = -beta G dX S + (E dP)^T Q + M K + M^T K + E_63 D dS',   M = beta E dA
    dGamma = rows minus columns of dA A + dP P, plus dO . G Q S^T - dX . beta G K S^T, minus h = D . W dS'^T;
             and for row 63 the sum of h and G_63 S . dS'
    dg = the sum of dGamma over this row and those behind it

T tokens, H value heads, K and V sizes of heads, N chunks, J rows of a chunk.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octetrl.kernels.delta_rule.delta_rule_chunks import delta_rule_chunks
from octetrl.kernels.delta_rule.delta_rule_packed_backward import delta_rule_packed_backward_triton
from octetrl.kernels.delta_rule.delta_rule_reference import Rows, nothing_kept, run_rows, shape_of
from octetrl.kernels.delta_rule.delta_rule_rows import delta_rule_rows
from octetrl.shapes.delta_rule import CHUNK


def delta_rule_packed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens_B1: Tensor, max_seqlen: int
) -> Tensor:
    """o [T, H, V] in v's dtype. Differentiable in the first five.

    q, k: [T, key heads, K], q with its scale. v: [T, H, V], BF16 (or float32). g, beta: [T, H] float32, g at most 0.
    cu_seqlens_B1: int32. max_seqlen: at least the longest sequence's length. Rows outside every sequence are zero.
    """
    out_THV: Tensor = _DeltaRulePacked.apply(q, k, v, g, beta, cu_seqlens_B1, max_seqlen)
    return out_THV


def delta_rule_packed_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens_B1: Tensor, max_seqlen: int
) -> Tensor:
    """The forward only."""
    if not _runs_kernels(v):
        return delta_rule_packed_reference(q, k, v, g, beta, cu_seqlens_B1)
    return delta_rule_packed_triton(q, k, v, g, beta, cu_seqlens_B1)


def delta_rule_packed_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens_B1: Tensor, max_seqlen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg and dbeta in the dtypes of q, k, v, g and beta. Zero outside every sequence."""
    if not _runs_kernels(v):
        return delta_rule_packed_backward_reference(do, q, k, v, g, beta, cu_seqlens_B1)
    shape = shape_of(k, v)
    chunks = delta_rule_chunks(q, k, g, beta, cu_seqlens_B1, shape)
    _, kept = delta_rule_rows(q, k, v, beta, cu_seqlens_B1, chunks, shape, keep=True)
    assert kept is not None
    return delta_rule_packed_backward_triton(do.contiguous(), q, k, v, g, beta, cu_seqlens_B1, shape, chunks, kept)


def _runs_kernels(v: Tensor) -> bool:
    """A model in float32 has the plain form everywhere."""
    return v.is_cuda and v.dtype == torch.bfloat16


def delta_rule_packed_triton(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens_B1: Tensor) -> Tensor:
    """The forward by kernels."""
    shape = shape_of(k, v)
    chunks = delta_rule_chunks(q, k, g, beta, cu_seqlens_B1, shape)
    return delta_rule_rows(q, k, v, beta, cu_seqlens_B1, chunks, shape)[0]


class _DeltaRulePacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:6])
        ctx.max_seqlen = arguments[6]
        return delta_rule_packed_forward(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, cu_seqlens_B1 = ctx.saved_tensors
        found = delta_rule_packed_backward(gradients[0], q, k, v, g, beta, cu_seqlens_B1, ctx.max_seqlen)
        return (*found, None, None)


# ---------------------------------------------------------------- plain torch


def delta_rule_packed_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens_B1: Tensor
) -> Tensor:
    """The forward."""
    bounds, rows = cu_seqlens_B1.tolist(), Rows(q, k, v, g, beta)
    num_sequences = len(bounds) - 1
    return run_rows(rows, bounds, [0] * num_sequences, nothing_kept(num_sequences, rows))


def delta_rule_packed_backward_reference(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens_B1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward in float32, a sequence at a time."""
    inputs = (do, q, k, v, g, beta)
    dq, dk, dv, dg, dbeta = gradients = tuple(
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs[1:]
    )
    for start, end in itertools.pairwise(cu_seqlens_B1.tolist()):
        if end > start:
            found = _sequence_backward(*(x[start:end] for x in inputs))
            for gradient, x in zip(gradients, found, strict=True):
                gradient[start:end] = x
    return dq, dk, dv, dg, dbeta


def _chunks(x_THX: Tensor, heads: int) -> Tensor:
    """float32 [N, heads, J, ...] of [T, heads of q, k or v, ...], with zeros behind the last row."""
    x_THX = x_THX.float()
    x_THX = F.pad(x_THX, (*[0, 0] * (x_THX.dim() - 1), 0, -len(x_THX) % CHUNK))
    x_NHJX = x_THX.unflatten(0, (-1, CHUNK)).transpose(1, 2)
    return x_NHJX.repeat_interleave(heads // x_NHJX.shape[1], 1)


def _sequence_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (T, H), key_heads = g.shape, q.shape[1]
    do, q, k, v, g, beta = (_chunks(x, H) for x in (do, q, k, v, g, beta))
    gamma, beta = g.cumsum(-1)[..., None], beta[..., None]
    e = (gamma - gamma.mT).clamp(max=0.0).exp().tril()
    G, last = gamma.exp(), gamma[..., -1:, :]
    kk = (k @ k.mT).tril(-1)
    a, p, w = beta * e * kk, e * (q @ k.mT), (last - gamma).exp() * k
    inverse = torch.linalg.inv(torch.eye(CHUNK, device=a.device) + a)
    decay = last.exp()
    s, d = [torch.zeros_like(v[0].mT @ k[0])], []
    for n in range(len(v)):
        d.append(inverse[n] @ (beta[n] * (v[n] - G[n] * (k[n] @ s[n].mT))))
        s.append(decay[n] * s[n] + d[n].mT @ w[n])
    dx, ds = [], [torch.zeros_like(s[0])]  # from the last chunk to the first
    for n in reversed(range(len(v))):
        dx.append(inverse[n].mT @ (p[n].mT @ do[n] + w[n] @ ds[-1].mT))
        ds.append(decay[n] * ds[-1] + (G[n] * do[n]).mT @ q[n] - (beta[n] * G[n] * dx[-1]).mT @ k[n])
    S, D, dX, dS = torch.stack(s[:-1]), torch.stack(d), torch.stack(dx[::-1]), torch.stack(ds[-2::-1])
    dA, dP = -(dX @ D.mT).tril(-1), (do @ D.mT).tril()
    m, ep = beta * e * dA, e * dP
    dq = G * (do @ S) + ep @ k
    wds = (last - gamma).exp() * (D @ dS)
    dk = -beta * G * (dX @ S) + ep.mT @ q + (m + m.mT) @ k + wds
    u = v - G * (k @ S.mT)
    dbeta = (dX * (u - (e * kk) @ D)).sum(-1)
    both, h = dA * a + dP * p, (k * wds).sum(-1)
    dgamma = both.sum(-1) - both.sum(-2) + (do * (G * (q @ S.mT))).sum(-1) + (dX * beta * (u - v)).sum(-1) - h
    dgamma[..., -1] += h.sum(-1) + (decay * S * dS).sum((-1, -2))
    dg = dgamma.flip(-1).cumsum(-1).flip(-1)

    def tokens(x_NHJX: Tensor, heads: int) -> Tensor:
        x_THX = x_NHJX.transpose(1, 2).flatten(0, 1)[:T]
        return x_THX.unflatten(1, (heads, -1)).sum(2)

    return tokens(dq, key_heads), tokens(dk, key_heads), tokens(beta * dX, H), tokens(dg, H), tokens(dbeta, H)
