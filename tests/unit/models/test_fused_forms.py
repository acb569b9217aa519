"""The fused forms of a GPU, on a CPU through the kernels' references: the bits of the modules, and their gradients,
whatever is kept and whichever projections have adapters. On a GPU: tests/gpu/."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import LoraConfig
from octetrl.doctor.taps import Fingerprints, Site, Tap, TrainingTap, sites_of
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention.attention_packed import attention_packed_forward_reference
from octetrl.kernels.rows.silu_mul import silu_mul_backward_reference, silu_mul_reference
from octetrl.layers.context import PackedContext
from octetrl.models import training_forward
from octetrl.models.blocks.attention import training as attention_training
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.mlp import training as mlp_training
from octetrl.models.blocks.moe.layout import GatedMixtureLayout
from octetrl.models.decoder import Decoder
from octetrl.models.rollout_forward import rollout_forward
from octetrl.shapes.spec import ModelSpec
from tests.parity.shapes import DELTA, TINY, UNUSUAL
from tests.parity.sides import PRECISIONS, Pages, Sides, random_sequences
from tests.unit.models.test_blocks import FP8, MIXED
from tests.unit.models.test_mla import NAMED, SPECS
from tests.unit.models.test_moe import SIGMOID, spec_of
from tests.unit.models.tiny_families import made

LENGTHS = (20, 1, 70)
SINKS = replace(UNUSUAL["gpt-oss"], qkv_bias=False, o_bias=False)  # modules of a CPU round a bias with its product
BF16, DYNAMIC = PRECISIONS["bf16"], PRECISIONS["fp8_dynamic"]
CACHE = Fp8Config(kv_cache="dynamic")  # linears in BF16
IN_PART = Fp8Config(rollout=True, train=True, ignore=("*.down_proj",))
ALL = LoraConfig(rank=4, alpha=8.0)
ATTENTION = LoraConfig(rank=8, alpha=8.0, targets=("q_proj", "v_proj"))
IN_AND_OUT = LoraConfig(rank=4, alpha=8.0, targets=("in_proj_z", "out_proj", "q_proj", "o_proj"))
MLP = LoraConfig(rank=1, alpha=2.0, targets=("up_proj", "down_proj"))


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that have no CPU form of their own are their references."""
    monkeypatch.setattr(attention_training, "attention_packed_forward_triton", attention_packed_forward_reference)
    monkeypatch.setattr(mlp_training, "silu_mul_triton", silu_mul_reference)
    monkeypatch.setattr(mlp_training, "silu_mul_backward_triton", silu_mul_backward_reference)


def train(model: Decoder, keep: training_forward.Keep | None, kv_mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states, and the gradients of what is trained; by the modules where `keep` is None."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, model.spec.vocab_size, (sum(LENGTHS),), generator=generator)
    upstream = torch.randn(sum(LENGTHS), model.spec.hidden_size, generator=generator).bfloat16()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    context = PackedContext(torch.tensor((0, *LENGTHS)).cumsum(0).int(), max(LENGTHS), kv_mode)  # type: ignore[arg-type]
    run_layer = None if keep is None else partial(training_forward._run_layer, keep=keep)
    model.zero_grad()
    hidden_TE = model(tokens, positions, context, run_layer)
    hidden_TE.backward(upstream)
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    return hidden_TE.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("spec", "fp8", "lora"),
    [
        (MIXED, BF16, None),
        (MIXED, FP8, LoraConfig(rank=4, targets=("q_proj", "up_proj"))),
        (TINY["qwen3"], BF16, ALL),
        (TINY["qwen3"], FP8, MLP),
        (TINY["qwen3"], IN_PART, ATTENTION),
        (TINY["qwen2.5"], BF16, ATTENTION),
        (TINY["qwen2.5"], FP8, ALL),
        (TINY["qwen2.5"], IN_PART, MLP),
        (UNUSUAL["gpt-oss"], BF16, None),
        (SINKS, FP8, ALL),
        (SPECS["direct"], BF16, None),
        (SPECS["direct"], BF16, NAMED),
        (SPECS["low_rank"], CACHE, NAMED),  # its limit is less than what latents before their quantiser make, 0.04
        (SPECS["low_rank"], DYNAMIC, None),
        (SPECS["low_rank"], DYNAMIC, NAMED),
        (DELTA["delta"], FP8, IN_AND_OUT),
        (DELTA["grouped delta"], BF16, None),
    ],
)
def test_the_trainers_forms_agree(spec: ModelSpec, fp8: Fp8Config, lora: LoraConfig | None) -> None:
    model = made(spec, fp8, lora)
    hidden, gradients = train(model, None, fp8.kv_cache)
    assert gradients and (lora is None or all(".lora." in name for name in gradients))
    limit = (0.15 if spec in SPECS.values() else 0.12) if fp8.train else 0.02  # a last bit moves whole codes
    keeps: tuple[training_forward.Keep, ...] = ("everything", "attention", "layer")
    for keep in keeps:
        fused, fused_gradients = train(model, keep, fp8.kv_cache)
        assert torch.equal(fused, hidden), keep
        assert fused_gradients.keys() == gradients.keys()
        for name, want in gradients.items():
            assert relative_error(fused_gradients[name], want) < limit, (keep, name)


