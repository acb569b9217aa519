"""Reads and writes linear attention in a config.json: which layers have it, and its sizes. No torch.

A layer of kind "linear_attention" has the gated delta rule, one of kind "full_attention" attention with a gate.
`layer_types` names the kind of each; without it every `full_attention_interval`-th layer has full attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octetrl.models.attention_config import FULL, without_repeats
from octetrl.models.blocks.gated_delta.layout import GatedDeltaLayout
from octetrl.models.family import Delta
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.delta_rule import DeltaShape
from octetrl.shapes.spec import MOST_HEADS, MOST_LAYERS, MOST_WIDTH, ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.json_file import JsonObject

LINEAR = "linear_attention"
KEYS = {  # default of transformers, by key
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MOST_TAPS = 16


def delta_layers(
    config: JsonObject, delta: Delta, blocks: Sequence[LayerBlocks], num_layers: int
) -> tuple[LayerBlocks, ...]:
    """`ModelSpec.blocks`, from that of a model with full attention in every layer. UserError: other kinds of layers, or
    sizes that do not fit."""
    kinds = config.texts("layer_types")
    unknown = [kind for kind in kinds if kind not in (FULL, LINEAR)]
    if unknown:
        raise UserError(
            f"layer_types has '{unknown[0]}', only '{FULL}' and '{LINEAR}' are supported; use another model"
        )
    if kinds and len(kinds) != num_layers:
        raise UserError(f"layer_types has {len(kinds)} entries for {num_layers} layers; correct the config")
    if not kinds:
        interval = config.integer("full_attention_interval", 4, most=MOST_LAYERS)
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    if FULL not in kinds:
        raise UserError(f"none of the {num_layers} layers has '{FULL}'; use another model")
    linear = _layout(config, delta)
    of_layers = [blocks[min(layer, len(blocks) - 1)] for layer in range(num_layers)]
    chosen = zip(of_layers, kinds, strict=True)
    return without_repeats([one._replace(attention=linear) if kind == LINEAR else one for one, kind in chosen])


def _layout(config: JsonObject, delta: Delta) -> GatedDeltaLayout:
    key_heads, value_heads, key_size, value_size, taps = (
        config.integer(key, default, most=MOST_HEADS if "heads" in key else MOST_WIDTH) for key, default in KEYS.items()
    )
    if value_heads % key_heads:
        raise UserError(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}; correct the"
            " config"
        )
    if not 2 <= taps <= MOST_TAPS:
        raise config.wrong("linear_conv_kernel_dim", f"2 to {MOST_TAPS} is needed")
    return GatedDeltaLayout(DeltaShape(key_heads, value_heads, key_size, value_size, taps), delta.grouped)


def delta_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of linear attention in the config.json of an export."""
    layers = [spec.blocks_of(layer).attention for layer in range(spec.num_layers)]
    kinds = [LINEAR if isinstance(one, GatedDeltaLayout) else FULL for one in layers]
    sizes = next((one.shape for one in layers if isinstance(one, GatedDeltaLayout)), KEYS.values())
    return {"layer_types": kinds, **dict(zip(KEYS, sizes, strict=True))}
