"""Importance correction between the engine that drew a token and the trainer that learns from it.

FP8, kernels and staleness make the trainer's probability p differ from the engine's g. Policy gradients of tokens drawn
from g are unbiased for p when weighted by w = p / g; one large w would ruin the step, so it is bounded token by token:

    tis    min(w, C)                       truncated importance sampling (Yao, Liu et al. 2025, FlashRL; C = 2)
    mask   w if 1/C <= w <= C, else 0      tokens too far apart are left out (IcePop, Ling team 2025)
    none   1

Weights carry no gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octetrl.algorithms.ratios import token_ratio


class Correction(NamedTuple):
    weights_N: Tensor
    clipped_N: Tensor  # 1.0 where the bound acted


def importance_correction(
    trainer_logprobs_N: Tensor,
    generator_logprobs_N: Tensor,
    mode: Literal["none", "tis", "mask"],
    cap: float,
) -> Correction:
    """The weight of each token, float32 [N], detached. `cap` is C, at least 1."""
    with torch.no_grad():
        ratio_N = token_ratio(trainer_logprobs_N, generator_logprobs_N)
        if mode == "none":
            return Correction(torch.ones_like(ratio_N), torch.zeros_like(ratio_N))
        if mode == "tis":
            return Correction(ratio_N.clamp(max=cap), (ratio_N > cap).float())
        outside_N = (ratio_N > cap) | (ratio_N < 1.0 / cap)
        return Correction(ratio_N.masked_fill(outside_N, 0.0), outside_N.float())
