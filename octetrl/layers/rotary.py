"""The angles of rotary embedding: cos and sin of every position, computed once in float64 and rounded to float32.

Plane r of a head of size D turns by position * theta^(-2r/D). Models for long contexts scale these frequencies
(`shapes/rope.py`): some planes turn `factor` times slower, some do not change, and between them the two are blended.
With YaRN, cos and sin are also multiplied by a factor.

A forward gathers its rows of the table once (`Rotary`), and every layer reads them.

S positions of the table, T tokens, R = D/2 rotation planes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octetrl.shapes.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


class Rotary(NamedTuple):
    """cos and sin of each token's angles, float32, times YaRN's factor."""

    cos_TR: Tensor
    sin_TR: Tensor


class RotaryTable(nn.Module):
    """cos and sin of positions 0 .. max_positions - 1. They follow from the spec and are not part of the state."""

    cos_SR: Tensor
    sin_SR: Tensor

    def __init__(
        self,
        head_size: int,
        theta: float,
        scaling: RopeScaling | None,
        max_positions: int,
        *,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        position_S = torch.arange(max_positions, dtype=torch.float64)
        angle_SR = torch.outer(position_S, frequencies(head_size, theta, scaling))
        factor = scaling.rotary_factor if isinstance(scaling, YarnScaling) else 1.0
        self.register_buffer("cos_SR", (angle_SR.cos() * factor).float().to(device), persistent=False)
        self.register_buffer("sin_SR", (angle_SR.sin() * factor).float().to(device), persistent=False)

    def forward(self, positions_T: Tensor) -> Rotary:
        """positions_T: int64, each below max_positions (otherwise an IndexError, on a GPU a device assert)."""
        return Rotary(self.cos_SR.index_select(0, positions_T), self.sin_SR.index_select(0, positions_T))


def frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position for each of the D/2 planes, float64."""
    frequency_R = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    if scaling is None:
        return frequency_R
    if isinstance(scaling, LinearScaling):
        return frequency_R / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        unscaled_R = _llama3_share(frequency_R, scaling)
    else:
        unscaled_R = _yarn_share(head_size, theta, scaling)
    return frequency_R * (unscaled_R + (1.0 - unscaled_R) / scaling.factor)


def _llama3_share(frequency_R: Tensor, scaling: Llama3Scaling) -> Tensor:
    """The share of each plane's own frequency in the blend, from 0 (divided by `factor`) to 1."""
    turns_R = scaling.original_max_positions * frequency_R / (2 * math.pi)  # in the original context
    share_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return share_R.clamp(0.0, 1.0)


def _yarn_share(head_size: int, theta: float, scaling: YarnScaling) -> Tensor:
    """The same for YaRN: linear in the plane's number."""

    def plane_of(turns: float) -> float:
        """The plane, as a real number, that turns this often in the original context."""
        wavelength = scaling.original_max_positions / turns
        return head_size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = plane_of(scaling.beta_fast), plane_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    width = last - first if last != first else 0.001
    plane_R = torch.arange(head_size // 2, dtype=torch.float64)
    return 1.0 - ((plane_R - first) / width).clamp(0.0, 1.0)
