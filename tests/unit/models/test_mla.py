"""Latent attention against the written-out formula, its fused forms, and what follows from its layout."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.config.load import recipe_from_mapping
from octetrl.config.lora import adapter_elements, projections, unknown_target
from octetrl.config.memory import estimate_memory, kv_bytes_per_token
from octetrl.config.schema import Fp8Config, LoraConfig
from octetrl.doctor.taps import Fingerprints, Site, Tap, TrainingTap
from octetrl.fp8.policy import precision_policy
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.rows.silu_mul import silu_mul_backward_reference, silu_mul_reference
from octetrl.layers.context import PackedContext
from octetrl.layers.rotary import Rotary, RotaryTable
from octetrl.models import training_forward
from octetrl.models.blocks.mla.absorbed import HeadSizes, expand, expand_codes
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.mla.module import LatentAttention
from octetrl.models.blocks.mlp import training as mlp_training
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import MixtureLayout, Routing
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.rollout_forward import rollout_forward
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.presets import preset_config
from octetrl.shapes.rope import YarnScaling
from tests.parity.shapes import TINY
from tests.parity.sides import PRECISIONS, Pages, Sides, random_sequences

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
CACHE = Fp8Config(kv_cache="dynamic")  # linears in BF16


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_training, "silu_mul_triton", silu_mul_reference)
    monkeypatch.setattr(mlp_training, "silu_mul_backward_triton", silu_mul_backward_reference)


def make(name: str, fp8: Fp8Config | None = None, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Decoder:
    model = Decoder(SPECS[name], precision_policy(SPECS[name], fp8 or Fp8Config()), "train", dtype=dtype, **config)
    model.random_init(0)
    if model.lora is not None:
        model.draw_adapters(1)
        for _, adapter in model.adapters():
            torch.nn.init.normal_(adapter.b, std=0.3, generator=torch.Generator().manual_seed(2))
        model.train_adapters_alone()
    return model


def rotary_of(name: str) -> Rotary:
    spec = SPECS[name]
    return RotaryTable(spec.rotary_size, spec.rope_theta, spec.rope_scaling, 128, device="cpu")(POSITIONS)


@pytest.mark.parametrize("name", ["direct", "low_rank"])
def test_values_and_gradients_are_those_of_the_formula_in_float64(name: str) -> None:
    mla = next(make(name, dtype=torch.float32).decoder_layers()).attention
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


def train(model: Decoder, keep: training_forward.Keep | None, mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and gradients; by the modules where `keep` is None."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, SPEC.vocab_size, (sum(LENGTHS),), generator=generator)
    upstream = torch.randn(sum(LENGTHS), SPEC.hidden_size, generator=generator).bfloat16()
    run_layer = None if keep is None else partial(training_forward._run_layer, keep=keep)
    model.zero_grad()
    hidden_TE = model(tokens, POSITIONS, replace(CONTEXT, kv_mode=mode), run_layer)
    hidden_TE.backward(upstream)
    return hidden_TE.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("lora", [None, NAMED], ids=["whole", "lora"])
@pytest.mark.parametrize(
    ("name", "fp8"),
    [("direct", Fp8Config()), ("low_rank", CACHE), ("low_rank", FP8.model_copy(update={"kv_cache": "dynamic"}))],
    ids=["bf16", "cache", "fp8"],
)
def test_the_trainers_forms_agree(name: str, fp8: Fp8Config, lora: LoraConfig | None) -> None:
    """With `CACHE` the tolerance is less than what gradients of latents before their quantiser differ by, 0.04."""
    model = make(name, fp8, lora=lora)
    hidden, gradients = train(model, None, fp8.kv_cache)
    keeps: tuple[training_forward.Keep, ...] = ("everything", "attention", "layer")
    for keep in keeps:
        fused, fused_gradients = train(model, keep, fp8.kv_cache)
        assert torch.equal(fused, hidden), keep
        assert fused_gradients.keys() == gradients.keys()
        for key, want in gradients.items():
            assert relative_error(fused_gradients[key], want) < (0.15 if fp8.train else 0.02), (keep, key)


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


@pytest.mark.parametrize(
    ("name", "precision"), [("low_rank", "bf16"), ("low_rank", "fp8_full"), ("mixed", "fp8_full"), ("mixed", "powers")]
)
def test_the_rollouts_form_has_the_modules_bits(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`powers`: the scales are powers of two, which every op that quantises has to know."""
    monkeypatch.setitem(PRECISIONS, "powers", PRECISIONS["fp8_full"].model_copy(update={"power_of_two": True}))
    sides = Sides(SPECS[name], precision)
    sequences = random_sequences(random.Random(1), sides.spec, [70, 5])
    pieces = [[(0, 0, 66), (1, 0, 4)], *([[(0, at, at + 1)] for at in range(66, 70)]), [(1, 4, 5)]]
    modules = Pages(sides, sequences, 16).filled(pieces)
    monkeypatch.setattr(Decoder, "forward", rollout_forward)
    for fused, module in zip(Pages(sides, sequences, 16).filled(pieces), modules, strict=True):
        assert torch.equal(fused, module)


