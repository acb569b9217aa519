"""Checkpoints in and out: exports come back bit for bit, scales are read as stored, and what doesn't fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.load import recipe_from_mapping
from octetrl.config.schema import LoraConfig, Recipe
from octetrl.engine.weights import weight_set, weights_digest
from octetrl.fp8.policy import precision_policy
from octetrl.fp8.quantize import quantize_weight_reference
from octetrl.layers.weight_memory import Loading
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec, spec_from_config
from octetrl.models.hf_weights import load_weights, save_weights, save_weights_fp8, take_published_codes
from octetrl.models.published_codes import describe_published_codes, published_codes
from octetrl.models.weight_files import CODES, TensorHeader, checked_headers, pieces
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.workers.models import ModelBuilder
from tests.unit.models.tiny_families import decoder_of, hf_model, packed

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
SCALE = f"{DOWN}_scale_inv"
EXPERT = "model.layers.0.mlp.experts.7.down_proj.weight"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
E4M3 = torch.float8_e4m3fn
Changes = dict[str, Tensor | None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Float32 models as transformers writes them: Qwen3, a tied Qwen2, a mixture."""
    root = tmp_path_factory.mktemp("saved")
    for name, folder in (("qwen3", "dense"), ("qwen2-tied", "tied"), ("qwen3_moe renormalised", "mixture")):
        hf_model(name).save_pretrained(root / folder)
    return root


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved / "dense", tmp_path / "model")


def edit(folder: Path, changes: Changes) -> None:
    """Replace, add or (None) remove tensors."""
    tensors = load_file(folder / SINGLE) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / SINGLE)


def refusal(folder: Path, *, of_headers: bool = True) -> str:
    """What the loader says, and `octetrl check` with it where the headers alone show it."""
    with pytest.raises(UserError) as caught:
        decoder_of(folder)
    message = str(caught.value)
    assert "\n" not in message
    if of_headers:
        with pytest.raises(UserError) as checked:
            checked_headers(folder, load_spec(folder))
        assert str(checked.value) == message
    return message


def test_our_own_export_is_bit_equal_whatever_the_shards(folder: Path, tmp_path: Path) -> None:
    ours = decoder_of(folder, dtype=torch.bfloat16)
    for max_shard_bytes in (5_000_000_000, 1, 30_000):
        export = tmp_path / f"export {max_shard_bytes}"
        save_weights(ours, export, max_shard_bytes)
        assert load_spec(export) == ours.spec
        for (name, mine), again in zip(
            ours.named_parameters(), decoder_of(export, dtype=torch.bfloat16).parameters(), strict=True
        ):
            assert torch.equal(mine, again), name
        if max_shard_bytes == 30_000:
            files = set(json.loads((export / INDEX).read_text())["weight_map"].values())
            assert len(files) > 2
            for file in files:
                assert sum(tensor.nbytes for tensor in load_file(export / file).values()) <= 30_000
        assert not list(export.glob("*.part"))


def test_an_fp8_export_of_ragged_blocks_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"hidden size 64, key size .* 64, intermediate size 160; export BF16"):
        save_weights_fp8(decoder_of(folder, dtype=torch.bfloat16), tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()


def test_fp8_codes_follow_the_loaded_weights(folder: Path) -> None:
    model: Decoder = decoder_of(folder, Fp8Config(train=True, rollout=True), torch.bfloat16)
    token_ids_T, positions_T, context = packed([4])
    first = model(token_ids_T, positions_T, context)
    load_weights(model, folder)
    assert torch.equal(model(token_ids_T, positions_T, context), first)


# ---------------------------------------------------------------- FP8 in


def to_fp8(folder: Path, scale_as: Callable[[Tensor], Tensor] = Tensor.float) -> dict[str, Tensor]:
    """Every projection of the folder as codes and scales that are powers of two; the values they stand for."""
    tensors, values = load_file(folder / SINGLE), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, scale = quantize_weight_reference(tensors[name], power_of_two=True)
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
        tensors |= {name: codes, f"{name}_scale_inv": scale_as(scale).contiguous()}
        values[name] = (codes.float() * wide).bfloat16()
    save_file(tensors, folder / SINGLE)
    return values


def scale_format(folder: Path, scale_fmt: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": scale_fmt}
    (folder / "config.json").write_text(json.dumps(config))


def e8m0(scale: Tensor) -> Tensor:
    return scale.to(torch.float8_e8m0fnu)


def exponents(scale: Tensor) -> Tensor:
    return e8m0(scale).view(torch.uint8)


@pytest.mark.parametrize("scale_as", [Tensor.float, Tensor.bfloat16, e8m0, exponents])
def test_scales_are_read_whatever_they_are_stored_as(scale_as: Callable[[Tensor], Tensor], folder: Path) -> None:
    values = to_fp8(folder, scale_as)
    scale_format(folder, "ue8m0")
    assert torch.equal(decoder_of(folder, dtype=torch.bfloat16).layers[0].mlp.down_proj.weight, values[DOWN])


def test_scales_that_are_no_multipliers_are_refused(folder: Path) -> None:
    to_fp8(folder, exponents)
    assert f"foreign dtype: {SCALE} U8" in refusal(folder)
    edit(folder, {SCALE: torch.ones(1, 2, dtype=torch.int32)})
    scale_format(folder, "ue8m0")
    assert f"1 foreign dtype: {SCALE} I32" in refusal(folder)
    for multiplier, said in ((0.0, "0"), (-1.0, "-1"), (3e36, "3e+36")):  # that erase, turn or overflow
        edit(folder, {SCALE: torch.full((1, 2), multiplier)})
        assert f"'{SCALE}' has a multiplier of {said};" in refusal(folder, of_headers=False)


# ---------------------------------------------------------------- what doesn't fit


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("dense", {NORM: None, UP: None}, f"2 missing: {UP}, {NORM}"),
        ("dense", {UP.replace(".0.", ".7."): torch.zeros(1)}, f"1 extra: {UP.replace('.0.', '.7.')}"),
        ("dense", {EMBEDDING: torch.zeros(96, 64)}, f"1 misshapen: {EMBEDDING} [96, 64] instead of [97, 64]"),
        ("dense", {DOWN: torch.zeros(64, 160).to(E4M3)}, f"1 missing: {SCALE}"),
        ("dense", {DOWN: torch.zeros(64, 160, dtype=torch.int8)}, f"1 foreign dtype: {DOWN} I8"),
        ("dense", {SCALE: torch.ones(1, 2)}, f"1 scale beside a weight that is not FP8: {SCALE} (F32)"),
        (
            "dense",
            {NORM: torch.ones(64).to(E4M3), f"{NORM}_scale_inv": torch.ones(1)},
            f"1 FP8 without being a matrix: {NORM}",
        ),
        ("mixture", {EXPERT: None}, f"1 missing: {EXPERT}"),
        ("mixture", {EXPERT.replace(".7.", ".8."): torch.zeros(64, 48)}, f"1 extra: {EXPERT.replace('.7.', '.8.')}"),
        (
            "mixture",
            {EXPERT: torch.zeros(64, 48).to(E4M3), f"{EXPERT}_scale_inv": torch.ones(64)},
            f"1 misshapen: {EXPERT}_scale_inv [64] instead of [1, 1]",
        ),
        ("mixture", {FUSED: torch.zeros(8, 96, 64)}, f"1 extra: {FUSED}"),
    ],
)
def test_headers_that_do_not_fit_are_named_in_one_line(
    kind: str, changes: Changes, told: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / kind, tmp_path / "model")
    edit(tmp_path / "model", changes)
    assert told in refusal(tmp_path / "model")


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    save_file({NORM: torch.ones(64)}, folder / SINGLE)
    assert " more" in refusal(folder)


