"""Fused rollouts of mixtures behind attention with biases, and of latent attention: the bits of the modules, and of the
trainer. `bias of q, k, v` is Qwen2-MoE's, and GLM-4.5's with QK-norm and half of each head rotated. The families with
latent attention have no such bias."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import GatedMixtureLayout, MixtureLayout, Routing
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.spec import ModelSpec
from tests.gpu.test_mla import MODELS
from tests.gpu.test_moe import SIGMOID, WIDE
from tests.gpu.test_rollout_forward import ordered_modules
from tests.parity import sides as parity
from tests.parity.sides import Pages, Sides, random_chunks, random_sequences, random_tokens

pytestmark = pytest.mark.gpu
LENGTHS = [150, 1, 70]
GATED = GatedMixtureLayout(Routing(32, 4, "softmax", False), 256, 512)
HALF = AttentionLayout(rotated=32)
GLM = (LayerBlocks(HALF, MLPLayout()), LayerBlocks(HALF, MixtureLayout(SIGMOID, 256, 512)))
SPECS: dict[str, ModelSpec] = {
    "qwen2_moe": replace(WIDE, qkv_bias=True, qk_norm=False, blocks=(LayerBlocks(AttentionLayout(), GATED),)),
    "glm4_moe": replace(WIDE, qkv_bias=True, blocks=GLM),
    "latent": MODELS["low_rank"],
}


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
@pytest.mark.parametrize("name", SPECS)
def test_the_fused_rollout_has_the_bits_of_modules_and_trainer(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, draw = SPECS[name], random.Random(1)
    sides = Sides(spec, precision, "cuda", calibrate_on=[random_tokens(random.Random(0), spec, 300)])
    biases = [p for key, p in sides.trainer_model.named_parameters() if key.endswith("qkv_proj.bias")]
    assert len(biases) == spec.num_layers * spec.qkv_bias and all(bias.any() for bias in biases)
    sequences = random_sequences(draw, spec, LENGTHS)
    chunks = [*random_chunks(draw, [length - 1 for length in LENGTHS], (1, 16, 100))]
    chunks.append([(index, length - 1, length) for index, length in enumerate(LENGTHS)])
    fused, trainers = Pages(sides, sequences, 64).filled(chunks), sides.packed(sequences)
    ordered_modules(monkeypatch)
    monkeypatch.setattr(parity, "can_fuse", lambda model: False)
    modules = Pages(sides, sequences, 64).filled(chunks)
    for ours, module, trainer in zip(fused, modules, trainers, strict=True):
        assert torch.equal(ours, module) and torch.equal(ours, trainer)
