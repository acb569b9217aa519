"""Scales of a calibrated FP8 KV cache: one float32 per layer, KV head, and K or V (docs/fp8.md §4, §5).

    scale = min(margin * amax, the largest BF16) / 448        an amax of zero: scale 1

The amax is that of the weights which are about to be published, as near as the training forward saw it; the
margin leaves room for what the next rollout brings. The scales carry the policy version of the weights they
belong to and are published with them. There is no default: a scale of 1.0 put in silently where calibration
was lost is the classic bug of this technique, so what was never observed is an error, not a guess.

Legend: L layers, K KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octetrl.fp8.format import E4M3_MAX
from octetrl.fp8.non_finite import NonFiniteError

MARGIN = 1.05


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """Dequantising multipliers for K and V. `policy_version`: the weights they were calibrated for."""

    k_scale_LK: Tensor
    v_scale_LK: Tensor
    policy_version: int

    def __post_init__(self) -> None:
        assert self.k_scale_LK.shape == self.v_scale_LK.shape, "K and V scales differ in shape"
        assert self.k_scale_LK.dtype == self.v_scale_LK.dtype == torch.float32, "KV scales are float32"


def kv_scales_from_amax(
    k_amax_LK: Tensor, v_amax_LK: Tensor, margin: float = MARGIN, *, policy_version: int
) -> KVScales:
    """Scales for these largest magnitudes (float32 [L, K]). Reads the host once per tensor.

    A head that was never observed holds NaN or a negative amax (start the collection from -1); that, or an
    infinite one, raises NonFiniteError naming K or V, layer and head.
    """
    return KVScales(_scales(k_amax_LK, "K", margin), _scales(v_amax_LK, "V", margin), policy_version=policy_version)


def _scales(amax_LK: Tensor, which: str, margin: float) -> Tensor:
    amax_LK = amax_LK.float()
    bad_LK = ~(amax_LK.isfinite() & (amax_LK >= 0))
    if bool(bad_LK.any()):
        layer, head = (int(i) for i in bad_LK.nonzero()[0])
        given = float(amax_LK[layer, head])
        said = "never observed" if given < 0 or given != given else "infinite"
        raise NonFiniteError(
            f"KV calibration: amax of {which} in layer {layer}, head {head} was {said} ({given});"
            f" {int(bad_LK.sum())} head(s) have no usable scale"
        )
    largest_LK = (amax_LK * margin).clamp_max_(torch.finfo(torch.bfloat16).max)
    scale_LK = torch.div(largest_LK, torch.full_like(amax_LK, E4M3_MAX))
    return scale_LK.masked_fill(amax_LK == 0, 1.0)


def same_bits(a: KVScales, b: KVScales) -> bool:
    """Whether two sets of scales are the same, bit for bit and version for version (NaN equals itself)."""
    return a.policy_version == b.policy_version and all(
        left.shape == right.shape and torch.equal(left.cpu().view(torch.int32), right.cpu().view(torch.int32))
        for left, right in ((a.k_scale_LK, b.k_scale_LK), (a.v_scale_LK, b.v_scale_LK))
    )
