"""The section `fp8` of a recipe (docs/fp8.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octetrl.config.section import Fraction, Section
from octetrl.shapes.blocks import KVMode, KVTensors


class Fp8Config(Section):
    """FP8 settings. `precision:` sets the main ones together. A field given here overrides it."""

    rollout: bool = False
    """Use FP8 block-scaled linears in the engine."""
    train: bool = False
    """Use FP8 block-scaled linears in the trainer: forward, dgrad and wgrad."""
    format: Literal["block", "mxfp8"] = "block"
    """Format of the FP8 linears. block: E4M3 with a float32 scale for 128 x 128 weights and for 1 x 128 activations.
    mxfp8: E4M3 with a power of two for every 32 values along the sum, as Blackwell multiplies; it is emulated on
    other devices, on one worker, without vLLM."""
    kv_cache: KVMode = "none"
    """Format of the KV cache. none: the model's dtype. calibrated: E4M3 with one scale per layer and KV head. dynamic:
    E4M3 with one scale per token and KV head. int8: 8-bit integers with one scale per token and KV head. Latent
    attention (MLA) has one scale per token with calibrated and dynamic, and no int8."""
    kv_cache_tensors: KVTensors = "both"
    """What an FP8 KV cache stores in codes: both, or K or V alone beside the other one in the model's dtype. Not for
    latent attention (MLA)."""
    calibration: Literal["fused", "exact"] = "fused"
    """Source of a calibrated cache's amax. fused: the training forward. exact: an extra forward with the new
    weights."""
    calibration_margin: float = Field(default=1.05, ge=1.0, le=4.0)
    """Factor on a calibrated cache's scales: scale = margin * amax / 448. Raise it if `fp8/kv_saturation` is not 0."""
    kv_replay: bool = True
    """Quantise K and V in the trainer's attention as the rollout does (with a straight-through gradient)."""
    saturation_warn: Fraction = 0.001
    """Share of clamped K and V values above which the run warns."""
    power_of_two: bool | None = None
    """Round scales up to powers of two, which Blackwell needs. Hopper's float32 scales are more accurate. null: only
    for gpt-oss, whose published weights FP8 then holds exactly."""
    wgrad_blocks: Literal["square", "tokens"] = "square"
    """Quantisation blocks of the activations in wgrad. square: 128 tokens x 128 channels, with a faster GEMM. tokens:
    128 tokens x 1 channel."""
    bf16_first_layers: int = Field(default=0, ge=0, le=1_000)
    """Number of first layers whose linears stay BF16 in engine and trainer."""
    bf16_last_layers: int = Field(default=0, ge=0, le=1_000)
    """Number of last layers whose linears stay BF16 in engine and trainer."""
    ignore: tuple[str, ...] = ()
    """Names of linears that stay BF16 in engine and trainer. `*` matches any text: `layers.0.mlp.*`, `*.o_proj`."""
    emulate: bool | None = None
    """Whether to emulate FP8. null: emulate on a CPU, use the tensor cores on Hopper and Blackwell. true: emulate on
    any device (correct, but slow). false: never emulate."""

    @property
    def is_emulated(self) -> bool | None:
        """`emulate`, and True for MXFP8, which has no fused kernels on any GPU."""
        return True if self.format == "mxfp8" else self.emulate
