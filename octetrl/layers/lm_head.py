"""The output matrix of a model whose embeddings are not tied.

It is never FP8. Logits, log-softmax and loss are float32 (kernels/gemm/linear_logprobs.py).
"""

from __future__ import annotations

import torch
from torch import nn


class LmHead(nn.Module):
    """weight [V, E]. It has no forward, because training never needs all logits at once (`Decoder.logprobs`)."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=device))
