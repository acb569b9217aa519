"""Tiny configs of dense families that have no blocks here, as `transformers` has them: the ones whose parity on a CPU
docs/models.md promises. A family's own settings are away from what would switch them off."""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.2}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": {"model_type": "arcee"},
    "cohere": {"model_type": "cohere", "use_qk_norm": False, "logit_scale": 0.0625, "tie_word_embeddings": True},
    "cohere2": {"model_type": "cohere2", "logit_scale": 0.25, **ALTERNATING},
    "ernie4_5": {"model_type": "ernie4_5"},
    "exaone4": {"model_type": "exaone4", **ALTERNATING},
    "gemma": {"model_type": "gemma", "tie_word_embeddings": True},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": LINEAR},
        **ALTERNATING,
    },
    "glm4": {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": YARN},
        **ALTERNATING,
    },
    "seed_oss": {"model_type": "seed_oss", "attention_bias": True},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "use_sliding_window": False},
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """The content of a config.json."""
    return SHAPE | FAMILIES[family] | changes
