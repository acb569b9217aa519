"""Scales of a calibrated FP8 KV cache: float32, for each layer those of its cached tensors (docs/fp8.md §4, §5).

    scale = min(margin * amax, the largest BF16) / 448        an amax of zero: scale 1

Attention has one scale for each KV head of K, then one for each of V. A block's layout says what it caches and how many
scales that has (shapes/blocks.py).

The amax is that of the weights about to be published, as the last training forward saw it. The margin leaves room for
the next rollout. The scales carry the policy version of their weights and are published with them. There is no default:
a scale of 1.0 in place of a lost calibration would go unnoticed. A scale that was never observed is therefore an error.

Legend: L layers, S scales of a layer (of the layer that has most; the rest of a row is unused and holds 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octetrl.fp8.format import E4M3_MAX
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.shapes.blocks import CachedTensor
from octetrl.shapes.spec import ModelSpec

MARGIN = 1.05


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """Dequantising multipliers of the cache. `policy_version`: the weights they were calibrated for."""

    scale_LS: Tensor
    policy_version: int

    def __post_init__(self) -> None:
        assert self.scale_LS.dtype == torch.float32 and self.scale_LS.dim() == 2, "KV scales are float32 [L, S]"

    def to_tensors(self, spec: ModelSpec) -> dict[str, Tensor]:
        """For a checkpoint: `k_scale` [layers that cache K, heads], and so on, and the policy version."""
        tensors = {
            _file_name(name): torch.stack([self.scale_LS[layer, start:stop] for layer, start, stop in ranges])
            for name, ranges in _ranges(spec).items()
        }
        return tensors | {"policy_version": torch.tensor(self.policy_version)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], spec: ModelSpec, device: torch.device) -> KVScales:
        """The inverse of `to_tensors`."""
        scale_LS = torch.ones(spec.num_layers, spec.num_cache_scales, dtype=torch.float32)
        for name, ranges in _ranges(spec).items():
            for row, (layer, start, stop) in zip(tensors[_file_name(name)], ranges, strict=True):
                scale_LS[layer, start:stop] = row
        return cls(scale_LS.to(device), int(tensors["policy_version"]))


def _file_name(name: str) -> str:
    return f"{name.lower()}_scale"


def _ranges(spec: ModelSpec) -> dict[str, list[tuple[int, int, int]]]:
    """Where the scales of a cached tensor are: layer, first and last + 1 of its row, by the tensor's name."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for layer in range(spec.num_layers):
        start = 0
        for tensor in spec.cached(layer):
            if tensor.num_scales:
                found.setdefault(tensor.name, []).append((layer, start, start + tensor.num_scales))
            start += tensor.num_scales
    return found


def split_scales(row_S: Tensor, cached: Sequence[CachedTensor]) -> tuple[Tensor | None, ...]:
    """A layer's row as views, one for each cached tensor, in the shape of its scales; None if it has none."""
    views: list[Tensor | None] = []
    start = 0
    for tensor in cached:
        stop = start + tensor.num_scales
        views.append(row_S[start:stop].view(tensor.scales) if tensor.num_scales else None)
        start = stop
    return tuple(views)


def kv_scales_from_amax(amax_LS: Tensor, spec: ModelSpec, margin: float = MARGIN, *, policy_version: int) -> KVScales:
    """Scales for these largest magnitudes (float32 [L, S]). Reads the host once.

    A scale that was never observed holds NaN or a negative amax (the collection starts from -1). Such an amax, or an
    infinite one, raises NonFiniteError naming tensor, layer and head.
    """
    amax_LS = amax_LS.float()
    bad_LS = ~(amax_LS.isfinite() & (amax_LS >= 0))
    if bool(bad_LS.any()):
        layer, index = (int(i) for i in bad_LS.nonzero()[0])
        given = float(amax_LS[layer, index])
        said = "never observed" if given < 0 or given != given else "infinite"
        raise NonFiniteError(
            f"KV calibration: amax of {spec.cache_scale_name(layer, index)} was {said} ({given});"
            f" {int(bad_LS.sum())} scale(s) cannot be used"
        )
    largest_LS = (amax_LS * margin).clamp_max_(torch.finfo(torch.bfloat16).max)
    scale_LS = torch.div(largest_LS, torch.full_like(amax_LS, E4M3_MAX))
    return KVScales(scale_LS.masked_fill(amax_LS == 0, 1.0), policy_version)


def same_bits(a: KVScales, b: KVScales) -> bool:
    """Whether two sets of scales are the same, bit for bit and version for version (NaN equals itself)."""
    left_LS, right_LS = a.scale_LS, b.scale_LS
    return (
        a.policy_version == b.policy_version
        and left_LS.shape == right_LS.shape
        and torch.equal(left_LS.cpu().view(torch.int32), right_LS.cpu().view(torch.int32))
    )
