"""Codes of a block-FP8 folder stay as they are under frozen weights, wherever they fit; check says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octetrl.config.load import recipe_from_mapping
from octetrl.config.schema import Fp8Config, LoraConfig, Recipe
from octetrl.engine.weights import weight_set, weights_digest
from octetrl.fp8.policy import precision_policy
from octetrl.layers.weight_memory import Loading
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import load_weights, save_weights_fp8, take_published_codes
from octetrl.models.published_codes import describe_published_codes, published_codes
from octetrl.models.weight_files import CODES, TensorHeader, pieces
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.workers.models import ModelBuilder

FP8 = Fp8Config(rollout=True, train=True)
SPEC = spec_from_config(preset_config("tiny-moe") | {"num_hidden_layers": 2, "num_key_value_heads": 4})


def model_of(spec: ModelSpec = SPEC, lora: LoraConfig | None = None) -> Decoder:
    return Decoder(spec, precision_policy(spec, FP8), "train", lora=lora)


def published(folder: Path, spec: ModelSpec = SPEC) -> dict[str, Tensor]:
    """A block-FP8 folder whose scales no quantiser of ours would make: 1.3 times too large."""
    model = model_of(spec)
    model.random_init(0)
    save_weights_fp8(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = tensors[name.removesuffix("_scale_inv")]
        tensors[name.removesuffix("_scale_inv")] = (weight.float() / 1.3).to(weight.dtype)
        tensors[name] = tensors[name] * 1.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def recipe_of(folder: Path, **model: Any) -> Recipe:
    own = {"path": str(folder), "context_length": 2048, **model}
    return recipe_from_mapping({"model": own, "environment": {"dataset": "d"}, "precision": "fp8"})


def codes_of(linear: Any) -> Tensor:
    return linear.codes.view(torch.uint8)


def test_codes_and_scales_are_the_folders(tmp_path: Path) -> None:
    tensors = published(tmp_path)
    plain, taken = model_of(), model_of()
    for model in (plain, taken):
        load_weights(model, tmp_path)
    linears = dict(taken.float8_linears())
    assert take_published_codes(taken, tmp_path) == len(linears)
    experts = linears["layers.1.mlp.experts.gate_up_proj"]
    up = "model.layers.1.mlp.experts.5.up_proj.weight"  # rows 256 to 512 of the sixth expert
    rows, blocks = slice(5 * 512 + 256, 6 * 512), slice(5 * 4 + 2, 6 * 4)
    assert torch.equal(codes_of(experts)[rows], tensors[up].view(torch.uint8))
    assert torch.equal(experts.scale[blocks], tensors[up + "_scale_inv"])
    qkv, k = linears["layers.0.attention.qkv_proj"], "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(codes_of(qkv)[SPEC.q_size : SPEC.q_size + SPEC.kv_size], tensors[k].view(torch.uint8))
    again = dict(plain.float8_linears())["layers.1.mlp.experts.gate_up_proj"]
    assert not torch.equal(again.scale, experts.scale), "quantising again gives other scales"
    assert torch.equal(again.weight, experts.weight)


def test_frozen_weights_keep_them_and_trained_ones_are_quantised_again(tmp_path: Path) -> None:
    tensors = published(tmp_path)
    up = "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv"
    for lora, kept in (({"rank": 8}, True), (None, False)):
        recipe = recipe_of(tmp_path, lora=lora)
        policy = precision_policy(SPEC, recipe.fp8)

        def fill(model: Decoder, loading: Loading) -> None:
            load_weights(model, tmp_path, loading=loading)

        builder = ModelBuilder(recipe, SPEC, policy, torch.device("cpu"), fill)
        model = builder.trainer_model()
        engine = builder.engine_model(model)
        for version in range(3):  # each compares another weight with a fresh quantisation, if it may change
            weights_digest(engine, weight_set(model, version))
        experts = dict(model.float8_linears())["layers.0.mlp.experts.gate_up_proj"]
        assert torch.equal(experts.scale[2:4], tensors[up]) == kept
        experts.check_codes()
        said = describe_published_codes(recipe, SPEC)
        assert said is not None
        assert ("keep the folder's codes" in said) == kept and ("training changes the weights" in said) == (not kept)


def test_tensors_that_begin_inside_a_block_are_quantised_again() -> None:
    """Two KV heads of 32: v begins at row 192 of q, k and v."""
    spec = replace(SPEC, num_kv_heads=2)
    headers = {piece.name: TensorHeader(Path(), piece.shape, CODES) for piece in pieces(spec)}
    found = published_codes(spec, headers)
    assert list(found.ragged) == ["layers.0.attention.qkv_proj", "layers.1.attention.qkv_proj"]
    assert len(found.fitting) == 2 * 3
    headers["model.layers.1.mlp.experts.3.up_proj.weight"] = TensorHeader(Path(), (256, 128), "BF16")
    assert "layers.1.mlp.experts.gate_up_proj" not in published_codes(spec, headers).fitting


def test_a_multiplier_of_zero_is_not_taken_over(tmp_path: Path) -> None:
    tensors = published(tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name].view(torch.uint8).zero_()
    tensors[name + "_scale_inv"].zero_()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = model_of()
    load_weights(model, tmp_path)
    assert take_published_codes(model, tmp_path) == len(list(model.float8_linears())) - 1
    assert dict(model.float8_linears())["layers.0.attention.o_proj"].scale.eq(1).all()
