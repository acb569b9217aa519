"""Reads and writes the sliding windows of attention in a config.json. No torch.

    mistral, mixtral     every layer has `sliding_window`; 4,096 if a Mistral has no such key, null means none
    phi3                 the same
    qwen3_moe            the same, if `use_sliding_window`
    qwen2, qwen3         `layer_types`, or the layers from `max_window_layers` on; if `use_sliding_window`
    dots1                `layer_types`, or the layers from `max_window_layers` on
    all others           none

A window of w keys means that the token at position p reads the keys p - w + 1 to p. A window that is not shorter than
the longest context changes nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.spec import MOST_TOKENS, MOST_WIDTH, ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.json_file import JsonObject

IN_EVERY_LAYER = ("mistral", "mixtral", "phi3", "qwen3_moe")
BY_LAYER = {"qwen2": 28, "qwen3": 28, "dots1": 62}  # with the default of `max_window_layers`
NEEDS_SWITCH = ("qwen2", "qwen3", "qwen3_moe")
DEFAULT_WINDOW = 4_096  # if the key is missing; null means none
FULL, SLIDING = "full_attention", "sliding_attention"


def windows(config: JsonObject, family: str, num_layers: int, max_positions: int) -> list[int | None]:
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
    if window is not None and window >= max_positions:
        window = None if SLIDING not in kinds else max_positions
    if SLIDING in kinds and (window is None):
        raise UserError(
            f"layer_types has '{SLIDING}', but this {family} has no sliding_window in use; correct the config"
        )
    if family in IN_EVERY_LAYER and window is not None and FULL in kinds:
        raise UserError(
            f"layer_types with '{FULL}' beside sliding_window {window} is not supported for {family}; use another model"
        )
    if family not in BY_LAYER:
        return [window] * num_layers
    first = config.integer("max_window_layers", BY_LAYER[family], most=MOST_WIDTH, least=0)
    kinds = kinds or [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    of_layers = [window if kind == SLIDING else None for kind in kinds]
    return [None if each is not None and each >= max_positions else each for each in of_layers]


def _window(config: JsonObject, family: str) -> int | None:
    """The window of the layers that have one, None if no layer has."""
    if family not in (*IN_EVERY_LAYER, *BY_LAYER):
        if config.flag("use_sliding_window"):
            raise UserError(f"use_sliding_window true is not supported for {family}; use a model without it")
        return None
    if not config.flag("use_sliding_window", family not in NEEDS_SWITCH):
        return None
    if "sliding_window" not in config:
        return None if family in ("phi3", "mixtral") else DEFAULT_WINDOW
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
    while len(layers) > 1 and layers[-1] == layers[-2]:
        layers.pop()
    return tuple(layers)


def window_fields(spec: ModelSpec) -> dict[str, Any]:
    """The windows' fields in the config.json of an export."""
    of_layers = [
        layout.window if isinstance(layout := spec.blocks_of(layer).attention, AttentionLayout) else None
        for layer in range(spec.num_layers)
    ]
    window = next((each for each in of_layers if each is not None), None)
    if spec.family in ("mistral", "mixtral", "phi3"):
        return {"sliding_window": window}
    if window is None:
        return {}
    fields: dict[str, Any] = {"sliding_window": window}
    if spec.family in NEEDS_SWITCH:
        fields["use_sliding_window"] = True
    if spec.family in BY_LAYER:
        fields["max_window_layers"] = next(layer for layer, each in enumerate(of_layers) if each is not None)
        fields["layer_types"] = [FULL if each is None else SLIDING for each in of_layers]
    return fields
