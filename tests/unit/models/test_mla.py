"""Latent attention against the written-out formula, and what follows from its layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.load import recipe_from_mapping
from octetrl.config.lora import adapter_elements, projections, unknown_target
from octetrl.config.memory import estimate_memory, kv_bytes_per_token
from octetrl.config.schema import LoraConfig
from octetrl.fp8.policy import precision_policy
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.layers.context import PackedContext
from octetrl.layers.rotary import Rotary, RotaryTable
from octetrl.models.blocks.mla.absorbed import HeadSizes, expand, expand_codes
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.mla.module import LatentAttention
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import MixtureLayout, Routing
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.rope import YarnScaling
from tests.parity.shapes import TINY
from tests.parity.sides import PRECISIONS
from tests.unit.models.tiny_families import made

DIRECT, LOW_RANK = LatentAttentionLayout(32, 0, 24, 8, 16), LatentAttentionLayout(48, 40, 16, 16, 40)
YARN = YarnScaling(4.0, 32, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.707)
SPEC = replace(TINY["qwen3"], qk_norm=False, num_kv_heads=4, head_size=32)
SPECS = {
    "direct": replace(SPEC, blocks=(LayerBlocks(DIRECT, MLPLayout()),)),
    "low_rank": replace(SPEC, blocks=(LayerBlocks(LOW_RANK, MLPLayout()),), rope_scaling=YARN),
}
MIXTURE = MixtureLayout(Routing(6, 2, "softmax", renormalise=True), 48, 96)
SPECS["mixed"] = replace(  # norms that are read in both forms, and as codes alone
    SPECS["low_rank"],
    blocks=(LayerBlocks(replace(LOW_RANK, value_size=128), MLPLayout()), LayerBlocks(LOW_RANK, MIXTURE)),
)
LENGTHS = (20, 1, 70)
CONTEXT = PackedContext(torch.tensor((0, *LENGTHS)).cumsum(0).int(), max(LENGTHS))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])
FP8 = Fp8Config(rollout=True, train=True)


def rotary_of(name: str) -> Rotary:
    spec = SPECS[name]
    return RotaryTable(spec.rotary_size, spec.rope_theta, spec.rope_scaling, 128, device="cpu")(POSITIONS)


@pytest.mark.parametrize("name", ["direct", "low_rank"])
def test_values_and_gradients_are_those_of_the_formula_in_float64(name: str) -> None:
    mla = next(made(SPECS[name], dtype=torch.float32).decoder_layers()).attention
    assert isinstance(mla, LatentAttention)
    generator = torch.Generator().manual_seed(1)
    x_TE, upstream_TE = torch.randn(2, sum(LENGTHS), SPEC.hidden_size, generator=generator).unbind()
    leaf_TE = x_TE.clone().requires_grad_()
    out_TE = mla(leaf_TE, rotary_of(name), CONTEXT)
    out_TE.backward(upstream_TE)
    wide = {key: p.detach().double().requires_grad_() for key, p in mla.named_parameters()}
    wide_TE = x_TE.double().requires_grad_()
    cos, sin = (half_TR.double().split(LENGTHS) for half_TR in rotary_of(name))
    parts = zip(wide_TE.split(LENGTHS), cos, sin, strict=True)
    layout = SPECS[name].blocks[0].attention
    want_TE = torch.cat([written_out(part_TE, wide, layout, rotary) for part_TE, *rotary in parts])
    want_TE.backward(upstream_TE.double())
    torch.testing.assert_close(out_TE.double(), want_TE, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf_TE.grad.double(), wide_TE.grad, rtol=1e-4, atol=2e-5)
    for key, parameter in mla.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), wide[key].grad, rtol=1e-4, atol=1e-4, msg=key)


def written_out(x_TE: Tensor, weights: dict[str, Tensor], layout: Any, rotary: list[Tensor]) -> Tensor:
    """One sequence, with keys and values of every head."""
    heads, nope, rope, value = SPEC.num_heads, layout.nope_size, layout.rope_size, layout.value_size
    if layout.query_latent_size:
        q = normed(x_TE @ weights["q_a_proj.weight"].t(), weights["q_a_layernorm.weight"])
        q_TX = q @ weights["q_b_proj.weight"].t()
    else:
        q_TX = x_TE @ weights["q_proj.weight"].t()
    q_HTX = q_TX.view(len(x_TE), heads, -1).transpose(0, 1)
    kv_a = x_TE @ weights["kv_a_proj_with_mqa.weight"].t()
    latent_TC = normed(kv_a[:, : layout.latent_size], weights["kv_a_layernorm.weight"])
    kv_HTX = (latent_TC @ weights["kv_b_proj.weight"].t()).view(len(x_TE), heads, -1).transpose(0, 1)
    key_TR = turned(kv_a[:, layout.latent_size :], rotary)
    score = q_HTX[..., :nope] @ kv_HTX[..., :nope].mT + turned(q_HTX[..., nope:], rotary) @ key_TR.t()
    mscale = 0.1 * 0.707 * torch.tensor(4.0).double().log() + 1 if layout.query_latent_size else 1.0
    score = score * (nope + rope) ** -0.5 * mscale**2
    hidden = torch.ones(len(x_TE), len(x_TE), dtype=torch.bool).triu(1)
    out_HTV = score.masked_fill(hidden, -torch.inf).softmax(2) @ kv_HTX[..., nope:]
    assert out_HTV.shape[2] == value
    return out_HTV.transpose(0, 1).flatten(1) @ weights["o_proj.weight"].t()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


NAMED = LoraConfig(rank=4, targets=("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj"))


def turned(x: Tensor, rotary: list[Tensor]) -> Tensor:
    """Neighbours are a complex number, turned by their angle. Real parts come first."""
    number = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.complex(*rotary)
    return torch.cat((number.real, number.imag), -1)


@pytest.mark.parametrize("value", [40, 128], ids=["ragged values", "values of a block"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_codes_are_those_of_the_expanded_values(value: int, power_of_two: bool) -> None:
    sizes, generator = HeadSizes(64, value), torch.Generator().manual_seed(1)
    o_THC = torch.randn(5, 3, 48, generator=generator).bfloat16()
    kv_b = torch.randn(3 * sum(sizes), 48, generator=generator).bfloat16()
    found = expand_codes(o_THC, kv_b, sizes, power_of_two)
    want = quantize_activation(expand(o_THC, kv_b, sizes), power_of_two)
    assert torch.equal(found.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(found.scale, want.scale)


def test_policy_memory_and_adapters_follow_from_the_layout() -> None:
    spec = SPECS["low_rank"]
    policy = precision_policy(spec, PRECISIONS["fp8_full"])
    assert policy.kv_mode == "dynamic", "nothing of a latent is calibrated"
    assert dict(policy.cache) == {"latent": "fp8", "rotary key": "bf16"}
    attention = [kind for kind in policy.kinds() if kind.startswith("attention.")]
    assert attention == ["attention.q_a_proj", "attention.q_b_proj", "attention.o_proj"], "kv_a and kv_b stay BF16"
    model = made(spec, FP8, LoraConfig(rank=4))
    adapters = sum(p.numel() for name, p in model.named_parameters() if ".lora." in name)
    assert adapter_elements(spec, LoraConfig(rank=4)) == adapters
    of_named = [p for name, p in made(spec, FP8, NAMED).named_parameters() if ".lora." in name]
    assert adapter_elements(spec, NAMED) == sum(p.numel() for p in of_named)
    assert unknown_target(("kv_a_proj_with_mqa",), spec) is None
    assert (unknown_target(("kv_b_proj",), spec) or "").startswith("'kv_b_proj' can't have an adapter, because latent")
    assert (unknown_target(("gate",), spec) or "").startswith("'gate' is not allowed; choose one of q_a_proj, ")
    assert projections(spec)[:3] == ("q_a_proj", "q_b_proj", "o_proj")
    assert spec.num_parameters == sum(p.numel() for p in made(spec).parameters())
    fp8 = {"rollout": True, "train": True, "kv_cache": "calibrated"}
    recipe = recipe_from_mapping({"model": {"path": "m"}, "environment": {"dataset": "d"}, "fp8": fp8})
    assert kv_bytes_per_token(recipe, spec, policy.precisions()) == 2 * (48 + 4 + 2 * 16)
    estimate = estimate_memory(recipe, spec, policy.precisions(), on_gpu=True, device_bytes=None)
    assert {part.name for part in estimate.parts} >= {"weights", "FP8 copies", "activations"}
