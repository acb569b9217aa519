"""The text's part of models that also read images, as transformers builds and saves them whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from octetrl.models.families import hf_config, load_spec, spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.models.other_parts import copy_other_parts
from tests.unit.models.test_against_transformers import relative_error
from tests.unit.models.tiny_families import DELTA, SHAPE, decoder_of, packed

LENGTHS = [12, 1, 150]
SECTIONS = {"mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_type": "default", "rope_theta": 10_000.0}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the text's settings, those of the part for images
    "qwen3_vl": ({"rope_parameters": SECTIONS}, VISION | {"deepstack_visual_indexes": [0]}),
    "qwen3_5": (DELTA | {"rope_parameters": SECTIONS | {"partial_rotary_factor": 0.25}}, VISION),
}


def whole_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    text, vision = MODELS[name]
    kept = {key: value for key, value in (SHAPE | text).items() if value is not None and key != "model_type"}
    config = CONFIG_MAPPING[name](text_config=kept, vision_config=vision, tie_word_embeddings=False)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_the_whole_model_does_of_a_text_and_returns_into_it(name: str, tmp_path: Path) -> None:
    theirs = whole_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = decoder_of(tmp_path / "theirs")
    token_ids_T, positions_T, context = packed(LENGTHS)
    with torch.no_grad():
        want = [theirs(input_ids=one[None]).logits[0] for one in token_ids_T.split(LENGTHS)]
        assert relative_error(ours.logits(ours(token_ids_T, positions_T, context)), torch.cat(want)) < 1e-5
        ours.layers[0].mlp.down_proj.weight.mul_(2)
    save_weights(ours, tmp_path / "export")
    copy_other_parts(tmp_path / "theirs", tmp_path / "export")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype=torch.float32)
    before, after = theirs.state_dict(), again.state_dict()
    changed = [key for key, tensor in before.items() if not torch.equal(tensor, after[key])]
    assert [key.rpartition("layers.0.")[2] for key in changed] == ["mlp.down_proj.weight"]
    rope = again.config.text_config.rope_parameters
    assert {key: rope[key] for key in SECTIONS} == SECTIONS
    assert load_spec(tmp_path / "export") == ours.spec


def test_sections_of_rope_are_kept_in_either_spelling() -> None:
    text = SHAPE | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
    text = {key: value for key, value in text.items() if key != "rope_parameters" and value is not None}
    text["model_type"] = "qwen3_vl_text"
    outer = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    spec = spec_from_config(outer)
    assert spec.rope_theta == 5e5 and spec.rope_scaling is None and spec.qk_norm
    written = json.loads(json.dumps(hf_config(spec)))["text_config"]
    assert written["rope_scaling"] == text["rope_scaling"] and written["rope_theta"] == 5e5
    assert spec_from_config(outer, scalar=True).rope_theta == 5e5
