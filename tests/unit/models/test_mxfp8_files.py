"""MXFP8 folders in ModelOpt's layout: names, types and shapes of vLLM's `modelopt_mxfp8`, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octetrl.config.fp8_settings import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights, refuse_ragged, save_weights_fp8, take_published_codes
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from tests.parity.shapes import MIXTURES, TINY

WIDE = replace(TINY["qwen3"], hidden_size=64, intermediate_size=96)
FP8 = Fp8Config(rollout=True, train=True, format="mxfp8")
DOWN = "model.layers.0.mlp.down_proj.weight"


def decoder(spec: ModelSpec) -> Decoder:
    return Decoder(spec, precision_policy(spec, FP8), "train", backend="mxfp8")


@pytest.fixture
def written(tmp_path: Path) -> tuple[Decoder, Path]:
    model = decoder(WIDE)
    model.random_init(3)
    save_weights_fp8(model, tmp_path, mx=True)
    return model, tmp_path


def test_names_types_and_shapes_are_those_that_vllm_reads(written: tuple[Decoder, Path]) -> None:
    _, folder = written
    tensors = load_file(folder / "model.safetensors")
    scales = {name for name in tensors if name.endswith("_scale")}
    assert scales == {f"{name}_scale" for name in tensors if name.endswith("_proj.weight")} and len(scales) > 6
    for name in scales:
        codes = tensors[name.removesuffix("_scale")]
        assert (codes.dtype, tensors[name].dtype) == (torch.float8_e4m3fn, torch.uint8)
        assert tensors[name].shape == (codes.shape[0], codes.shape[1] // 32)
        scale = torch.exp2(tensors[name].float() - 127).repeat_interleave(32, 1)
        assert float((codes.float() * scale).abs().max()) > 0
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}


def test_what_was_written_is_read_with_the_same_values(written: tuple[Decoder, Path]) -> None:
    model, folder = written
    again = decoder(WIDE)
    load_weights(again, folder)
    for (name, mine), (_, read) in zip(model.float8_linears(), again.float8_linears(), strict=True):
        ours, theirs = (one.codes.float() * one.scale.repeat_interleave(32, 1) for one in (mine, read))
        assert torch.equal(ours, theirs) and torch.equal(read.weight.float(), ours), name
    assert load_spec(folder) == WIDE
    assert take_published_codes(again, folder) == 0, "other blocks than block-FP8's"


def test_a_mixture_names_what_stays_bf16(tmp_path: Path) -> None:
    spec = replace(MIXTURES["softmax"], hidden_size=64)
    with pytest.raises(UserError, match="whole blocks of 32"):
        refuse_ragged(spec, mx=True)  # experts of 48
    with pytest.raises(UserError, match="whole blocks of 128"):
        refuse_ragged(WIDE)
    layout = replace(spec.blocks[0].mlp, expert_size=64)
    model = decoder(replace(spec, blocks=(spec.blocks[0]._replace(mlp=layout),)))
    model.random_init(1)
    save_weights_fp8(model, tmp_path, mx=True)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored and "model.layers.0.mlp.gate" in ignored
    again = decoder(model.spec)
    load_weights(again, tmp_path)


@pytest.mark.parametrize("change", ["bfloat16", "missing", "128 x 128"])
def test_other_scales_are_refused(change: str, written: tuple[Decoder, Path]) -> None:
    _, folder = written
    tensors = load_file(folder / "model.safetensors")
    scale = tensors.pop(f"{DOWN}_scale")
    if change == "bfloat16":
        tensors[f"{DOWN}_scale"] = scale.bfloat16()
    elif change == "128 x 128":
        tensors[f"{DOWN}_scale"] = scale[:1, :1].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{DOWN}_scale"):
        load_weights(decoder(WIDE), folder)
