"""Every family and shape against transformers: logits, gradients, exports that load there, and block-FP8 both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from octetrl.config.lora import projections
from octetrl.fp8.quantize import dequantize_weight, quantize_weight_reference
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import save_weights, save_weights_fp8
from octetrl.system.errors import UserError
from tests.unit.models.tiny_families import (
    FAMILIES,
    VARIANTS,
    assert_transformers_reads_it_as_we_do,
    decoder_of,
    hf_logits,
    hf_model,
    packed,
)

LENGTHS = [12, 1, 150]  # more than a tile of keys or two chunks of linear attention, and longer than any window


def relative_error(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None and theirs is not None
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_logits_and_gradients_are_those_of_transformers_and_exports_load_there(name: str, tmp_path: Path) -> None:
    theirs = hf_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = decoder_of(tmp_path / "theirs")
    token_ids_T, positions_T, context = packed(LENGTHS)
    hidden_TE = ours(token_ids_T, positions_T, context)
    their_logits_TV = hf_logits(theirs, token_ids_T, LENGTHS)
    assert relative_error(ours.logits(hidden_TE), their_logits_TV) < 1e-5

    targets_T = token_ids_T.roll(-1)
    ours.logprobs(hidden_TE, targets_T, chunk=50)[0].mean().backward()
    torch.log_softmax(their_logits_TV, -1).gather(1, targets_T[:, None]).mean().backward()
    attention, mlp = theirs.model.layers[1].self_attn, theirs.model.layers[1].mlp
    grads = {
        "embedding.weight": theirs.model.embed_tokens.weight.grad,
        "layers.0.mlp_norm.weight": theirs.model.layers[0].post_attention_layernorm.weight.grad,
        "layers.1.attention.o_proj.weight": attention.o_proj.weight.grad,
    }
    if attention.o_proj.bias is not None:
        grads["layers.1.attention.o_proj.bias"] = attention.o_proj.bias.grad
    if hasattr(attention, "v_proj"):
        qkv = [getattr(attention, f"{letter}_proj").weight.grad for letter in "qkv"]
        grads["layers.1.attention.qkv_proj.weight"] = torch.cat(qkv)
    for key, parameter in getattr(theirs.model.layers[0], "linear_attn", torch.nn.Module()).named_parameters():
        grads[f"layers.0.attention.{key}"] = parameter.grad.squeeze(1) if key == "conv1d.weight" else parameter.grad
    if "layers.0.attention.in_proj_qkv.weight" in grads:
        projected = [grads.pop(f"layers.0.attention.in_proj_{part}.weight") for part in ("qkv", "z")]
        grads["layers.0.attention.in_proj_qkvz.weight"] = torch.cat(projected)
    if hasattr(mlp, "down_proj"):
        grads["layers.1.mlp.down_proj.weight"] = mlp.down_proj.weight.grad
    assert relative_error(ours.lm_head_weight.grad, theirs.lm_head.weight.grad) < 1e-4
    for parameter, gradient in grads.items():
        assert relative_error(ours.get_parameter(parameter).grad, gradient) < 1e-4, parameter

    save_weights(ours, tmp_path / "export", max_shard_bytes=40_000)
    assert load_spec(tmp_path / "export") == ours.spec
    reread = decoder_of(tmp_path / "export").named_parameters()
    assert all(torch.equal(ours.get_parameter(key), parameter) for key, parameter in reread)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32, attn_implementation="eager")
    held = again.state_dict()
    assert all(torch.equal(held[key], tensor) for key, tensor in theirs.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(hf_logits(again, token_ids_T, LENGTHS), their_logits_TV, rtol=1e-4, atol=5e-5)


def test_files_have_the_familys_names(tmp_path: Path) -> None:
    hf_model("mixtral, a window").save_pretrained(tmp_path / "theirs")
    save_weights(decoder_of(tmp_path / "theirs"), tmp_path / "mixtral")
    ours, published = (load_file(tmp_path / folder / "model.safetensors") for folder in ("mixtral", "theirs"))
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in ours and set(ours) == set(published)
    assert all(torch.equal(ours[name], tensor) for name, tensor in published.items())
    hf_model("phi3, a window, heads of 96").save_pretrained(tmp_path / "theirs")
    save_weights(decoder_of(tmp_path / "theirs"), tmp_path / "phi3")
    stored = load_file(tmp_path / "phi3/model.safetensors")
    assert stored["model.layers.0.self_attn.qkv_proj.weight"].shape == (384 + 2 * 192, 384)
    assert stored["model.layers.1.mlp.gate_up_proj.weight"].shape == (320, 384)
    assert json.loads((tmp_path / "phi3/config.json").read_text())["sliding_window"] == 11
    assert projections(load_spec(tmp_path / "phi3")) == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


# ---------------------------------------------------------------- block-FP8

DENSE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MIXTURE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_key_value_heads": 4,
}
LATENT = MIXTURE | {"q_lora_rank": 128, "v_head_dim": 32}
ROUTER, MODULE = "model.layers.1.mlp.gate", "model.layers.1.self_attn."


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "whole_blocks", "quantised", "kept"),
    [
        ("qwen2", DENSE, "model.layers.0.mlp.down_proj", None),
        ("qwen3-tied", DENSE, "model.layers.0.mlp.down_proj", None),
        ("qwen3_moe renormalised", MIXTURE, "model.layers.1.mlp.experts.5.up_proj", ROUTER),
        ("dots1, groups, a dense layer", MIXTURE, "model.layers.1.mlp.experts.5.up_proj", ROUTER),
        ("deepseek_v3, latents of queries", LATENT, f"{MODULE}q_b_proj", f"{MODULE}kv_a_proj_with_mqa"),
    ],
)
def test_transformers_reads_an_fp8_export_as_we_do(
    name: str, whole_blocks: dict[str, Any], quantised: str, kept: str | None, tmp_path: Path
) -> None:
    """Codes and scales by expert. What stays in BF16 is named as not converted."""
    hf_model(name, **whole_blocks).save_pretrained(tmp_path / "theirs")
    ours = decoder_of(tmp_path / "theirs", dtype=torch.bfloat16)
    save_weights_fp8(ours, tmp_path / "fp8", max_shard_bytes=200_000)
    files = [load_file(file) for file in sorted((tmp_path / "fp8").glob("*.safetensors"))]
    stored = {key: tensor for file in files for key, tensor in file.items()}
    codes, scale = stored[f"{quantised}.weight"], stored[f"{quantised}.weight_scale_inv"]
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == tuple(-(-size // 128) for size in codes.shape)
    if kept is not None:
        assert stored[f"{kept}.weight"].dtype == torch.bfloat16
        config = json.loads((tmp_path / "fp8/config.json").read_text())
        assert kept in config["quantization_config"]["modules_to_not_convert"]
    again = decoder_of(tmp_path / "fp8", dtype=torch.bfloat16)
    for (parameter, mine), read in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert (mine - read).float().norm() <= 0.04 * mine.float().norm(), parameter
        exact = not parameter.endswith("proj.weight") or "kv_a_proj" in parameter or "kv_b_proj" in parameter
        assert torch.equal(mine, read) == exact, parameter
    assert_transformers_reads_it_as_we_do(tmp_path / "fp8", again, tmp_path / "bf16")


def test_codes_of_latents_as_published_and_further_layers_are_read(tmp_path: Path) -> None:
    """DeepSeek has codes of kv_a and kv_b, and a layer that predicts a further token."""
    hf_model("deepseek_v3, latents of queries", **LATENT).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    want = {}
    for name in (f"{MODULE}kv_a_proj_with_mqa.weight", f"{MODULE}kv_b_proj.weight"):
        codes, scale = quantized = quantize_weight_reference(stored[name])
        stored |= {name: codes, f"{name}_scale_inv": scale}
        want[name] = dequantize_weight(quantized).bfloat16()
    stored["model.layers.2.eh_proj.weight"] = torch.zeros(128, 256)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match=r"1 extra: model\.layers\.2\.eh_proj\.weight"):
        decoder_of(tmp_path, dtype=torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    again = decoder_of(tmp_path, dtype=torch.bfloat16)
    for name, matrix in want.items():
        assert torch.equal(again.get_parameter(name.replace("model.", "").replace("self_attn", "attention")), matrix)
    exact = f"{MODULE}kv_a_layernorm.weight"
    ours = again.get_parameter(exact.replace("model.", "").replace("self_attn", "attention"))
    assert torch.equal(ours, stored[exact].bfloat16())
