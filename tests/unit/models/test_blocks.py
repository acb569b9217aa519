"""A new kind of block is one file: everything that names linears, sites or the cache follows from its layout.

The model's second layer has the block of `squared_relu.py` in the MLP's place, its first the gated MLP.
`test_fused_forms.py` compares its forms. A kind with a cache of its own is latent attention (test_mla.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.load import recipe_from_mapping
from octetrl.config.lora import adapter_elements, projections
from octetrl.config.memory import MemoryEstimate, Precisions, estimate_memory
from octetrl.config.schema import LoraConfig, TrainerConfig
from octetrl.engine.kv_cache import KVCache, cache_format
from octetrl.fp8.kv_scales import kv_scales_from_amax
from octetrl.fp8.policy import precision_policy
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.decoder import Decoder
from octetrl.models.families import DENSE
from octetrl.models.hf_weights import load_weights, pieces, save_weights, save_weights_fp8
from octetrl.models.peft_adapters import load_adapter, merge_adapters, read_adapter_config
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.forward import Forward
from tests.parity.shapes import TINY
from tests.parity.sides import PRECISIONS
from tests.saved_adapter import save_adapter
from tests.unit.models.squared_relu import SquaredReLULayout
from tests.unit.models.tiny_families import made, packed

GATED = replace(TINY["qwen3"], hidden_size=128, intermediate_size=256, head_size=32, num_kv_heads=4)  # whole blocks
MIXED = replace(GATED, blocks=(*DENSE, LayerBlocks(AttentionLayout(), SquaredReLULayout())))
FP8 = Fp8Config(rollout=True, train=True)


def hidden(model: Decoder) -> Tensor:
    """Of two sequences."""
    tokens_T, positions_T, context = packed([20, 17], model.spec.vocab_size)
    states: Tensor = model(tokens_T, positions_T, context)
    return states


def test_the_policy_lists_its_linears() -> None:
    policy = precision_policy(MIXED, Fp8Config(rollout=True, train=True, ignore=("*.up_proj",)))
    kinds = {kind: [linear.train for linear in linears] for kind, linears in policy.kinds().items()}
    assert kinds == {
        "attention.qkv_proj": ["fp8", "fp8"],
        "attention.o_proj": ["fp8", "fp8"],
        "mlp.gate_up_proj": ["fp8"],
        "mlp.down_proj": ["fp8", "fp8"],
        "mlp.up_proj": ["bf16"],
    }
    assert policy.digest != precision_policy(GATED, FP8).digest


@pytest.mark.parametrize("targets", [None, ("up_proj",), ("gate_proj", "down_proj")])
def test_adapters_are_counted_saved_and_loaded(targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    lora = LoraConfig.model_validate({"rank": 4, "targets": targets})
    model = made(MIXED, FP8, lora)
    assert adapter_elements(MIXED, lora) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    save_adapter(model, tmp_path, None)
    other = made(MIXED, FP8, lora, b_std=0.0)
    load_adapter(other, tmp_path)
    assert set(read_adapter_config(tmp_path).lora.targets or ()) == set(targets or projections(MIXED))
    assert torch.equal(hidden(other), hidden(model))


def test_a_merged_adapter_is_in_its_weight() -> None:
    model = made(MIXED, lora=LoraConfig(rank=4, targets=("up_proj",)))
    before = model.get_parameter("layers.1.mlp.up_proj.weight").clone()
    merge_adapters(model)
    assert not torch.equal(model.get_parameter("layers.1.mlp.up_proj.weight"), before)


def test_weights_go_out_and_come_in(tmp_path: Path) -> None:
    model = made(MIXED)
    save_weights(model, tmp_path / "bf16")
    loaded = Decoder(MIXED, precision_policy(MIXED, Fp8Config()), "train")
    load_weights(loaded, tmp_path / "bf16")
    assert all(torch.equal(ours, loaded.get_parameter(name)) for name, ours in model.named_parameters())
    names = {piece.name for piece in pieces(MIXED)}
    assert {"model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"} <= names
    assert "model.layers.1.mlp.gate_proj.weight" not in names
    save_weights_fp8(model, tmp_path / "fp8")
    load_weights(loaded, tmp_path / "fp8")
    apart = [name for name, ours in model.named_parameters() if not torch.equal(ours, loaded.get_parameter(name))]
    assert apart == [f"{name}.weight" for name, _ in MIXED.linears()], "the linears, and they alone, were quantised"


def test_the_memory_estimate_follows() -> None:
    model = made(MIXED, FP8)
    assert MIXED.num_parameters == sum(p.numel() for p in model.parameters())
    mixed, gated = estimate_of(MIXED), estimate_of(GATED)
    sizes = {part.name: part.num_bytes for part in mixed.parts}
    codes = sum(linear.codes.nbytes + linear.scale.nbytes for _, linear in model.float8_linears())
    assert sizes["weights"] == 2 * MIXED.num_parameters
    assert sizes["FP8 copies"] == codes + sum(linear.codes.nbytes for _, linear in model.float8_linears())
    less = {part.name: part.num_bytes - sizes[part.name] for part in gated.parts}
    assert less["activations"] == 4096 * 2 * 256, "no gate to keep"


def estimate_of(spec: ModelSpec) -> MemoryEstimate:
    names = [name for name, _ in spec.linears()]
    trainer = {"tokens_per_micro_batch": 4096, "activation_checkpointing": "none"}
    recipe = recipe_from_mapping({"model": {"path": "m"}, "environment": {"dataset": "d"}, "trainer": trainer})
    return estimate_memory(recipe, spec, Precisions(names, names, ["K", "V"]), on_gpu=True, device_bytes=None)


def test_layers_may_cache_different_tensors() -> None:
    """A row of scales is as wide as the widest layer's; what a layer does not have is never missed."""
    spec = replace(MIXED, blocks=(LayerBlocks(SquaredReLULayout(), MLPLayout()), *DENSE))
    assert (spec.num_cache_scales, spec.cached(0)) == (8, ())
    policy = precision_policy(spec, PRECISIONS["fp8_full"])
    amax_LS = Forward(made(spec, PRECISIONS["fp8_full"]), TrainerConfig(), 1.0, torch.zeros(())).unobserved_amax()
    assert amax_LS.tolist() == [[0.0] * 8, [-1.0] * 8]
    amax_LS[1] = 448.0
    scales = kv_scales_from_amax(amax_LS, spec, 1.0, policy_version=0)
    assert scales.scale_LS.eq(1).all() and scales.to_tensors(spec)["k_scale"].shape == (1, 4)
    page = cache_format(spec, policy, torch.bfloat16, 16)
    cache = KVCache(page, 2, torch.device("cpu"), scales.scale_LS)
    assert page.bytes_per_page == 16 * 2 * spec.kv_size
    assert [len(layer.tensors) for layer in cache.layers] == [0, 2]
