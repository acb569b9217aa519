"""Latent attention in Hugging Face folders: transformers' logits, exports that load there, block-FP8, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
)

from octetrl.config.schema import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.fp8.quantize import dequantize_weight, quantize_weight_reference
from octetrl.layers.tensor_group import ONE_WORKER
from octetrl.models.build_blocks import LayerBuilder
from octetrl.models.families import hf_config, load_spec, prediction_layers, spec_from_config
from octetrl.models.hf_weights import save_weights, save_weights_fp8
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from tests.unit.models.tiny_families import (
    ROPE,
    SHAPE,
    assert_transformers_reads_it_as_we_do,
    decoder_of,
    hf_logits,
    packed,
)

DEEPSEEK: dict[str, Any] = {key: value for key, value in SHAPE.items() if key != "head_dim"} | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
}
YARN = ROPE | {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "Moonlight's": DEEPSEEK | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446},
    "q_lora": DEEPSEEK | {"q_lora_rank": 40, "routed_scaling_factor": 2.5},
    "YaRN": DEEPSEEK | {"q_lora_rank": 40, "rope_parameters": YARN},
    "halves, wide values": DEEPSEEK | {"rope_interleave": False, "v_head_dim": 40, "kv_lora_rank": 48},
    "GLM": DEEPSEEK
    | {"glm": True, "rms_norm_eps": 1e-3, "q_lora_rank": 40, "v_head_dim": 32, "mlp_layer_types": ["sparse", "dense"]},
}


def theirs(variant: str, **changes: Any) -> PreTrainedModel:
    """A float32 model of transformers with norms, a router and a correction bias that are not trivial."""
    torch.manual_seed(0)
    settings = {**VARIANTS[variant], **changes}
    model: PreTrainedModel
    if settings.pop("glm", False):
        del settings["first_k_dense_replace"]
        model = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**settings))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**settings))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("mlp.gate.weight"):
            tensor.data.normal_(std=0.3)
        elif name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.1)
        elif "norm" in name:
            tensor.data.add_(0.3 * torch.randn(tensor.shape))
    return model.eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_and_exports_load_there(variant: str, tmp_path: Path) -> None:
    model = theirs(variant)
    model.save_pretrained(tmp_path / "theirs")
    ours = decoder_of(tmp_path / "theirs")
    lengths = [12, 70]  # more than a tile of keys
    token_ids_T, positions_T, context = packed(lengths)
    with torch.no_grad():
        theirs_TV = hf_logits(model, token_ids_T, lengths)
        ours_TV = ours.logits(ours(token_ids_T, positions_T, context))
        torch.testing.assert_close(ours_TV, theirs_TV, rtol=1e-4, atol=5e-5)
        save_weights(ours, tmp_path / "export", max_shard_bytes=40_000)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
        assert torch.equal(hf_logits(again, token_ids_T, lengths), theirs_TV)
    assert load_spec(tmp_path / "export") == ours.spec
    reread = decoder_of(tmp_path / "export").named_parameters()
    assert all(torch.equal(ours.get_parameter(name), parameter) for name, parameter in reread)


WHOLE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "v_head_dim": 32,
}


@pytest.mark.filterwarnings("ignore")
def test_block_fp8_as_published_and_further_layers_are_read(tmp_path: Path) -> None:
    """Our export keeps kv_a and kv_b in BF16. DeepSeek has codes of them, and a layer that predicts a further token."""
    theirs("q_lora", **WHOLE).save_pretrained(tmp_path / "theirs")
    ours = decoder_of(tmp_path / "theirs", dtype=torch.bfloat16)
    save_weights_fp8(ours, tmp_path / "fp8")
    read = decoder_of(tmp_path / "fp8", dtype=torch.bfloat16)
    assert_transformers_reads_it_as_we_do(tmp_path / "fp8", read, tmp_path / "bf16")
    stored = load_file(tmp_path / "fp8/model.safetensors")
    module = "model.layers.1.self_attn."
    assert stored[f"{module}q_b_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored[f"{module}kv_b_proj.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    assert f"{module}kv_a_proj_with_mqa" in config["quantization_config"]["modules_to_not_convert"]
    want = {}
    for name in (f"{module}kv_a_proj_with_mqa.weight", f"{module}kv_b_proj.weight"):
        codes, scale = quantized = quantize_weight_reference(stored[name])
        stored |= {name: codes, f"{name}_scale_inv": scale}
        want[name] = dequantize_weight(quantized).bfloat16()
    stored["model.layers.2.eh_proj.weight"] = torch.zeros(128, 256)
    save_file(stored, tmp_path / "fp8/model.safetensors")
    with pytest.raises(UserError, match=r"1 extra: model\.layers\.2\.eh_proj\.weight"):
        decoder_of(tmp_path / "fp8", dtype=torch.bfloat16)
    (tmp_path / "fp8/config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    again = decoder_of(tmp_path / "fp8", dtype=torch.bfloat16)
    for name, matrix in want.items():
        assert torch.equal(again.get_parameter(name.replace("model.", "").replace("self_attn", "attention")), matrix)
    exact = "layers.1.attention.kv_a_layernorm.weight"
    assert torch.equal(again.get_parameter(exact), ours.get_parameter(exact))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": None}, "'kv_lora_rank' is null, a positive integer is needed"),
        ({"q_lora_rank": 0}, "'q_lora_rank' is 0, a positive integer is needed"),
        ({"qk_rope_head_dim": 15}, "'qk_rope_head_dim' is 15, an even number is needed"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 differs from num_attention_heads 4"),
        ({"moe_layer_freq": 2}, "'moe_layer_freq' is 2, 1 is needed"),
        ({"routed_scaling_factor": 1e30}, r"'routed_scaling_factor' is 1e\+30, a number from 0.001 to 1000 is needed"),
        ({"scoring_func": "softmax"}, "routing function 'softmax'"),
    ],
)
def test_configs_that_cannot_be_run_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spec_from_config(preset_config("tiny-mla-moe") | changes)


def test_a_missing_key_is_called_missing() -> None:
    config = preset_config("tiny-mla-moe")
    del config["kv_lora_rank"]
    with pytest.raises(UserError, match="'kv_lora_rank' is missing, a positive integer is needed"):
        spec_from_config(config)


def test_a_negative_number_of_further_layers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": -1}))
    with pytest.raises(UserError, match="'num_nextn_predict_layers' is -1"):
        prediction_layers(tmp_path)


def test_layer_kinds_that_do_not_fit_are_refused() -> None:
    config = preset_config("tiny-mla-moe") | {"architectures": ["Glm4MoeLiteForCausalLM"]}
    for kinds in (["dense"], ["dense", "sparse", "sparse", "linear"]):
        with pytest.raises(UserError, match="'dense' or 'sparse' for each of the 4 layers is needed"):
            spec_from_config(config | {"mlp_layer_types": kinds})


def test_a_share_of_rotated_values_that_latent_attention_has_not_is_refused() -> None:
    """transformers reads it for GLM-4.7-Flash, and not for DeepSeek-V3."""
    config = preset_config("tiny-mla-moe") | {"partial_rotary_factor": 0.5}
    with pytest.raises(UserError, match=r"partial_rotary_factor 0\.5 is not supported for glm4_moe_lite, only 1 is"):
        spec_from_config(config | {"architectures": ["Glm4MoeLiteForCausalLM"]})
    assert spec_from_config(config) == spec_from_config(preset_config("tiny-mla-moe"))


def test_sizes_that_a_gpu_cannot_run_are_refused_there() -> None:
    narrow = spec_from_config(preset_config("tiny-mla-moe") | {"qk_nope_head_dim": 32})
    policy = precision_policy(narrow, Fp8Config())
    with pytest.raises(UserError, match=r"qk_nope_head_dim 32, .* does not run on a GPU: the first must be a multiple"):
        LayerBuilder(narrow, policy, "train", torch.bfloat16, "cuda", "scaled_mm", None, ONE_WORKER, fp8_weights=True)
    for preset in ("tiny-mla-moe", "moonlight-16b-a3b"):
        assert spec_from_config(preset_config(preset)).refused_on_gpu() is None


@pytest.mark.parametrize("preset", ["moonlight-16b-a3b", "tiny-mla-moe"])
def test_a_presets_config_is_its_spec_again(preset: str) -> None:
    spec = spec_from_config(preset_config(preset))
    assert spec_from_config(hf_config(spec)) == spec
