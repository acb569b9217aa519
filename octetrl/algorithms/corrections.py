"""Importance correction between the engine that sampled a token and the trainer that learns from it.

FP8, kernels and staleness make the trainer's probability p differ from the engine's g. A token sampled from g is
weighted by p / g, so that it counts as a token sampled from p. Large weights would ruin the step. They are therefore
bounded, or their tokens are left out. With k = p / g of a token, K = the product of k over its sample and M =
K^(1/tokens), `algorithm.corrections` is any list of

    tis             w = min(k, tis_cap)            truncated importance sampling; 2 (FlashRL, Yao, Liu et al. 2025)
    sequence_tis    w = min(K, sequence_tis_cap)   unbiased for whole answers; variance grows with their length
    token_mask      out unless k is in token_mask_range         IcePop (Ling team 2025) with tis and a cap as high
    sequence_mask   out unless K is in sequence_mask_range      MIS (Liu, Li et al. 2025) with sequence_tis
    geometric_mask  out unless M is in geometric_mask_range     detects a drift that no single token shows
    veto            out if any token of the sample has p < veto_floor; `veto_by: ratio`: k < veto_floor (verl)
    self_normalize  w / mean w over the optimizer step: no bias of scale; one more forward if there is only one update

The list has at most one of the first two; without them w is 1. A token that is left out has weight 0 and still counts
in the loss' denominator. With `masked_tokens: left_out` it does not count, nor do its KL and entropy, as in verl.
Means, that of w included, are then over the tokens that stay (docs/algorithms.md).

Each correction reports the share of tokens that it changed. Weights carry no gradient. effective_sample_size =
(mean w)^2 / mean w^2.

N trained tokens of one micro-batch, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.algorithms.ratios import MAX_LOG_RATIO, token_ratio
from octetrl.algorithms.sequences import sequence_mean, sequence_sum
from octetrl.config.objective_settings import CorrectionSettings


class Correction(NamedTuple):
    weights_N: Tensor  # detached
    kept_N: Tensor  # 0.0 where a mask or veto leaves the token out, else 1.0
    metrics: Mapping[str, Tensor]  # name -> [N]


class Pair(NamedTuple):
    """Log-probs of trainer and engine, float32 [N], and the ratios of both; per sample, but on each of its tokens."""

    trainer_N: Tensor
    generator_N: Tensor
    sequence_N: Tensor
    num_sequences: int

    @property
    def token_N(self) -> Tensor:
        return token_ratio(self.trainer_N, self.generator_N)

    @property
    def product_N(self) -> Tensor:
        log_B = sequence_sum(self.trainer_N - self.generator_N, self.sequence_N, self.num_sequences)
        return log_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[self.sequence_N]

    @property
    def geometric_N(self) -> Tensor:
        log_B = sequence_mean(self.trainer_N - self.generator_N, self.sequence_N, self.num_sequences)
        return log_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[self.sequence_N]


TRUNCATIONS = ("tis", "sequence_tis")  # they bound a weight; all other corrections leave tokens out
Change = tuple[Tensor, Tensor]  # factor of the weight; whether the bound acted


def _truncated(ratio_N: Tensor, cap: float) -> Change:
    return ratio_N.clamp(max=cap), ratio_N > cap


def _masked(ratio_N: Tensor, bounds: tuple[float, float]) -> Change:
    outside_N = (ratio_N < bounds[0]) | (ratio_N > bounds[1])
    return (~outside_N).to(ratio_N.dtype), outside_N


def _vetoed(pair: Pair, config: CorrectionSettings) -> Change:
    compared_N = pair.trainer_N if config.veto_by == "probability" else pair.trainer_N - pair.generator_N
    below_N = (compared_N.exp() < config.veto_floor).to(pair.trainer_N.dtype)
    outside_N = sequence_sum(below_N, pair.sequence_N, pair.num_sequences)[pair.sequence_N] > 0
    return (~outside_N).to(pair.trainer_N.dtype), outside_N


_CORRECTIONS: dict[str, Callable[[Pair, CorrectionSettings], Change]] = {
    "tis": lambda pair, config: _truncated(pair.token_N, config.tis_cap),
    "sequence_tis": lambda pair, config: _truncated(pair.product_N, config.sequence_tis_cap),
    "token_mask": lambda pair, config: _masked(pair.token_N, config.token_mask_range),
    "sequence_mask": lambda pair, config: _masked(pair.product_N, config.sequence_mask_range),
    "geometric_mask": lambda pair, config: _masked(pair.geometric_N, config.geometric_mask_range),
    "veto": lambda pair, config: _vetoed(pair, config),
}


@torch.no_grad()
def correct(
    trainer_N: Tensor, generator_N: Tensor, sequence_N: Tensor, num_sequences: int, config: CorrectionSettings
) -> Correction:
    """The weight of each token by all corrections except `self_normalize`. Log-probs: float32 [N]."""
    pair = Pair(trainer_N, generator_N, sequence_N, num_sequences)
    weights_N = torch.ones_like(trainer_N)
    kept_N = torch.ones_like(trainer_N)
    touched_N = torch.zeros_like(trainer_N, dtype=torch.bool)
    metrics: dict[str, Tensor] = {}
    for name in config.corrections:
        if name in _CORRECTIONS:
            factor_N, here_N = _CORRECTIONS[name](pair, config)
            weights_N, touched_N = weights_N * factor_N, touched_N | here_N
            kept_N = kept_N if name in TRUNCATIONS else kept_N * factor_N
            metrics[f"correction/{name}_fraction"] = here_N.float()
    metrics["correction/clip_fraction"] = touched_N.float()
    metrics["correction/mean_weight"] = weights_N
    metrics["correction/mean_square_weight"] = weights_N.square()
    return Correction(weights_N, kept_N, metrics)


def effective_sample_size(metrics: Mapping[str, float]) -> dict[str, float]:
    """Effective sample size as a share of the tokens, from a step's metrics; empty if nothing was corrected."""
    square = metrics.get("correction/mean_square_weight", 0.0)
    return {"correction/effective_sample_size": metrics["correction/mean_weight"] ** 2 / square} if square else {}
