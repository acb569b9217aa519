"""The scales of a calibrated KV cache, in the tensor that the kernels read, with the policy version they belong to."""

from __future__ import annotations

import torch

from octetrl.fp8.kv_scales import KVScales
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.shapes.spec import ModelSpec


class CacheScales:
    """`scale_LS`: float32, NaN until `set`. It keeps its address, so captured graphs stay valid."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        shape = (spec.num_layers, spec.num_cache_scales)
        self.scale_LS = torch.full(shape, torch.nan, dtype=torch.float32, device=device)
        self.policy_version: int | None = None

    @property
    def held(self) -> KVScales | None:
        """A copy of the scales. None before `set`."""
        return None if self.policy_version is None else KVScales(self.scale_LS.clone(), self.policy_version)

    def set(self, scales: KVScales) -> None:
        """Copies `scales` in. Raises ValueError for another shape and for a scale that is not finite and above 0."""
        given_LS = scales.scale_LS
        if given_LS.shape != self.scale_LS.shape:
            raise ValueError(
                f"KV scales: got [layers, scales of a layer] = {list(given_LS.shape)}, this model has"
                f" {list(self.scale_LS.shape)}"
            )
        if not bool((given_LS.isfinite() & (given_LS > 0)).all()):
            layer, index = (~(given_LS.isfinite() & (given_LS > 0))).nonzero()[0].tolist()
            raise NonFiniteError(
                f"KV scales: the scale of {self._spec.cache_scale_name(layer, index)} is"
                f" {float(given_LS[layer, index])}; a scale is finite and above 0"
            )
        self.scale_LS.copy_(given_LS)
        self.policy_version = scales.policy_version

    def check(self, policy_version: int) -> None:
        """Raises RuntimeError unless these are the scales of `policy_version`."""
        if self.policy_version is None:
            raise RuntimeError(
                "the KV cache is calibrated FP8 and has no scales: calibrate on some prompts and call set_kv_scales"
                " before generate, or set fp8.kv_cache to int8, dynamic or none"
            )
        if self.policy_version != policy_version:
            raise RuntimeError(
                f"the KV scales belong to policy version {self.policy_version} and the weights to"
                f" {policy_version}: publish both (publish and set_kv_scales) before generate"
            )
