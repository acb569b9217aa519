"""Checkpoints in and out: transformers loads what we write, we refuse what doesn't fit, FP8 and shards round-trip."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from octetrl.config.schema import Fp8Config
from octetrl.fp8.quantize import quantize_weight_reference
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights, save_weights, save_weights_fp8
from octetrl.system.errors import UserError
from tests.unit.models.tiny_families import (
    FAMILIES,
    assert_transformers_reads_it_as_we_do,
    decoder_of,
    hf_logits,
    hf_model,
    packed,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A float32 Qwen3 model as transformers writes it."""
    hf_model("qwen3").save_pretrained(tmp_path)
    return tmp_path


def _edit(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors; `__` stands for the dot."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def _refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        decoder_of(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 40_000])
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_an_export_and_gives_the_same_logits(
    name: str, max_shard_bytes: int, tmp_path: Path
) -> None:
    hf_model(name).save_pretrained(tmp_path / "theirs")
    ours = decoder_of(tmp_path / "theirs")
    save_weights(ours, tmp_path / "export", max_shard_bytes)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32, attn_implementation="eager")
    token_ids_T, positions_T, context = packed([12])
    with torch.no_grad():
        theirs_TV = hf_logits(again, token_ids_T, [12])
        torch.testing.assert_close(
            ours.logits(ours(token_ids_T, positions_T, context)), theirs_TV, rtol=1e-4, atol=1e-4
        )


def test_our_own_export_is_bit_equal_whatever_the_shards(folder: Path, tmp_path: Path) -> None:
    ours = decoder_of(folder, dtype=torch.bfloat16)
    for max_shard_bytes in (5_000_000_000, 1, 30_000, 5_000_000_000):
        save_weights(ours, tmp_path / "export", max_shard_bytes)
        assert load_spec(tmp_path / "export") == ours.spec
        for (name, mine), again in zip(
            ours.named_parameters(), decoder_of(tmp_path / "export", dtype=torch.bfloat16).parameters(), strict=True
        ):
            assert torch.equal(mine, again), name
    assert not list((tmp_path / "export").glob("*.part"))