@pytest.mark.parametrize(
    ("spec", "precision", "lora"),
    [
        (MIXED, "bf16", None),
        (MIXED, "fp8_full", None),
        (TINY["qwen3"], "bf16", ALL),
        (TINY["qwen3"], "bf16", ATTENTION),
        (TINY["qwen3"], "bf16", MLP),
        (TINY["qwen3"], "fp8_full", ALL),
        (TINY["qwen3"], "fp8_full", ATTENTION),
        (TINY["qwen3"], "fp8_full", MLP),
        (SPECS["low_rank"], "bf16", None),
        (SPECS["low_rank"], "fp8_full", None),
        (SPECS["mixed"], "fp8_full", None),
        (SPECS["mixed"], "powers", None),
        (DELTA["delta"], "fp8_full", None),
        (DELTA["grouped delta"], "bf16", ALL),
        (SINKS, "bf16", None),
        (SINKS, "fp8_full", None),
    ],
)
def test_the_rollouts_form_has_the_bits_of_the_modules_and_of_the_trainer(
    spec: ModelSpec, precision: str, lora: LoraConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in one forward and in pieces, then token by token. `powers`: the scales are powers of two, which every op
    that quantises has to know."""
    monkeypatch.setitem(PRECISIONS, "powers", PRECISIONS["fp8_full"].model_copy(update={"power_of_two": True}))
    sides = Sides(spec, precision, lora=lora)
    sequences = random_sequences(random.Random(1), spec, [70, 5])
    whole = [[(0, 0, 70), (1, 0, 5)]]
    pieces = [[(0, 0, 66), (1, 0, 4)], *([[(0, at, at + 1)] for at in range(66, 70)]), [(1, 4, 5)]]
    modules, packed = Pages(sides, sequences, 16).filled(pieces), sides.packed(sequences)
    monkeypatch.setattr(Decoder, "forward", rollout_forward)
    for plan in (whole, pieces):
        for fused, module, trainers in zip(Pages(sides, sequences, 16).filled(plan), modules, packed, strict=True):
            assert torch.equal(fused, module) and torch.equal(fused, trainers)


LATENT_SITES, MIXTURE_SITES = set(LatentAttentionLayout.sites), set(GatedMixtureLayout.sites)


@pytest.mark.parametrize(
    ("spec", "precision", "ops", "shapes"),
    [
        (MIXED, "bf16", {"up_proj", "squared ReLU", "down_proj"}, {}),
        (SPECS["low_rank"], "fp8_full", LATENT_SITES, {"latent as cached": (48,)}),
        (
            spec_of(GatedMixtureLayout(SIGMOID, 48, 96)),
            "bf16",
            MIXTURE_SITES,
            {"chosen experts": (3,), "experts' gate_up_proj": (3, 96)},
        ),
    ],
    ids=["squared ReLU", "latents", "mixture"],
)
def test_the_doctor_sees_the_sites_of_a_layout_in_every_form(
    spec: ModelSpec,
    precision: str,
    ops: set[str],
    shapes: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sides = Sides(spec, precision)
    (sequence_T,) = random_sequences(random.Random(1), spec, [17])
    cu_seqlens = torch.tensor([0, 17], dtype=torch.int32)
    context = PackedContext(cu_seqlens, 17, kv_mode=sides.replay.kv_mode)
    runner = partial(training_forward._run_layer, keep="layer")
    notes = [Fingerprints(17, torch.device("cpu")) for _ in range(3)]
    for tap in (Tap(sides.trainer_model, notes[0]), TrainingTap(sides.trainer_model, notes[1], run_layer=runner)):
        tap.rows_T = torch.arange(17)
        with tap.open():
            tap.forward(sequence_T, torch.arange(17), context)
    monkeypatch.setattr(Decoder, "forward", rollout_forward)
    tap = Tap(sides.engine_model, notes[2])
    tap.rows_T = torch.arange(17)
    with tap.open():
        Pages(sides, [sequence_T], 32).forward([(0, 0, 17)])
    for note in notes:
        assert {site.op for site in note.bits_R if site.layer == 1} >= ops
        assert {op: note.shapes[Site(1, op)] for op in shapes} == shapes
        for site in note.bits_R.keys() & notes[0].bits_R.keys():
            assert not note.differing_rows(notes[0], site).numel(), site
    if spec is MIXED:
        declared = sites_of(MIXED)
        assert declared.index(Site(1, "MLP norm")) < declared.index(Site(1, "squared ReLU"))
        assert all(Site(0, "squared ReLU") not in note.bits_R for note in notes)
