"""gpt-oss: sinks, biases and the clamped activation against transformers, and its files: 3-D experts, MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.fp8.mxfp4 import dequantize_mxfp4
from octetrl.fp8.policy import precision_policy
from octetrl.fp8.quantize import dequantize_weight, quantize_weight_reference
from octetrl.models.families import hf_config, load_spec, spec_from_config
from octetrl.models.hf_weights import save_weights, save_weights_fp8
from octetrl.models.stacked_files import as_file, as_rows
from octetrl.models.weight_files import pieces
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from tests.unit.models.tiny_families import decoder_of, hf_logits, hf_model, packed

LENGTHS = [12, 1, 150]
EXPERTS = "model.layers.1.mlp.experts."
WIDE = {"hidden_size": 96, "intermediate_size": 96}  # whole blocks of 32


def saved(folder: Path, **changes: Any) -> Path:
    hf_model("gpt_oss", **changes).save_pretrained(folder)
    return folder


def test_gradients_of_what_only_this_family_has_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = hf_model("gpt_oss")
    theirs.save_pretrained(tmp_path)
    ours = decoder_of(tmp_path)
    token_ids_T, positions_T, context = packed(LENGTHS)
    targets_T = token_ids_T.roll(-1)
    hidden_TE = ours(token_ids_T, positions_T, context)
    ours.logprobs(hidden_TE, targets_T)[0].mean().backward()
    logits_TV = hf_logits(theirs, token_ids_T, LENGTHS)
    torch.testing.assert_close(ours.logits(hidden_TE), logits_TV, rtol=1e-4, atol=1e-4)
    torch.log_softmax(logits_TV, -1).gather(1, targets_T[:, None]).mean().backward()
    parameters = dict(theirs.named_parameters())
    found = [piece for piece in pieces(ours.spec) if "layers.1." in piece.name]
    assert {"sinks", "router", "gate_up_proj_bias"} <= {part for piece in found for part in piece.name.split(".")}
    for piece in found:
        gradient = ours.get_parameter(piece.parameter).grad
        assert gradient is not None, piece.parameter
        held, wanted = as_file(piece, gradient[piece.start : piece.start + piece.rows]), parameters[piece.name].grad
        assert wanted is not None
        assert ((held - wanted).norm() / wanted.norm()).item() < 1e-4, piece.name


def test_files_have_the_familys_tensors(tmp_path: Path) -> None:
    theirs = load_file(saved(tmp_path / "theirs") / "model.safetensors")
    ours = decoder_of(tmp_path / "theirs")
    save_weights(ours, tmp_path / "ours")
    written = load_file(tmp_path / "ours/model.safetensors")
    assert written.keys() == theirs.keys() and all(torch.equal(written[name], theirs[name]) for name in theirs)
    assert theirs[f"{EXPERTS}gate_up_proj"].shape == (6, 64, 96)
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert (config["attention_bias"], config["sliding_window"], config["layer_types"][:2]) == (
        True,
        16,
        ["sliding_attention", "full_attention"],
    )
    for piece in pieces(ours.spec):  # some rows of a stack are those of the whole
        if piece.stack is not None:
            assert torch.equal(as_rows(piece.stack, as_file(piece, ours.get_parameter(piece.parameter))),
                               ours.get_parameter(piece.parameter))  # fmt: skip
    with pytest.raises(UserError, match="export BF16"):
        save_weights_fp8(ours, tmp_path / "fp8")


def to_mxfp4(folder: Path, target: Path) -> dict[str, Tensor]:
    """Copies a model with its experts in MXFP4; returns them in BF16, [X, rows, columns] as MXFP4 has them."""
    target.mkdir()
    held, exact = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in held if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj")]:
        experts, columns, rows = held.pop(name).shape
        scales = torch.randint(110, 124, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        blocks = torch.randint(256, (*scales.shape, 16), generator=generator, dtype=torch.uint8)
        held[f"{name}_blocks"], held[f"{name}_scales"] = blocks, scales
        exact[name] = dequantize_mxfp4(blocks, scales)
    save_file(held, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return exact


def test_mxfp4_is_read_exactly_and_fp8_holds_it_exactly(tmp_path: Path) -> None:
    exact = to_mxfp4(saved(tmp_path / "theirs", **WIDE), tmp_path / "mxfp4")
    fp8 = Fp8Config(rollout=True, train=True)
    assert precision_policy(load_spec(tmp_path / "mxfp4"), fp8).power_of_two
    ours = decoder_of(tmp_path / "mxfp4", fp8, torch.bfloat16)
    save_weights(ours, tmp_path / "bf16")
    written = load_file(tmp_path / "bf16/model.safetensors")
    for name, values in exact.items():
        assert torch.equal(written[name], values.mT), name
    experts: Any = ours.get_submodule("layers.1.mlp.experts")
    whole = quantize_weight_reference(experts.gate_up_proj.weight[:192], True)  # the first expert's
    assert torch.equal(dequantize_weight(whole).to(torch.bfloat16), experts.gate_up_proj.weight[:192])
    assert torch.equal(experts.gate_up_proj.codes[:192].float(), whole.codes.float())


def test_mxfp4_values() -> None:
    blocks = torch.zeros(2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 0, 15], blocks[1, 0, 3] = 0x71, 0xF2, 0x0B
    values = dequantize_mxfp4(blocks, torch.tensor([[127], [255]], dtype=torch.uint8))
    assert values.shape == (2, 32) and values[1].isnan().all()
    assert values[0, :2].tolist() == [0.5, 6.0] and values[0, 30:].tolist() == [1.0, -6.0]
    tiny, huge = dequantize_mxfp4(blocks[:1].expand(2, 1, 16), torch.tensor([[0], [254]], dtype=torch.uint8))
    assert tiny[0].item() == 2.0**-128 and huge[1].isinf() and huge[30].item() == 2.0**127


@pytest.mark.parametrize(
    ("names", "problem"),
    [(["_blocks"], "extra"), (["_blocks", "_scales"], "missing")],
)
def test_parts_of_mxfp4_that_do_not_fit_are_refused(tmp_path: Path, names: list[str], problem: str) -> None:
    to_mxfp4(saved(tmp_path / "theirs", **WIDE), tmp_path / "mxfp4")
    file = tmp_path / "mxfp4/model.safetensors"
    held = load_file(file)
    for name in names:
        held[f"{EXPERTS}down_proj{name}"] = held[f"{EXPERTS}down_proj{name}"][:, :1].contiguous()
    save_file(held, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=problem):
        decoder_of(tmp_path / "mxfp4")


def test_config() -> None:
    spec = spec_from_config(preset_config("gpt-oss-20b"))
    assert spec.num_parameters == 20_914_757_184  # as openai/gpt-oss-20b is published
    assert [getattr(spec.blocks_of(layer).attention, "window", 0) for layer in range(3)] == [128, None, 128]
    assert spec_from_config(json.loads(json.dumps(hf_config(spec)))) == spec
    assert (spec.max_positions, spec.fp8_k_is_safe) == (131_072, False)
    left_out = {key: value for key, value in preset_config("gpt-oss-20b").items() if key in (
        "architectures", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
        "num_local_experts", "num_experts_per_tok", "eos_token_id", "pad_token_id", "num_key_value_heads",
    )}  # fmt: skip
    assert spec_from_config(left_out) == spec
    with pytest.raises(UserError, match="swiglu_limit"):
        spec_from_config(left_out | {"swiglu_limit": 6.0})
    with pytest.raises(UserError, match="mxfp4"):
        spec_from_config(preset_config("qwen3-30b-a3b") | {"quantization_config": {"quant_method": "mxfp4"}})


@pytest.mark.parametrize("given", [None, False, True])
def test_scales_are_powers_of_two_unless_the_recipe_says_no(given: bool | None) -> None:
    fp8 = Fp8Config(rollout=True, power_of_two=given)
    of_family = precision_policy(spec_from_config(preset_config("gpt-oss-20b")), fp8)
    assert of_family.power_of_two == (given is not False)
    assert precision_policy(spec_from_config(preset_config("tiny-moe")), fp8).power_of_two == (given is True)
