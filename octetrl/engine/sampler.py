"""Choosing the next token by counter-based randomness.

Token i of sibling s of a request with seed r is a function of (r, s, i) and of its logits, of nothing else: there is no
generator whose state others could move. Each vocabulary entry v gets its own uniform number

    u = (top 52 bits of mix(mix(key(r, s) + i * GOLDEN) xor mix(v * GOLDEN)) + 1/2) / 2^52        in (0, 1)

where `mix` is splitmix64's finaliser, and the exponential race picks

    argmax over v of  p_v / -log(u_v)        which is v with probability p_v: Gumbel-max without its second log

Any row can be computed alone, on any device, in integers and float64. p is the softmax of logits / temperature; top-k,
top-p and min-p set entries to 0 and need no renormalising. They apply in that order: the k likeliest; of these,
renormalised, the fewest likeliest whose sum reaches top_p; of these, those with p >= min_p * max p. The likeliest
always stays. Greedy rows (temperature 0) take the argmax of the logits.

A race needs one number per vocabulary entry, where inverting the distribution function would need one per row; but a
prefix sum over 150,000 entries has an order, and a race has none. Rows are taken in slices of `SLICE_ELEMENTS`, so the
float64 scratch stays small.

N rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
SLICE_ELEMENTS = 1 << 23
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What each row of logits is sampled with."""

    key_N: Tensor  # int64, `sequence_key`
    counter_N: Tensor  # int64: how many tokens the completion has
    temperature_N: Tensor  # float32; 0 is greedy
    top_k_N: Tensor  # int64; 0 keeps all
    top_p_N: Tensor  # float32
    min_p_N: Tensor  # float32
    draws: bool  # some row is not greedy
    filters: bool  # some row has top-k, top-p or min-p


def sample(logits_NV: Tensor, rows: SamplingRows) -> Tensor:
    """int64 [N]: a token of each row, or -1 where the row's logits are not all finite. logits_NV: float32."""
    finite_N = torch.linalg.vector_norm(logits_NV, ord=float("inf"), dim=1).isfinite()
    token_N = logits_NV.argmax(dim=1)
    if rows.draws:
        height = max(1, SLICE_ELEMENTS // logits_NV.shape[1])
        for start in range(0, logits_NV.shape[0], height):
            part = slice(start, start + height)
            drawn_n = _draw(logits_NV[part], rows, part)
            token_N[part] = torch.where(rows.temperature_N[part] == 0, token_N[part], drawn_n)
    return token_N.masked_fill_(~finite_N, -1)


def sequence_key(seed: int, sibling: int) -> int:
    """The key of one sibling as a signed 64-bit integer. Any Python integer is a seed; it counts modulo 2^64."""
    key = _mix_int(_mix_int(seed & _MASK64) + (sibling + 1) * GOLDEN & _MASK64)
    return key - (1 << 64) if key >> 63 else key


def uniform(key_N: Tensor, counter_N: Tensor, vocab_size: int) -> Tensor:
    """float64 [N, V] in (0, 1), never 0 or 1."""
    row_N = _mix(key_N + counter_N * _signed(GOLDEN))
    bits_NV = _mix(row_N[:, None] ^ _vocabulary_hash(vocab_size, key_N.device))
    mantissa_NV = bits_NV.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    return mantissa_NV.double().add_(0.5).mul_(2.0**-52)


def _draw(logits_NV: Tensor, rows: SamplingRows, part: slice) -> Tensor:
    temperature_N = rows.temperature_N[part]
    scaled_NV = logits_NV / torch.where(temperature_N == 0, 1.0, temperature_N)[:, None]
    weight_NV = scaled_NV.double().sub_(scaled_NV.amax(dim=1, keepdim=True)).exp_()
    if rows.filters:
        weight_NV.mul_(_kept(weight_NV, rows.top_k_N[part], rows.top_p_N[part], rows.min_p_N[part]))
    time_NV = uniform(rows.key_N[part], rows.counter_N[part], logits_NV.shape[1]).log_().neg_()
    return weight_NV.div_(time_NV).argmax(dim=1)


def _kept(weight_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """bool [N, V]: the entries that may be drawn. Ties at a border go to the smaller token id. weight: max 1 a row."""
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


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, which wraps around like uint64; the shifts are made logical by masks."""
    x = (x ^ _shifted(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_int(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


@lru_cache(maxsize=4)
def _vocabulary_hash(vocab_size: int, device: torch.device) -> Tensor:
    return _mix(torch.arange(1, vocab_size + 1, device=device) * _signed(GOLDEN))