def test_shards_keep_to_their_size(folder: Path, tmp_path: Path) -> None:
    save_weights(decoder_of(folder), tmp_path / "export", max_shard_bytes=60_000)
    index = json.loads((tmp_path / "export/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2 and files == {path.name for path in (tmp_path / "export").glob("*.safetensors")}
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(tmp_path / "export" / file).values()) <= 60_000


WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-tied"])
def test_transformers_reads_an_fp8_export_as_we_do(name: str, tmp_path: Path) -> None:
    hf_model(name, **WHOLE_BLOCKS).save_pretrained(tmp_path / "theirs")
    ours = decoder_of(tmp_path / "theirs", dtype=torch.bfloat16)
    save_weights_fp8(ours, tmp_path / "fp8")
    assert load_file(tmp_path / "fp8/model.safetensors")[f"{DOWN}.weight"].dtype == torch.float8_e4m3fn
    again = decoder_of(tmp_path / "fp8", dtype=torch.bfloat16)
    for (parameter, mine), read in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert (mine - read).float().norm() <= 0.04 * mine.float().norm(), parameter
    assert_transformers_reads_it_as_we_do(tmp_path / "fp8", again, tmp_path / "bf16")


def test_an_fp8_export_of_ragged_blocks_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"hidden size 64, key size .* 64, intermediate size 160; export BF16"):
        save_weights_fp8(decoder_of(folder, dtype=torch.bfloat16), tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()


# ---------------------------------------------------------------- FP8 in

DOWN = "model.layers.0.mlp.down_proj"
DOWN_SCALE = DOWN.replace(".", "__") + "__weight_scale_inv"


def _to_fp8(folder: Path, scale_as: Callable[[Tensor], Tensor] = Tensor.float) -> dict[str, Tensor]:
    """Every projection of the folder as codes and scales that are powers of two; the values they stand for."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, scale = quantize_weight_reference(tensors[name], power_of_two=True)
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
        tensors |= {name: codes, f"{name}_scale_inv": scale_as(scale).contiguous()}
        values[name] = (codes.float() * wide).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return values


def _scale_format(folder: Path, scale_fmt: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": scale_fmt}
    (folder / "config.json").write_text(json.dumps(config))


def _e8m0(scale: Tensor) -> Tensor:
    return scale.to(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    "scale_as", [Tensor.float, Tensor.bfloat16, _e8m0, lambda scale: _e8m0(scale).view(torch.uint8)]
)
def test_scales_are_read_whatever_they_are_stored_as(scale_as: Callable[[Tensor], Tensor], folder: Path) -> None:
    values = _to_fp8(folder, scale_as)
    _scale_format(folder, "ue8m0")
    down = decoder_of(folder, dtype=torch.bfloat16).layers[0].mlp.down_proj.weight
    assert torch.equal(down, values[f"{DOWN}.weight"])


def test_scales_that_are_no_multipliers_are_refused(folder: Path) -> None:
    _to_fp8(folder, lambda scale: _e8m0(scale).view(torch.uint8))
    assert f"foreign dtype: {DOWN}.weight_scale_inv U8" in _refusal(folder)
    _edit(folder, **{DOWN_SCALE: torch.ones(1, 2, dtype=torch.int32)})
    _scale_format(folder, "ue8m0")
    assert f"1 foreign dtype: {DOWN}.weight_scale_inv I32" in _refusal(folder)


@pytest.mark.parametrize(("multiplier", "said"), [(0.0, "0"), (-1.0, "-1"), (3e36, r"3e\+36")])
def test_multipliers_that_erase_turn_or_overflow_are_refused(multiplier: float, said: str, folder: Path) -> None:
    _to_fp8(folder)
    scale = load_file(folder / "model.safetensors")[f"{DOWN}.weight_scale_inv"]
    _edit(folder, **{DOWN_SCALE: torch.full_like(scale, multiplier)})
    with pytest.raises(UserError, match=f"'{DOWN}.weight_scale_inv' has a multiplier of {said}; one is above 0"):
        decoder_of(folder)


def test_scales_without_codes_and_codes_that_are_no_matrix_are_refused(folder: Path) -> None:
    _edit(folder, **{DOWN_SCALE: torch.ones(1, 2)})
    assert f"1 scale beside a weight that is not FP8: {DOWN}.weight_scale_inv (F32)" in _refusal(folder)
    codes = torch.ones(64).to(torch.float8_e4m3fn)
    _edit(folder, **{DOWN_SCALE: None}, model__norm__weight=codes, model__norm__weight_scale_inv=torch.ones(1))
    assert "1 FP8 without being a matrix: model.norm.weight" in _refusal(folder)


# ---------------------------------------------------------------- what doesn't fit


def test_old_checkpoints_rotary_buffers_and_redundant_lm_head_are_fine(tmp_path: Path) -> None:
    hf_model("qwen2-tied").save_pretrained(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    _edit(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4), lm_head__weight=embedding.clone())
    decoder_of(tmp_path)
    _edit(tmp_path, lm_head__weight=embedding + 1)
    assert "tie_word_embeddings" in _refusal(tmp_path)


def test_missing_extra_and_misshapen_tensors_are_told_in_one_line(folder: Path) -> None:
    _edit(
        folder,
        model__norm__weight=None,
        model__layers__0__mlp__up_proj__weight=None,
        model__layers__7__mlp__up_proj__weight=torch.zeros(1),
        model__embed_tokens__weight=torch.zeros(96, 64),
    )
    message = _refusal(folder)
    assert "2 missing: model.layers.0.mlp.up_proj.weight, model.norm.weight" in message
    assert "1 extra: model.layers.7.mlp.up_proj.weight" in message
    assert "1 misshapen: model.embed_tokens.weight [96, 64] instead of [97, 64]" in message


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    assert " more" in _refusal(folder)


def test_codes_without_scales_and_foreign_dtypes_are_refused(folder: Path) -> None:
    codes = torch.zeros(64, 160, dtype=torch.float8_e4m3fn)
    _edit(folder, model__layers__0__mlp__down_proj__weight=codes)
    assert "1 missing: model.layers.0.mlp.down_proj.weight_scale_inv" in _refusal(folder)
    _edit(folder, model__layers__0__mlp__down_proj__weight=torch.zeros(64, 160, dtype=torch.int8))
    assert "1 foreign dtype: model.layers.0.mlp.down_proj.weight I8" in _refusal(folder)


def test_a_value_that_is_not_finite_is_named(folder: Path) -> None:
    _edit(folder, model__norm__weight=torch.full((64,), torch.inf))
    assert "'model.norm.weight' is not finite" in _refusal(folder)
    _edit(folder, model__norm__weight=torch.full((64,), torch.finfo(torch.float32).max))
    decoder_of(folder, dtype=torch.float32)
    with pytest.raises(UserError, match=r"'model.norm.weight' reaches 3.4e\+38, which bfloat16 cannot hold"):
        decoder_of(folder, dtype=torch.bfloat16)


def test_files_that_are_absent_or_broken_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    assert "can't be read as safetensors" in _refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "model.init=random" in _refusal(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001.safetensors"}}))
    assert "lacks model-00001.safetensors" in _refusal(folder)
    for content, told in (
        ("{}", "not a safetensors index"),
        ('{"weight_map": {"model.norm.weight": [1]}}', "not a safetensors index"),
        ('{"weight_map": {"model.norm.weight": "../a.safetensors"}}', "names ../a.safetensors, which is not beside it"),
        ('{"weight_map": {"model.norm.weight": "/a.safetensors"}}', "names /a.safetensors, which is not beside it"),
        ('{"weight_map": 7}', "'weight_map' is 7, an object is needed"),
        ("[" * 100_000, "it is nested too deeply"),
    ):
        index.write_text(content)
        assert told in _refusal(folder)


def test_a_second_set_of_weights_in_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    said = "has model.safetensors, and a model.safetensors.index.json that names"
    assert f"{said} model-00001-of-00001.safetensors, which is not there; remove" in _refusal(folder)
    (folder / "model-00001-of-00001.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert f"{said} 1 other files; remove what is not of this model" in _refusal(folder)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}))
    decoder_of(folder)


def test_a_tensor_that_two_shards_have_is_refused(folder: Path) -> None:
    """The later one would win, whichever is right."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = ("model.norm.weight", "model.embed_tokens.weight")
    save_file(tensors, folder / "a.safetensors")
    save_file({name: tensors[name] + 1 for name in names}, folder / "b.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {names[0]: "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    message = _refusal(folder)
    assert "stores 2 tensors twice: " in message and f"{names[0]} in a.safetensors and b.safetensors" in message


def test_fp8_codes_follow_the_loaded_weights(folder: Path) -> None:
    model: Decoder = decoder_of(folder, Fp8Config(train=True, rollout=True), torch.bfloat16)
    token_ids_T, positions_T, context = packed([4])
    first = model(token_ids_T, positions_T, context)
    load_weights(model, folder)
    assert torch.equal(model(token_ids_T, positions_T, context), first)
