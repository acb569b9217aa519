"""Token embedding: one row of a matrix for each token.

The gradient adds the rows of equal tokens in float32, in one order, and rounds once
(kernels/rows/embedding_gradient.py).

T tokens, V vocabulary, E hidden size.

**Lm head.** The output matrix of a model whose embeddings are not tied.

It is never FP8. Logits, log-softmax and loss are float32 (kernels/gemm/linear_logprobs.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octetrl.kernels.rows.embedding_gradient import embedding_gradient


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VE: Tensor, token_ids_T: Tensor) -> Tensor:
        ctx.save_for_backward(token_ids_T)
        ctx.vocab_size, ctx.dtype = weight_VE.shape[0], weight_VE.dtype
        return weight_VE.index_select(0, token_ids_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (token_ids_T,) = ctx.saved_tensors
        return embedding_gradient(grads[0], token_ids_T, ctx.vocab_size, ctx.dtype), None


class Embedding(nn.Module):
    """weight [V, E]; tied models use it as lm_head too."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=device))

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """token_ids_T: int64 in [0, V). Returns [T, E]."""
        return _Embed.apply(self.weight, token_ids_T)


class LmHead(nn.Module):
    """weight [V, E]. It has no forward, because training never needs all logits at once (`Decoder.logprobs`)."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=device))
