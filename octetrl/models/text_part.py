"""Reads and writes a config.json whose model is the text's part of one that also reads images. No torch.

Models of Qwen3-VL and Qwen3.5 are published so: their config.json has the decoder's as `text_config`, and `text_of`
returns it. Images are not read here. Text has one position a token, for which RoPE by sections is RoPE. A critic or a
reward model may begin with such a folder; it is written as the text's model alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octetrl.models.family import FAMILIES, SCALAR, Family
from octetrl.system.json_file import JsonObject

TEXT = "text_config"
OUTER_ENDING = "ForConditionalGeneration"  # of the architecture that has the model as `text_config`


def outer_family(config: JsonObject, *, scalar: bool) -> Family | None:
    """The family of the `text_config` of this config.json; None: it has no such one. `scalar`: its architecture may
    have a scalar head."""
    named, has_text = config.texts("architectures"), TEXT in config
    endings = (OUTER_ENDING, SCALAR) if scalar and has_text else (OUTER_ENDING,)
    for family in FAMILIES.values():
        if family.outer is None:
            continue
        is_named = any(f"{family.class_name}{ending}" in named for ending in endings)
        if is_named or (not named and config.text("model_type") == family.outer):
            return family
    return None


def text_of(config: JsonObject, family: Family) -> JsonObject:
    """The content of `text_config`, with what only the config.json around it says. UserError: a text of another
    family."""
    text = dict(config.object(TEXT))
    if not text:
        raise config.wrong(TEXT, "the settings of the model that reads text are needed")
    if text.get("model_type", family.name) != family.name:
        raise config.wrong(TEXT, f"the 'model_type' of its text is {family.name}, and not {text['model_type']!r}")
    for key in ("tie_word_embeddings", "quantization_config", "torch_dtype", "dtype"):
        if config.get(key) is not None:
            text[key] = config[key]
    return JsonObject(text, config.where)


def outer_config(config: JsonObject) -> str:
    """The config.json around a `text_config`, for `with_outer`."""
    return json.dumps(config.values_by_key, sort_keys=True)


def with_outer(text: Mapping[str, Any], outer: str) -> dict[str, Any]:
    """The config.json of an export: `text` in place of what it had."""
    content: dict[str, Any] = json.loads(outer)
    before: dict[str, Any] = content.get(TEXT, {})
    has_rope = "rope_parameters" in before or "rope_scaling" in before  # with what images need of it
    kept = {"architectures", *(("rope_theta", "rope_scaling") if has_rope else ())}
    own = {key: value for key, value in text.items() if key not in kept}
    shared = {key: text[key] for key in ("tie_word_embeddings", "torch_dtype")}
    return {**content, **shared, TEXT: {**before, **own}}
