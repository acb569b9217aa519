"""Checkpoints in and out: exports come back bit for bit, scales are read as stored, and what doesn't fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octetrl.config.schema import Fp8Config
from octetrl.fp8.quantize import quantize_weight_reference
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights, save_weights, save_weights_fp8
from octetrl.models.weight_files import checked_headers
from octetrl.system.errors import UserError
from tests.unit.models.tiny_families import decoder_of, hf_model, packed

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
SCALE = f"{DOWN}_scale_inv"
EXPERT = "model.layers.0.mlp.experts.7.down_proj.weight"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
CODES = torch.float8_e4m3fn
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
    export = tmp_path / "export"
    for max_shard_bytes in (5_000_000_000, 1, 30_000, 5_000_000_000):
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
        ("dense", {DOWN: torch.zeros(64, 160).to(CODES)}, f"1 missing: {SCALE}"),
        ("dense", {DOWN: torch.zeros(64, 160, dtype=torch.int8)}, f"1 foreign dtype: {DOWN} I8"),
        ("dense", {SCALE: torch.ones(1, 2)}, f"1 scale beside a weight that is not FP8: {SCALE} (F32)"),
        (
            "dense",
            {NORM: torch.ones(64).to(CODES), f"{NORM}_scale_inv": torch.ones(1)},
            f"1 FP8 without being a matrix: {NORM}",
        ),
        ("mixture", {EXPERT: None}, f"1 missing: {EXPERT}"),
        ("mixture", {EXPERT.replace(".7.", ".8."): torch.zeros(64, 48)}, f"1 extra: {EXPERT.replace('.7.', '.8.')}"),
        (
            "mixture",
            {EXPERT: torch.zeros(64, 48).to(CODES), f"{EXPERT}_scale_inv": torch.ones(64)},
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
