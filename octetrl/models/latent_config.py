"""Reads and writes multi-head latent attention (MLA) in a config.json. No torch.

    deepseek_v3      DeepSeek-V3, Moonlight (without `q_lora_rank`)
    glm4_moe_lite    GLM-4.7-Flash: the same block and routing, other names for its dense layers

A head's queries have `qk_nope_head_dim` values without RoPE and `qk_rope_head_dim` with it.
"""

from __future__ import annotations

from typing import Any

from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.shapes.blocks import BlockLayout
from octetrl.shapes.spec import MOST_HEADS, MOST_WIDTH, ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.json_file import JsonObject

LATENT_FAMILIES = ("deepseek_v3", "glm4_moe_lite")
DEFAULT_QUERY_LATENT = {"deepseek_v3": 1536, "glm4_moe_lite": 768}  # of a config without the key; null: none


def latent_layout(config: JsonObject, family: str) -> LatentAttentionLayout:
    """UserError: sizes that are missing or do not fit."""

    def size(key: str) -> int:
        return config.integer(key, most=MOST_WIDTH)

    heads, rope = config.integer("num_attention_heads", most=MOST_HEADS), size("qk_rope_head_dim")
    kv_heads = config.integer("num_key_value_heads", heads, most=MOST_HEADS)
    if kv_heads != heads:
        raise UserError(
            f"num_key_value_heads {kv_heads} differs from num_attention_heads {heads}, but in latent attention every"
            f" head has keys of its own; correct the config"
        )
    if rope % 2:
        raise config.wrong("qk_rope_head_dim", "an even number is needed")
    query_latent = 0
    if "q_lora_rank" not in config or config["q_lora_rank"] is not None:
        query_latent = config.integer("q_lora_rank", DEFAULT_QUERY_LATENT[family], most=MOST_WIDTH)
    return LatentAttentionLayout(
        latent_size=size("kv_lora_rank"),
        query_latent_size=query_latent,
        nope_size=size("qk_nope_head_dim"),
        rope_size=rope,
        value_size=size("v_head_dim"),
        interleaved=config.flag("rope_interleave", True),
    )


def latent_fields(spec: ModelSpec, attention: BlockLayout) -> dict[str, Any]:
    """Latent attention's fields in the config.json of an export."""
    assert isinstance(attention, LatentAttentionLayout), f"a model of {spec.family} has latent attention"
    return {
        "q_lora_rank": attention.query_latent_size or None,
        "kv_lora_rank": attention.latent_size,
        "qk_nope_head_dim": attention.nope_size,
        "qk_rope_head_dim": attention.rope_size,
        "v_head_dim": attention.value_size,
        "head_dim": attention.rope_size,  # as transformers 5 reads it
        "rope_interleave": attention.interleaved,
        "num_nextn_predict_layers": 0,
    }
