"""Unusual shapes against transformers: widths, head sizes, biases, RoPE scaling, windows, names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from octetrl.config.load import recipe_from_mapping
from octetrl.config.lora import projections
from octetrl.config.rules_shape import spec_problems
from octetrl.models.families import load_spec, spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.system.errors import UserError
from tests.unit.models.tiny_families import ROPE, SHAPE, decoder_of, hf_logits, packed

LENGTHS = [12, 1, 40]
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
Variant = tuple[type[Any], type[PreTrainedModel], dict[str, Any]]
VARIANTS: dict[str, Variant] = {
    "llama, biases, YaRN, heads of 80": (
        LlamaConfig,
        LlamaForCausalLM,
        {"hidden_size": 144, "head_dim": 80, "attention_bias": True, "rope_parameters": YARN},
    ),
    "mistral, a window, linear RoPE": (
        MistralConfig,
        MistralForCausalLM,
        {"hidden_size": 80, "head_dim": 16, "sliding_window": 9, "rope_parameters": LINEAR},
    ),
    "mistral without a window": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "phi3, a window, heads of 96": (
        Phi3Config,
        Phi3ForCausalLM,
        {"hidden_size": 384, "head_dim": None, "sliding_window": 11, "pad_token_id": None},
    ),
    "qwen2, windows from a layer on": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3, windows by layer, biases, heads of 192": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "head_dim": 192,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral, a window": (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "intermediate_size": 48},
    ),
    "qwen3_moe, a window": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        MOE | {"use_sliding_window": True, "sliding_window": 6, "attention_bias": True},
    ),
}


def theirs(name: str) -> PreTrainedModel:
    """A float32 model of transformers; its biases and norms are random too."""
    torch.manual_seed(0)
    config, model_class, changes = VARIANTS[name]
    settings = {**SHAPE, "rope_parameters": ROPE, "attn_implementation": "eager", "tie_word_embeddings": False}
    settings = {key: value for key, value in {**settings, **changes}.items() if value is not None or key != "head_dim"}
    model: PreTrainedModel = model_class(config(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers_and_exports_load_there(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    ours = decoder_of(tmp_path / "theirs")
    token_ids_T, positions_T, context = packed(LENGTHS)
    their_logits_TV = hf_logits(model, token_ids_T, LENGTHS)
    hidden_TE = ours(token_ids_T, positions_T, context)
    our_logits_TV = ours.logits(hidden_TE)
    assert ((our_logits_TV - their_logits_TV).norm() / their_logits_TV.norm()).item() < 1e-5
    targets_T = token_ids_T.roll(-1)
    ours.logprobs(hidden_TE, targets_T, chunk=50)[0].mean().backward()
    torch.log_softmax(their_logits_TV, -1).gather(1, targets_T[:, None]).mean().backward()
    o_proj = model.model.layers[1].self_attn.o_proj
    for mine, other in (("weight", o_proj.weight), ("bias", o_proj.bias)):
        if other is not None:
            gradient = ours.get_parameter(f"layers.1.attention.o_proj.{mine}").grad
            assert gradient is not None and (gradient - other.grad).norm() < 1e-4 * other.grad.norm()
    save_weights(ours, tmp_path / "export", max_shard_bytes=100_000)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32, attn_implementation="eager")
    held = again.state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(hf_logits(again, token_ids_T, LENGTHS), their_logits_TV, rtol=1e-4, atol=5e-5)
    assert load_spec(tmp_path / "export") == ours.spec


def test_mixtrals_files_have_its_names(tmp_path: Path) -> None:
    theirs("mixtral, a window").save_pretrained(tmp_path / "theirs")
    save_weights(decoder_of(tmp_path / "theirs"), tmp_path / "export")
    ours, published = (load_file(tmp_path / folder / "model.safetensors") for folder in ("export", "theirs"))
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in ours and set(ours) == set(published)
    assert all(torch.equal(ours[name], tensor) for name, tensor in published.items())


def test_phi3s_files_have_fused_projections(tmp_path: Path) -> None:
    theirs("phi3, a window, heads of 96").save_pretrained(tmp_path / "theirs")
    save_weights(decoder_of(tmp_path / "theirs"), tmp_path / "export")
    stored = load_file(tmp_path / "export/model.safetensors")
    assert stored["model.layers.0.self_attn.qkv_proj.weight"].shape == (384 + 2 * 192, 384)
    assert stored["model.layers.1.mlp.gate_up_proj.weight"].shape == (320, 384)
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["sliding_window"] == 11
    assert projections(load_spec(tmp_path / "export")) == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


MISTRAL: dict[str, Any] = {**SHAPE, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}
MIXTRAL: dict[str, Any] = {
    **SHAPE,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3: dict[str, Any] = {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "sliding_window": 8}


def windows_of(config: dict[str, Any]) -> list[int | None]:
    spec = spec_from_config(config)
    return [spec.blocks_of(layer).attention.window for layer in range(spec.num_layers)]  # type: ignore[attr-defined]


def test_what_a_config_leaves_out_is_transformers_default() -> None:
    assert windows_of(MISTRAL) == [4096, 4096] and spec_from_config(MISTRAL).num_kv_heads == 2
    assert windows_of(MISTRAL | {"sliding_window": None}) == [None, None]
    assert windows_of(MISTRAL | {"sliding_window": 8192}) == [None, None], "as long as the context"
    assert windows_of(QWEN3) == [None, None]
    assert windows_of(QWEN3 | {"use_sliding_window": True}) == [None, None], "max_window_layers is 28"
    assert windows_of(QWEN3 | {"use_sliding_window": True, "max_window_layers": 0}) == [8, 8]
    mistral = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    assert spec_from_config(mistral | {"num_attention_heads": 16, "head_dim": 16}).num_kv_heads == 8


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (QWEN3 | {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention', only"),
        (QWEN3 | {"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window in use"),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 0}, "'sliding_window' is 0"),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, "not supported for mistral"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds the 4 experts"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "'router_jitter_noise' is 0.1, 0 is needed"),
        (MIXTRAL | {"scoring_func": "sigmoid"}, "routing function 'sigmoid'"),
        (MISTRAL | {"attention_bias": True}, "attention_bias true is not supported for mistral"),
        (MISTRAL | {"architectures": ["LlamaForCausalLM"], "use_sliding_window": True}, "not supported for llama"),
        (MISTRAL | {"architectures": ["Phi3ForCausalLM"], "rope_scaling": YARN}, "RoPE scaling .* for phi3"),
        (MISTRAL | {"architectures": ["OlmoeForCausalLM"]}, "unsupported architecture Olmoe"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(config: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        spec_from_config(config)
    assert "\n" not in str(caught.value)


def test_fp8_takes_any_width_of_sixteens_and_refuses_others_in_one_line() -> None:
    given = {"model": {"path": "m"}, "environment": {"dataset": "d"}, "precision": "fp8_full"}
    recipe = recipe_from_mapping(given)
    for hidden, inner in ((576, 1536), (2880, 4000), (4000, 2880)):
        spec = spec_from_config(MISTRAL | {"hidden_size": hidden, "intermediate_size": inner})
        assert not [problem for problem in spec_problems(recipe, spec) if "fp8" in problem.text]
    spec = spec_from_config(MISTRAL | {"hidden_size": 72, "intermediate_size": 100})
    problems = [problem.text for problem in spec_problems(recipe, spec) if "fp8" in problem.text]
    assert len(problems) == 2 and "hidden size is 72; use precision: bf16" in problems[0]
    assert "intermediate size is 100" in problems[1] and not any("\n" in problem for problem in problems)
