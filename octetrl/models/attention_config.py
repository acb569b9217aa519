"""Reads and writes attention in a config.json: latent attention (MLA), and the sliding windows of layers. No torch.

A window of w keys means that the token at position p reads the keys p - w + 1 to p. A window that is not shorter than
the longest context changes nothing and is left out. `Family.windows` says which layers have one: all, or those that
`layer_types` names, or without it the layers from `max_window_layers` on, or every second one.

Of latent attention's queries, a head has `qk_nope_head_dim` values without RoPE and `qk_rope_head_dim` with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.family import Family
from octetrl.shapes.blocks import BlockLayout, LayerBlocks
from octetrl.shapes.spec import MOST_HEADS, MOST_TOKENS, MOST_WIDTH, ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.json_file import JsonObject

FULL, SLIDING = "full_attention", "sliding_attention"


def latent_layout(config: JsonObject, default_query_latent: int) -> LatentAttentionLayout:
    """UserError: sizes that are missing or do not fit. default_query_latent: `q_lora_rank` if it is missing."""
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent, nope, rope, value = (config.integer(key, most=MOST_WIDTH) for key in sizes)
    heads = config.integer("num_attention_heads", most=MOST_HEADS)
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
        query_latent = config.integer("q_lora_rank", default_query_latent, most=MOST_WIDTH)
    return LatentAttentionLayout(
        latent_size=latent,
        query_latent_size=query_latent,
        nope_size=nope,
        rope_size=rope,
        value_size=value,
        interleaved=config.flag("rope_interleave", True),
    )


def latent_fields(attention: BlockLayout) -> dict[str, Any]:
    """Latent attention's fields in the config.json of an export; none for other attention."""
    if not isinstance(attention, LatentAttentionLayout):
        return {}
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


def windows(config: JsonObject, family: Family, num_layers: int, max_positions: int) -> list[int | None]:
    """The window of each layer, None for full attention. UserError: kinds of layers that this family doesn't have."""
    kinds = config.texts("layer_types")
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise UserError(
            f"layer_types has '{unknown[0]}', only '{FULL}' and '{SLIDING}' are supported; use another model"
        )
    if kinds and len(kinds) != num_layers:
        raise UserError(f"layer_types has {len(kinds)} entries for {num_layers} layers; correct the config")
    window = _window(config, family)
    if SLIDING in kinds and window is None:
        raise UserError(
            f"layer_types has '{SLIDING}', but this {family.name} has no sliding_window in use; correct the config"
        )
    window = None if window is None or window >= max_positions else window
    by_layer = family.windows is not None and family.windows.by_layer
    if FULL in kinds and window is not None and not by_layer:
        raise UserError(
            f"layer_types with '{FULL}' beside sliding_window {window} is not supported for {family.name}; use another"
            " model"
        )
    if family.windows is None or not by_layer:
        return [window] * num_layers
    if family.windows.full_layers is None:
        kinds = kinds or [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
        return [window if kind == SLIDING else None for kind in kinds]
    first = config.integer("max_window_layers", family.windows.full_layers, most=MOST_WIDTH, least=0)
    kinds = kinds or [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return [window if kind == SLIDING else None for kind in kinds]


def _window(config: JsonObject, family: Family) -> int | None:
    """The window of the layers that have one, None if no layer has."""
    having = family.windows
    if having is None:
        if config.flag("use_sliding_window"):
            raise UserError(f"use_sliding_window true is not supported for {family.name}; use a model without it")
        return None
    if not config.flag("use_sliding_window", not having.needs_switch):
        return None
    if "sliding_window" not in config:
        return having.default
    return None if config["sliding_window"] is None else config.integer("sliding_window", most=MOST_TOKENS)


def with_windows(
    blocks: tuple[LayerBlocks, ...], of_layers: Sequence[int | None], num_layers: int
) -> tuple[LayerBlocks, ...]:
    """`ModelSpec.blocks` with the windows of all layers."""
    if not any(of_layers):
        return blocks
    layers = []
    for layer in range(num_layers):
        block = blocks[min(layer, len(blocks) - 1)]
        assert isinstance(block.attention, AttentionLayout), "only attention over keys has windows"
        layers.append(block._replace(attention=replace(block.attention, window=of_layers[layer])))
    return without_repeats(layers)


def without_repeats(layers: Sequence[LayerBlocks]) -> tuple[LayerBlocks, ...]:
    """`ModelSpec.blocks`, whose last entry is that of all further layers."""
    last = len(layers)
    while last > 1 and layers[last - 1] == layers[last - 2]:
        last -= 1
    return tuple(layers[:last])


def window_fields(spec: ModelSpec, family: Family) -> dict[str, Any]:
    """The windows' fields in the config.json of an export."""
    of_layers = [getattr(spec.blocks_of(layer).attention, "window", None) for layer in range(spec.num_layers)]
    window = next((each for each in of_layers if each is not None), None)
    having = family.windows
    kinds = [FULL if each is None else SLIDING for each in of_layers]
    if having is not None and having.full_layers is None and not having.needs_switch:
        return {"sliding_window": window} | ({"layer_types": kinds} if having.alternate else {})
    if having is None or window is None:
        return {}
    fields: dict[str, Any] = {"sliding_window": window}
    if having.needs_switch:
        fields["use_sliding_window"] = True
    if having.full_layers is not None:
        fields["max_window_layers"] = next(layer for layer, each in enumerate(of_layers) if each is not None)
        fields["layer_types"] = kinds
    return fields
