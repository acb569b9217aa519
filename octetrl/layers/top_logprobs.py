"""Log-probs of K tokens a row and of all others together, without the logits of all rows in memory at once.

    top_logprobs   the K likeliest tokens and their log-probs, without gradient: for a teacher
    logprobs_at    the log-probs of K given tokens, differentiable: for the policy

    z = logits / temperature,  rest = lse of the other z,  lse = lse(z[id_1], ..., z[id_K], rest)
    logprob_k = z[id_k] - lse,  logprob of the others = rest - lse          -inf if there are none
    dz of id_k  = g_k - G p_k,  dz of another v = exp(z_v - rest) (g_rest - G p_rest)          G: the sum of all g

1 - sum p_k would lose the probability of the others where it is small: float32 has steps of 6e-8 below 1.
Both compute logits for `chunk` rows at a time, as linear_logprobs.py does, and the backward computes them again. Memory
is a few float32 tensors of [chunk, V] for any N. This is plain torch: five passes over the logits, beside two GEMMs of
2 N V E FLOPs. A kernel would need one pass.

N rows, V vocabulary, E hidden size, K tokens a row, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octetrl.kernels.gemm.linear_logprobs import lm_head_logits
from octetrl.kernels.gemm.linear_logprobs_backward import HeadCut, linear_logprobs_backward, pieces


@torch.no_grad()
def top_logprobs(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    k: int,
    *,
    below: int,
    temperature: float,
    chunk: int,
    cut: HeadCut | None = None,
) -> tuple[Tensor, Tensor]:
    """Ids (int64 [N, K]) of the likeliest tokens with an id below `below`, likeliest first; and float32 [N, K + 1]:
    their log-probs, and that of all other tokens together."""
    k = min(k, below, weight_VE.shape[0] if cut is None else cut.vocab_size)
    ids_NK = torch.empty(hidden_NE.shape[0], k, dtype=torch.int64, device=hidden_NE.device)
    logprobs_NK1 = torch.empty(hidden_NE.shape[0], k + 1, dtype=torch.float32, device=hidden_NE.device)
    for rows in pieces(0, hidden_NE.shape[0], chunk):
        z_CV = lm_head_logits(hidden_NE[rows], weight_VE, cut).div_(temperature)
        ids_NK[rows] = z_CV[:, :below].topk(k, dim=1).indices
        z_CK1 = _with_rest(z_CV, ids_NK[rows])
        logprobs_NK1[rows] = z_CK1.log_softmax(1)
    return ids_NK, logprobs_NK1


def logprobs_at(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    ids_NK: Tensor,
    *,
    temperature: float,
    chunk: int,
    cut: HeadCut | None = None,
) -> Tensor:
    """Log-prob of each given token and of all others together, float32 [N, K + 1], differentiable in hidden and weight.
    The ids of a row are distinct."""
    made: Tensor = _LogprobsAt.apply(hidden_NE, weight_VE, ids_NK, temperature, chunk, cut)
    return made


class _LogprobsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        ids_NK: Tensor,
        temperature: float,
        chunk: int,
        cut: HeadCut | None,
    ) -> Tensor:
        rows_N, k = ids_NK.shape
        logprobs_NK1 = torch.empty(rows_N, k + 1, dtype=torch.float32, device=hidden_NE.device)
        rest_N = torch.empty(rows_N, dtype=torch.float32, device=hidden_NE.device)
        for rows in pieces(0, ids_NK.shape[0], chunk):
            z_CV = lm_head_logits(hidden_NE[rows], weight_VE, cut).div_(temperature)
            z_CK1 = _with_rest(z_CV, ids_NK[rows])
            rest_N[rows] = z_CK1[:, -1]
            logprobs_NK1[rows] = z_CK1.log_softmax(1)
        ctx.save_for_backward(hidden_NE, weight_VE, ids_NK, rest_N, logprobs_NK1)
        ctx.temperature, ctx.chunk, ctx.cut = temperature, chunk, cut
        return logprobs_NK1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, *tuple[None, ...]]:
        hidden_NE, weight_VE, ids_NK, rest_N, logprobs_NK1 = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if not hidden_NE.shape[0]:
            return (
                torch.zeros_like(hidden_NE) if needs[0] else None,
                torch.zeros_like(weight_VE) if needs[1] else None,
                *(None, None, None, None),
            )
        dz_NK1 = grads[0] - grads[0].sum(1, keepdim=True) * logprobs_NK1.exp()

        def gradient_into(rows: slice, dlogits_CV: Tensor) -> None:
            z_CV = lm_head_logits(hidden_NE[rows], weight_VE, ctx.cut).div_(ctx.temperature)
            dz_CV = z_CV.sub_(rest_N[rows, None]).exp_().mul_(dz_NK1[rows, -1:])  # of the others
            dz_CV.scatter_(1, ids_NK[rows], dz_NK1[rows, :-1])
            dlogits_CV.copy_(dz_CV.div_(ctx.temperature))

        gradients = linear_logprobs_backward(hidden_NE, weight_VE, gradient_into, ctx.chunk, needs, ctx.cut)
        return *gradients, None, None, None, None


def _with_rest(z_CV: Tensor, ids_CK: Tensor) -> Tensor:
    """z of the given tokens and, last, the logsumexp of all others: [C, K + 1]. Overwrites `z_CV`."""
    z_CK = z_CV.gather(1, ids_CK)
    rest_C1 = z_CV.scatter_(1, ids_CK, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([z_CK, rest_C1], dim=1)
