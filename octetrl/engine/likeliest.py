"""The likeliest tokens of rows of logits, with their log-probs. n rows, V vocabulary, K likeliest tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.kernels.gemm.linear_logprobs import logprobs_alone
from octetrl.records import Top


def likeliest(logits_nV: Tensor, divisor_n: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids, int64, and log-probs, float32, of the k likeliest tokens, [n, k]. A token's log-prob has the bits that it
    has when it is sampled."""
    ids_nK = logits_nV.topk(min(k, logits_nV.shape[1]), dim=1).indices
    each = [logprobs_alone(logits_nV, ids_n.contiguous(), divisor_n) for ids_n in ids_nK.unbind(1)]
    return ids_nK, torch.stack(each, dim=1)


def tops_of(ids_nK: Tensor, logprobs_nK: Tensor) -> list[Top]:
    return [
        tuple(zip(ids, logprobs, strict=True))
        for ids, logprobs in zip(ids_nK.tolist(), logprobs_nK.tolist(), strict=True)
    ]
