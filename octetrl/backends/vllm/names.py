"""Names of our parameters in vLLM's models.

vLLM stacks q, k and v in `qkv_proj`, and gate and up in `gate_up_proj`, in the order of our own stacked linears, so a
parameter is one tensor on both sides. An FP8 linear has `weight` (codes) and `weight_scale_inv` (multipliers).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from octetrl.fp8.format import BLOCK
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.families import hf_config
from octetrl.shapes.spec import ModelSpec

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_IN_LAYER = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention": "self_attn"}


def vllm_name(name: str) -> str:
    """The name of a parameter or linear: `layers.3.attention.qkv_proj` is `model.layers.3.self_attn.qkv_proj`."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layers, index, place, rest = name.split(".", 3)
    return f"model.{layers}.{index}.{_IN_LAYER.get(place, place)}.{rest}"


def attention_name(layer: int) -> str:
    """The module that holds a layer's KV scales."""
    return f"model.layers.{layer}.self_attn.attn"


def model_config(spec: ModelSpec, policy: PrecisionPolicy) -> dict[str, Any]:
    """The content of config.json: the shape, and which linears are FP8 in blocks of 128 x 128."""
    config = hf_config(spec)
    if policy.uses_fp8("rollout"):
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": sorted(_not_converted(spec, policy)),
        }
    return config


def _not_converted(spec: ModelSpec, policy: PrecisionPolicy) -> Iterator[str]:
    """Linears in BF16, part by part, as vLLM asks for them."""
    yield "lm_head"
    for name, linear in spec.linears():
        if policy.format_of(name, "rollout") != "fp8":
            place = vllm_name(name).rpartition(".")[0]
            yield from (f"{place}.{part.name}" for part in linear.parts)