@pytest.mark.usefixtures("on_a_gpu")
def test_the_doctor_sees_latents_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(SPECS["low_rank"], "fp8_full")
    (sequence_T,) = random_sequences(random.Random(1), sides.spec, [17])
    context = PackedContext(torch.tensor([0, 17], dtype=torch.int32), 17, kv_mode="dynamic")
    found = [Fingerprints(17, torch.device("cpu")) for _ in range(3)]
    runner = partial(training_forward._run_layer, keep="layer")
    taps = Tap(sides.trainer_model, found[0]), TrainingTap(sides.trainer_model, found[1], run_layer=runner)
    for tap in taps:
        tap.rows_T = torch.arange(17)
        with tap.open():
            tap.forward(sequence_T, torch.arange(17), context)
    monkeypatch.setattr(Decoder, "forward", rollout_forward)
    tap = Tap(sides.engine_model, found[2])
    tap.rows_T = torch.arange(17)
    with tap.open():
        Pages(sides, [sequence_T], 32).forward([(0, 0, 17)])
    for one in found:
        assert {site.op for site in one.bits_R if site.layer == 1} >= set(LatentAttentionLayout.sites)
        assert one.shapes[Site(1, "latent as cached")] == (48,)
        for site in one.bits_R.keys() & found[0].bits_R.keys():
            assert not one.differing_rows(found[0], site).numel(), site


def test_policy_memory_and_adapters_follow_from_the_layout() -> None:
    spec = SPECS["low_rank"]
    policy = precision_policy(spec, PRECISIONS["fp8_full"])
    assert policy.kv_mode == "dynamic", "nothing of a latent is calibrated"
    assert dict(policy.cache) == {"latent": "fp8", "rotary key": "bf16"}
    attention = [kind for kind in policy.kinds() if kind.startswith("attention.")]
    assert attention == ["attention.q_a_proj", "attention.q_b_proj", "attention.o_proj"], "kv_a and kv_b stay BF16"
    model = make("low_rank", FP8, lora=LoraConfig(rank=4))
    adapters = sum(p.numel() for name, p in model.named_parameters() if ".lora." in name)
    assert adapter_elements(spec, LoraConfig(rank=4)) == adapters
    of_named = [p for name, p in make("low_rank", FP8, lora=NAMED).named_parameters() if ".lora." in name]
    assert adapter_elements(spec, NAMED) == sum(p.numel() for p in of_named)
    assert unknown_target(("kv_a_proj_with_mqa",), spec) is None
    assert (unknown_target(("kv_b_proj",), spec) or "").startswith("'kv_b_proj' can't have an adapter, because latent")
    assert (unknown_target(("gate",), spec) or "").startswith("'gate' is not allowed; choose one of q_a_proj, ")
    assert projections(spec)[:3] == ("q_a_proj", "q_b_proj", "o_proj")
    assert spec.num_parameters == sum(p.numel() for p in make("low_rank").parameters())
    fp8 = {"rollout": True, "train": True, "kv_cache": "calibrated"}
    recipe = recipe_from_mapping({"model": {"path": "m"}, "environment": {"dataset": "d"}, "fp8": fp8})
    assert kv_bytes_per_token(recipe, spec, policy.precisions()) == 2 * (48 + 4 + 2 * 16)
    estimate = estimate_memory(recipe, spec, policy.precisions(), on_gpu=True, device_bytes=None)
    assert {part.name for part in estimate.parts} >= {"weights", "FP8 copies", "activations"}


def test_the_published_shape_has_its_parameters_and_cache() -> None:
    spec = spec_from_config(preset_config("moonlight-16b-a3b"))
    assert spec.num_parameters == 15_960_110_208
    experts = sum(linear.num_weights for name, linear in spec.linears() if "experts." in name)
    assert experts == 14_844_690_432
    recipe = recipe_from_mapping({"model": {"path": "m"}, "environment": {"dataset": "d"}})
    policies = [precision_policy(spec, PRECISIONS[name]).precisions() for name in ("bf16", "fp8_full")]
    assert [kv_bytes_per_token(recipe, spec, precisions) for precisions in policies] == [27 * 1_152, 27 * 644]
