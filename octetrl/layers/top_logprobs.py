"""Log-probs of K tokens a row, without the logits of all rows in memory at once.

    top_logprobs   the K likeliest tokens and their log-probs, without gradient: for a teacher
    logprobs_at    the log-probs of K given tokens, differentiable: for the policy

    z = logits / temperature,  logprob_k = z[id_k] - lse(z)
    dlogits = (sum_k g_k onehot(id_k) - (sum_k g_k) p) / temperature

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
    fast: bool = False,
    cut: HeadCut | None = None,
) -> tuple[Tensor, Tensor]:
    """Ids (int64) and log-probs (float32), [N, K], of the likeliest tokens with an id below `below`, likeliest
    first."""
    k = min(k, below, weight_VE.shape[0] if cut is None else cut.vocab_size)
    ids_NK = torch.empty(hidden_NE.shape[0], k, dtype=torch.int64, device=hidden_NE.device)
    logprobs_NK = torch.empty(hidden_NE.shape[0], k, dtype=torch.float32, device=hidden_NE.device)
    for rows in pieces(0, hidden_NE.shape[0], chunk):
        z_CV = lm_head_logits(hidden_NE[rows], weight_VE, fast, cut).div_(temperature)
        top_CK, ids_NK[rows] = z_CV[:, :below].topk(k, dim=1)
        logprobs_NK[rows] = top_CK - z_CV.logsumexp(1, keepdim=True)
    return ids_NK, logprobs_NK


def logprobs_at(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    ids_NK: Tensor,
    *,
    temperature: float,
    chunk: int,
    fast: bool = False,
    cut: HeadCut | None = None,
) -> Tensor:
    """Log-prob of each given token, float32 [N, K], differentiable in hidden and weight. The ids of a row are
    distinct."""
    made: Tensor = _LogprobsAt.apply(hidden_NE, weight_VE, ids_NK, temperature, chunk, fast, cut)
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
        fast: bool,
        cut: HeadCut | None,
    ) -> Tensor:
        logprobs_NK = torch.empty(ids_NK.shape, dtype=torch.float32, device=hidden_NE.device)
        lse_N = torch.empty(ids_NK.shape[0], dtype=torch.float32, device=hidden_NE.device)
        for rows in pieces(0, ids_NK.shape[0], chunk):
            z_CV = lm_head_logits(hidden_NE[rows], weight_VE, fast, cut).div_(temperature)
            lse_N[rows] = z_CV.logsumexp(1)
            logprobs_NK[rows] = z_CV.gather(1, ids_NK[rows]) - lse_N[rows, None]
        ctx.save_for_backward(hidden_NE, weight_VE, ids_NK, lse_N)
        ctx.temperature, ctx.chunk, ctx.fast, ctx.cut = temperature, chunk, fast, cut
        return logprobs_NK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, *tuple[None, ...]]:
        hidden_NE, weight_VE, ids_NK, lse_N = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if not hidden_NE.shape[0]:
            return (
                torch.zeros_like(hidden_NE) if needs[0] else None,
                torch.zeros_like(weight_VE) if needs[1] else None,
                *(None, None, None, None, None),
            )
        dlogprobs_NK = grads[0]

        def gradient_into(rows: slice, dlogits_CV: Tensor) -> None:
            z_CV = lm_head_logits(hidden_NE[rows], weight_VE, ctx.fast, ctx.cut).div_(ctx.temperature)
            p_CV = z_CV.sub_(lse_N[rows, None]).exp_()
            dz_CV = p_CV.mul_(-dlogprobs_NK[rows].sum(1, keepdim=True))
            dz_CV.scatter_add_(1, ids_NK[rows], dlogprobs_NK[rows])
            dlogits_CV.copy_(dz_CV.div_(ctx.temperature))

        gradients = linear_logprobs_backward(hidden_NE, weight_VE, gradient_into, ctx.chunk, needs, ctx.cut)
        return *gradients, None, None, None, None, None
