"""Records that attention's launchers, their references and their callers pass on.

T tokens, S positions, K kv heads, D head size, R = D/2 rotation planes (fewer where RoPE rotates a part of the head).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.fp8.format import is_code
from octetrl.kernels.attention.attention_order import mode_of
from octetrl.shapes.blocks import SCALE_PER_TOKEN, KVMode, KVTensors


@dataclass(frozen=True, slots=True)
class CachedPages:
    """The pages of one cached tensor in one layer. Shapes: `CachedTensor` in shapes/blocks.py."""

    pages: Tensor  # [num_pages, ...] in BF16, float32, E4M3 or int8; layouts in kv_store.py and latent_store.py
    scale: Tensor | None = None  # E4M3, "calibrated": float32, of the layer
    token_scale: Tensor | None = None  # "dynamic", "int8": float32 [num_pages, ..., page_size]

    @property
    def scale_in_use(self) -> Tensor | None:
        """The scales for reading K or V; None unless the pages hold codes. ValueError unless exactly one kind is given,
        and for int8 the one for each token."""
        if not is_code(self.pages.dtype):
            return None
        if self.pages.dtype == torch.int8 and self.token_scale is None:
            raise ValueError("an int8 KV cache needs scales for each token")
        if (self.scale is None) == (self.token_scale is None):
            raise ValueError("an FP8 KV cache needs either per-head scales (calibrated) or per-token scales (dynamic)")
        return self.scale if self.token_scale is None else self.token_scale

    @property
    def mode(self) -> KVMode:
        """How values become the codes of these pages. ValueError as `scale_in_use`."""
        mode = mode_of(self.scale_in_use)
        return "int8" if self.pages.dtype == torch.int8 else mode


class Rotation(NamedTuple):
    """QK-norm and RoPE between the QKV projection and attention.

    Norm weights: [D] in the projection's dtype, both or neither. cos_SR, sin_SR: float32, one row per token; with
    `positions_T` (int64), one row per position.
    """

    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    eps: float
    cos_SR: Tensor
    sin_SR: Tensor
    positions_T: Tensor | None = None

    @property
    def planes(self) -> int:
        return self.cos_SR.shape[1]

    def angles_of_tokens(self) -> tuple[Tensor, Tensor]:
        """cos and sin [T, R]."""
        if self.positions_T is None:
            return self.cos_SR, self.sin_SR
        return self.cos_SR.index_select(0, self.positions_T), self.sin_SR.index_select(0, self.positions_T)


class Replay(NamedTuple):
    """How the trainer passes K and V through the quantiser of the rollout's cache.

    Scales: float32 [K], for "calibrated" only. `quantized`: what the cache holds in codes; the other tensor stays.
    """

    mode: KVMode = "none"
    k_scale_K: Tensor | None = None
    v_scale_K: Tensor | None = None
    quantized: KVTensors = "both"

    @property
    def k_mode(self) -> KVMode:
        return self.mode if self.quantized != "v" else "none"

    @property
    def v_mode(self) -> KVMode:
        return self.mode if self.quantized != "k" else "none"

    def checked(self) -> Replay:
        """Without scales that the mode does not use. ValueError if the scale of a quantised tensor is missing."""
        if self.mode in SCALE_PER_TOKEN:
            return self._replace(k_scale_K=None, v_scale_K=None)
        missing = (self.k_scale_K is None and self.quantized != "v") or (
            self.v_scale_K is None and self.quantized != "k"
        )
        if self.mode == "calibrated" and missing:
            raise ValueError("calibrated KV replay needs the scales of K and V, but they were not given")
        return self
