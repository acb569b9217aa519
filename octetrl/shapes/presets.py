"""Known model shapes, as the content of their Hugging Face `config.json`.

`tiny` is for the demo and the tests: a Qwen3 with about a million parameters, small enough to train on a laptop.
`tiny-moe` is the same with eight experts per layer, two of which each token uses. `tiny-mla-moe` has DeepSeek-V3's
latent attention, routing and shared expert, `tiny-delta` Qwen3.5's linear attention in every second layer. The others
are the published shapes of Qwen/Qwen3-0.6B, -1.7B, -8B, -14B, -32B and -30B-A3B, of the decoders of Qwen/Qwen3.5-4B and
-35B-A3B, of meta-llama/Llama-3.1-8B and -70B, of moonshotai/Moonlight-16B-A3B and of openai/gpt-oss-20b, for runs with
random weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octetrl.system.errors import UserError, nearest

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
_QWEN3_PUBLISHED: dict[str, Any] = _QWEN3 | {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
_TINY: dict[str, Any] = _QWEN3 | {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 384,
    "max_position_embeddings": 1024,
    "rope_theta": 10_000,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "torch_dtype": "bfloat16",
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4_096,
    },
    "pad_token_id": 199_999,
    "eos_token_id": 200_002,
    "torch_dtype": "bfloat16",
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "torch_dtype": "bfloat16",
}


_QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
_QWEN3_5_PUBLISHED: dict[str, Any] = (
    _QWEN3
    | _QWEN3_5
    | {
        "head_dim": 256,
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
        "rope_theta": 10_000_000,
        "eos_token_id": None,
    }
)


def _sizes(family: dict[str, Any], layers: int, hidden: int, inner: int, heads: int, **others: Any) -> dict[str, Any]:
    return family | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "tiny-moe": _TINY | _QWEN3_MOE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "qwen3-0.6b": _sizes(_QWEN3_PUBLISHED, 28, 1024, 3072, 16, **_TIED),
    "qwen3-1.7b": _sizes(_QWEN3_PUBLISHED, 28, 2048, 6144, 16, **_TIED),
    "qwen3-8b": _sizes(_QWEN3_PUBLISHED, 36, 4096, 12_288, 32, **_UNTIED),
    "qwen3-14b": _sizes(_QWEN3_PUBLISHED, 40, 5120, 17_408, 40, **_UNTIED),
    "qwen3-32b": _sizes(_QWEN3_PUBLISHED, 64, 5120, 25_600, 64, **_UNTIED),
    "qwen3-30b-a3b": _sizes(_QWEN3_PUBLISHED | _QWEN3_MOE, 48, 2048, 6144, 32, **_UNTIED)
    | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "gpt-oss-20b": _sizes(_GPT_OSS, 24, 2880, 2880, 64, **_UNTIED) | {"num_local_experts": 32},
    "tiny-mla-moe": _TINY
    | _DEEPSEEK
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "routed_scaling_factor": 2.5,
    },
    "tiny-delta": _TINY
    | _QWEN3_5
    | {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "partial_rotary_factor": 0.5,
    },
    "qwen3.5-4b": _sizes(_QWEN3_5_PUBLISHED, 32, 2560, 9216, 16, **_TIED) | {"num_key_value_heads": 4},
    "qwen3.5-35b-a3b": _sizes(_QWEN3_5_PUBLISHED, 40, 2048, 512, 16, **_UNTIED)
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "moonlight-16b-a3b": _sizes(_DEEPSEEK, 27, 2048, 11_264, 16, **_UNTIED)
    | {
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 2.446,
        "vocab_size": 163_840,
        "max_position_embeddings": 8192,
        "rope_theta": 50_000,
        "bos_token_id": 163_584,
        "eos_token_id": 163_585,
    },
    "llama-3.1-8b": _sizes(_LLAMA, 32, 4096, 14_336, 32),
    "llama-3.1-70b": _sizes(_LLAMA, 80, 8192, 28_672, 64),
}
PRESETS = tuple(_PRESETS)


def preset_config(name: str) -> dict[str, Any]:
    """Return a copy of a preset's `config.json` content. Raises UserError for an unknown name."""
    if name not in _PRESETS:
        raise UserError(f"model.preset: '{name}' is not one of {', '.join(_PRESETS)}{nearest(name, _PRESETS)}")
    return dict(_PRESETS[name])


def refuse_unknown_model(model: str) -> None:
    """Raise UserError if `--model` of a bench is neither a preset nor a folder."""
    if not model:  # which a path would take for the folder we are in
        raise UserError(f"--model: '' names nothing; give one of {', '.join(PRESETS)}, or a folder with a config.json")
    if model not in PRESETS and not Path(model).is_dir():
        raise UserError(
            f"--model: '{model}' is neither a folder nor one of the presets {', '.join(PRESETS)}"
            f"{nearest(model, PRESETS)}"
        )
