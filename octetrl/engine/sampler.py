"""Samples the next token with counter-based randomness.

Token i of sibling s of a request with seed r is a function only of (r, s, i) and of its logits. No generator has a
state that other requests could change. Each vocabulary entry gets its own uniform number, a hash of (r, s, i) and the
entry's id. An exponential race then selects the token (kernels/rows/sample_tokens.py): Gumbel-max without its second
log.

Any row can be computed alone, on any device. p is the softmax of logits / temperature. top-k, top-p and min-p set
entries to 0, and no renormalisation is needed. They apply in this order: the k likeliest; of these, renormalised, the
fewest likeliest whose sum reaches top_p; of these, those with p >= min_p * max p. The likeliest always stays. Greedy
rows (temperature 0) take the argmax of the logits.

A race needs one random number per vocabulary entry. Inverting the distribution function would need one per row, but
also a prefix sum over 150,000 entries, whose result depends on its order. A race has no order.

Without filters a GPU samples in float32 kernels. Rows with filters need a sorted row and use the float64 form. Both can
be captured in a CUDA graph: the host reads only `draws` and `filters`, which are plain booleans.

N rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octetrl.kernels.rows.gather_rows import DecodeRows
from octetrl.kernels.rows.sample_tokens import GOLDEN, greedy_tokens, sample_tokens, sample_tokens_reference

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of each row of logits."""

    key_N: Tensor  # int64, `sequence_key`
    counter_N: Tensor  # int64: how many tokens the completion has
    temperature_N: Tensor  # float32; 0 is greedy
    top_k_N: Tensor  # int64; 0 keeps all
    top_p_N: Tensor  # float32
    min_p_N: Tensor  # float32
    draws: bool  # some row is not greedy
    filters: bool  # some row has top-k, top-p or min-p

    @classmethod
    def of(cls, rows: DecodeRows, *, draws: bool, filters: bool) -> SamplingRows:
        return cls(
            key_N=rows.key_B,
            counter_N=rows.counter_B,
            temperature_N=rows.temperature_B,
            top_k_N=rows.top_k_B,
            top_p_N=rows.top_p_B,
            min_p_N=rows.min_p_B,
            draws=draws,
            filters=filters,
        )


def sample(logits_NV: Tensor, rows: SamplingRows) -> Tensor:
    """Samples a token for each row, int64 [N]; -1 if the row's logits are not all finite. logits_NV: float32."""
    race = (logits_NV, rows.key_N, rows.counter_N, rows.temperature_N)
    if not rows.draws and not logits_NV.is_cuda:
        return greedy_tokens(logits_NV)
    if not rows.filters:
        return sample_tokens(*race)

    def keep(weight_nV: Tensor, part: slice) -> Tensor:
        return _kept(weight_nV, rows.top_k_N[part], rows.top_p_N[part], rows.min_p_N[part])

    token_N = sample_tokens_reference(*race, keep)
    if not logits_NV.is_cuda:
        return token_N
    filtered_N = (rows.top_k_N > 0) | (rows.top_p_N < 1) | (rows.min_p_N > 0)  # others sample as they would alone
    return torch.where(filtered_N, token_N, sample_tokens(*race))


def sequence_key(seed: int, sibling: int) -> int:
    """The key of one sibling as a signed 64-bit integer. Any Python integer is a seed; it counts modulo 2^64."""
    key = _mix_int(_mix_int(seed & _MASK64) + (sibling + 1) * GOLDEN & _MASK64)
    return key - (1 << 64) if key >> 63 else key


def _kept(weight_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """bool [N, V]: the entries that may be sampled. Ties go to the smaller token id. weight: at most 1 per row."""
    sorted_NV, order_NV = weight_NV.sort(dim=1, descending=True, stable=True)
    rank_V = torch.arange(weight_NV.shape[1], device=weight_NV.device)
    unlimited_N = top_k_N == 0
    sorted_NV = sorted_NV.masked_fill((rank_V >= top_k_N[:, None]) & ~unlimited_N[:, None], 0.0)
    before_NV = sorted_NV.cumsum(dim=1)
    reach_N1 = top_p_N.double()[:, None] * before_NV[:, -1:]
    before_NV = before_NV.sub_(sorted_NV)
    keep_NV = (sorted_NV > 0) & (sorted_NV >= min_p_N.double()[:, None])
    keep_NV &= (before_NV < reach_N1) | (top_p_N[:, None] >= 1)
    keep_NV[:, 0] = True
    return torch.zeros_like(keep_NV).scatter_(1, order_NV, keep_NV)


def _mix_int(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31