def test_old_checkpoints_rotary_buffers_and_redundant_lm_head_are_fine(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved / "tied", tmp_path / "model")
    embedding = load_file(folder / SINGLE)[EMBEDDING]
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit(folder, {**buffer, "lm_head.weight": embedding.clone()})
    decoder_of(folder)
    edit(folder, {"lm_head.weight": embedding + 1})
    assert "tie_word_embeddings" in refusal(folder, of_headers=False)


def test_a_value_that_is_not_finite_is_named(folder: Path) -> None:
    edit(folder, {NORM: torch.full((64,), torch.inf)})
    assert f"'{NORM}' is not finite" in refusal(folder, of_headers=False)
    edit(folder, {NORM: torch.full((64,), torch.finfo(torch.float32).max)})
    decoder_of(folder, dtype=torch.float32)
    with pytest.raises(UserError, match=rf"'{NORM}' reaches 3.4e\+38, which bfloat16 cannot hold"):
        decoder_of(folder, dtype=torch.bfloat16)


def index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_files_that_are_absent_or_broken_are_named(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"not a checkpoint")
    assert "can't be read as safetensors" in refusal(folder)
    (folder / SINGLE).unlink()
    assert "model.init=random" in refusal(folder)
    for content, told in (
        ('{"weight_map": {"model.norm.weight": "model-00001.safetensors"}}', "lacks model-00001.safetensors"),
        ("{}", "not a safetensors index"),
        ('{"weight_map": {"model.norm.weight": [1]}}', "not a safetensors index"),
        ('{"weight_map": {"model.norm.weight": "../a.safetensors"}}', "names ../a.safetensors"),
        ('{"weight_map": {"model.norm.weight": "/a.safetensors"}}', "names /a.safetensors"),
        ('{"weight_map": 7}', "'weight_map' is 7"),
        ("[" * 100_000, "it is nested too deeply"),
    ):
        (folder / INDEX).write_text(content)
        assert told in refusal(folder)


def test_a_second_set_of_weights_in_the_folder_is_refused(folder: Path) -> None:
    other = "model-00001-of-00001.safetensors"
    index(folder, {NORM: other})
    assert f"{other}, which is not there" in refusal(folder)
    shutil.copy(folder / SINGLE, folder / other)
    assert "names 1 other files" in refusal(folder)
    index(folder, {NORM: SINGLE})
    decoder_of(folder)


def test_an_index_that_is_not_of_its_files_is_refused(folder: Path) -> None:
    """Of a tensor that two shards have the later one would win, whichever is right."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({name: tensors[name] + 1 for name in (NORM, EMBEDDING)}, folder / "b.safetensors")
    index(folder, dict.fromkeys(tensors, "a.safetensors") | {NORM: "b.safetensors"})
    message = refusal(folder)
    assert "stores 2 tensors twice: " in message and f"{NORM} in a.safetensors and b.safetensors" in message
    save_file({name: tensors[name] for name in tensors if name not in (NORM, EMBEDDING)}, folder / "a.safetensors")
    message = refusal(folder)
    assert f"{INDEX} is not of these files: it names {EMBEDDING} in a.safetensors, which b.safetensors has" in message


# ---------------------------------------------------------------- published codes


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
