"""Reads and writes linear attention in a config.json: which layers have it, and its sizes. No torch.

A layer of kind "linear_attention" has the gated delta rule, one of kind "full_attention" attention with a gate.
`layer_types` names the kind of each; without it every `full_attention_interval`-th layer has full attention.

Models of Qwen3.5 are published as a part of one that also reads images: their config.json has the model's as
`text_config`, and `text_of` returns it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octetrl.models.attention_config import FULL, without_repeats
from octetrl.models.blocks.gated_delta.layout import GatedDeltaLayout
from octetrl.models.family import FAMILIES, DeltaFiles, Family
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.delta_rule import DeltaShape
from octetrl.shapes.spec import MOST_HEADS, MOST_LAYERS, MOST_WIDTH, ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.json_file import JsonObject

LINEAR = "linear_attention"
TEXT = "text_config"
OUTER_ENDING = "ForConditionalGeneration"  # of the architecture that has the model as `text_config`
KEYS = {  # default of transformers, by key
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MOST_TAPS = 16


def outer_family(config: JsonObject) -> Family | None:
    """The family of the `text_config` of this config.json; None: it has no such one."""
    named = config.texts("architectures")
    for family in FAMILIES.values():
        files = family.delta
        if files is None or files.outer is None:
            continue
        if f"{files.class_name}{OUTER_ENDING}" in named or (not named and config.text("model_type") == files.outer):
            return family
    return None


def text_of(config: JsonObject, *, scalar: bool) -> JsonObject:
    """The content of `text_config`, with what only the config.json around it says. UserError: for a scalar head."""
    if scalar:
        raise UserError("a model that reads images too has no scalar head here; give a folder of its text model alone")
    text = dict(config.object(TEXT))
    for key in ("tie_word_embeddings", "quantization_config", "torch_dtype", "dtype"):
        if config.get(key) is not None:
            text[key] = config[key]
    return JsonObject(text, config.where)


def delta_layers(
    config: JsonObject, files: DeltaFiles, blocks: Sequence[LayerBlocks], num_layers: int
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
    linear = _layout(config, files)
    of_layers = [blocks[min(layer, len(blocks) - 1)] for layer in range(num_layers)]
    chosen = zip(of_layers, kinds, strict=True)
    return without_repeats([one._replace(attention=linear) if kind == LINEAR else one for one, kind in chosen])


def _layout(config: JsonObject, files: DeltaFiles) -> GatedDeltaLayout:
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
    return GatedDeltaLayout(DeltaShape(key_heads, value_heads, key_size, value_size, taps), files.grouped)


def delta_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of linear attention in the config.json of an export."""
    layers = [spec.blocks_of(layer).attention for layer in range(spec.num_layers)]
    kinds = [LINEAR if isinstance(one, GatedDeltaLayout) else FULL for one in layers]
    sizes = next((one.shape for one in layers if isinstance(one, GatedDeltaLayout)), KEYS.values())
    return {"layer_types": kinds, **dict(zip(KEYS, sizes, strict=True))}


def outer_config(config: JsonObject) -> str:
    """The config.json around a `text_config`, for `with_outer`."""
    return json.dumps(config.values_by_key, sort_keys=True)


def with_outer(text: Mapping[str, Any], outer: str) -> dict[str, Any]:
    """The config.json of an export: `text` in place of what it had."""
    content: dict[str, Any] = json.loads(outer)
    own = {key: value for key, value in text.items() if key != "architectures"}
    shared = {key: text[key] for key in ("tie_word_embeddings", "torch_dtype")}
    return {**content, **shared, TEXT: {**content.get(TEXT, {}), **own}}
