"""Adapters in the fused forwards of a GPU, on a CPU through the kernels' references: the bits of the modules, and their
gradients, whatever is kept and whichever projections are targets. On a GPU: tests/gpu/test_lora.py."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from octetrl.config.schema import Fp8Config, LoraConfig
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention.attention_packed import attention_packed_forward_reference
from octetrl.kernels.rows.silu_mul import silu_mul_backward_reference, silu_mul_reference
from octetrl.layers.context import PackedContext
from octetrl.models import training_forward
from octetrl.models.blocks.attention import training as attention
from octetrl.models.blocks.mlp import training as mlp
from octetrl.models.decoder import Decoder
from octetrl.models.rollout_forward import rollout_forward
from tests.parity.shapes import TINY
from tests.parity.sides import Pages, Sides, random_sequences
from tests.unit.models.test_lora import FP8, make

LORAS = {
    "all": LoraConfig(rank=4, alpha=8.0),
    "attention": LoraConfig(rank=8, alpha=8.0, targets=("q_proj", "v_proj")),
    "mlp": LoraConfig(rank=1, alpha=2.0, targets=("up_proj", "down_proj")),
}
LENGTHS = (20, 1, 37)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that have no CPU form of their own are their references; emulated codes multiply as codes do there."""
    monkeypatch.setattr(attention, "attention_packed_forward_triton", attention_packed_forward_reference)
    monkeypatch.setattr(mlp, "silu_mul_triton", silu_mul_reference)
    monkeypatch.setattr(mlp, "silu_mul_backward_triton", silu_mul_backward_reference)


def train(model: Decoder, keep: training_forward.Keep | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and the gradients of what is trained; by the modules where `keep` is None."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, model.spec.vocab_size, (sum(LENGTHS),), generator=generator)
    upstream = torch.randn(sum(LENGTHS), model.spec.hidden_size, generator=generator).bfloat16()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    context = PackedContext(torch.tensor((0, *LENGTHS)).cumsum(0).int(), max(LENGTHS))
    run_layer = None if keep is None else partial(training_forward._run_layer, keep=keep)
    model.zero_grad()
    hidden_TE = model(tokens, positions, context, run_layer)
    hidden_TE.backward(upstream)
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    return hidden_TE.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("fp8", [Fp8Config(), FP8, Fp8Config(rollout=True, train=True, ignore=("*.down_proj",))])
@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
@pytest.mark.parametrize("family", ["qwen3", "qwen2.5"])
def test_the_layer_as_one_node_is_the_modules(family: str, lora: LoraConfig, fp8: Fp8Config) -> None:
    model = make(lora, spec=replace(TINY[family], max_positions=64), fp8=fp8)
    hidden, gradients = train(model, None)
    assert all(".lora." in name for name in gradients) and len(gradients) > 0
    for keep in ("everything", "attention", "layer"):
        fused, fused_gradients = train(model, keep)  # type: ignore[arg-type]
        assert torch.equal(fused, hidden), keep
        assert fused_gradients.keys() == gradients.keys()
        for name, want in gradients.items():
            limit = 0.12 if fp8.train else 0.02  # a last bit of a BF16 gradient moves whole codes
            assert relative_error(fused_gradients[name], want) < limit, (keep, name)


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_the_fused_rollout_has_the_modules_bits(
    precision: str, lora: LoraConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in one forward and token by token, by the fused functions and by the modules."""
    sides = Sides(TINY["qwen3"], precision, lora=lora)
    sequences = random_sequences(random.Random(1), sides.spec, [17, 5])
    whole = [[(0, 0, 17), (1, 0, 5)]]
    pieces = [[(0, 0, 9), (1, 0, 4)], *([[(0, at, at + 1)] for at in range(9, 17)]), [(1, 4, 5)]]
    expected = Pages(sides, sequences, 16).filled(whole)
    packed = sides.packed(sequences)
    monkeypatch.setattr(Decoder, "forward", rollout_forward)
    for plan in (whole, pieces):
        for ours, theirs, trainers in zip(Pages(sides, sequences, 16).filled(plan), expected, packed, strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(ours, trainers)
