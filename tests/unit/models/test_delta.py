"""Models with linear attention: their config.json, what is refused, their memory, and the slots of their states."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octetrl.config.load import recipe_from_mapping
from octetrl.config.memory import STATES, estimate_memory, state_slots
from octetrl.config.rules_shape import spec_problems
from octetrl.engine.sequence_states import SequenceStates
from octetrl.fp8.policy import precision_policy
from octetrl.kernels.delta_rule.conv_heads import conv_heads_backward_reference
from octetrl.kernels.delta_rule.delta_rule_packed import delta_rule_packed_backward_reference
from octetrl.models.blocks.gated_attention.layout import GatedAttentionLayout
from octetrl.models.blocks.gated_delta.layout import CONV_ON_CPU, GatedDeltaLayout
from octetrl.models.decoder import Decoder
from octetrl.models.families import hf_config, spec_from_config
from octetrl.models.weight_files import pieces
from octetrl.shapes.delta_rule import DeltaShape
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from tests.unit.kernels.delta_cases import bounds_of, delta_inputs
from tests.unit.models.tiny_families import DELTA, SHAPE, made

TEXT = SHAPE | DELTA | {"model_type": "qwen3_5_text"}
OUTER = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "vision_config": {"depth": 2},
    "text_config": TEXT | {"tie_word_embeddings": False, "attn_output_gate": True},
}


def kinds(spec: ModelSpec) -> list[type]:
    return [type(spec.blocks_of(layer).attention) for layer in range(spec.num_layers)]


def test_the_published_mixture() -> None:
    spec = spec_from_config(preset_config("qwen3.5-35b-a3b"))
    assert kinds(spec) == ([GatedDeltaLayout] * 3 + [GatedAttentionLayout]) * 10
    assert spec.num_parameters == 34_660_610_688 and spec.rotary_size == 64
    state = DeltaShape(16, 32, 128, 128)
    assert spec.state_bytes(2) == 30 * state.slot_bytes(state.conv_rows(1)) and spec.fp8_k_is_safe


@pytest.mark.parametrize("content", [TEXT, OUTER, preset_config("tiny-delta")], ids=["text", "outer", "preset"])
def test_a_config_round_trips(content: dict[str, Any]) -> None:
    spec = spec_from_config(content)
    again = spec_from_config(json.loads(json.dumps(hf_config(spec))))
    assert again == spec and spec.offset_norms and spec.tied_embeddings == content.get("tie_word_embeddings", False)


def test_a_config_around_the_models_keeps_what_it_had() -> None:
    spec = spec_from_config(OUTER)
    written = hf_config(replace(spec, max_positions=64))
    assert written["architectures"] == OUTER["architectures"] and written["vision_config"] == {"depth": 2}
    assert written["text_config"]["attn_output_gate"] and written["text_config"]["max_position_embeddings"] == 64
    assert {piece.name.split(".layers.")[0] for piece in pieces(spec) if ".layers." in piece.name} == {
        "model.language_model"
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["linear_attention", "sliding_attention"]},
        {"layer_types": ["linear_attention"]},
        {"layer_types": ["linear_attention"] * 2},
        {"linear_num_value_heads": 3},
        {"linear_conv_kernel_dim": 1},
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        spec_from_config(TEXT | changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", [{}, None, TEXT | {"model_type": "qwen3"}])
def test_a_text_config_that_is_missing_or_of_another_family_is_named(text: dict[str, Any] | None) -> None:
    with pytest.raises(UserError, match="'text_config'"):
        spec_from_config(OUTER | {"text_config": text})


def test_a_gpu_runs_heads_of_the_published_size() -> None:
    assert spec_from_config(preset_config("qwen3.5-4b")).refused_on_gpu() is None
    assert "linear_key_head_dim" in str(spec_from_config(TEXT).refused_on_gpu())


def test_a_scalar_heads_config_is_that_of_the_text_model_alone() -> None:
    spec = spec_from_config(OUTER, scalar=True)
    written = hf_config(spec, scalar=True)
    assert written["model_type"] == "qwen3_5_text" and "text_config" not in written
    assert spec_from_config(written, scalar=True) == spec == spec_from_config(OUTER)
    around = OUTER | {"architectures": ["Qwen3_5ForSequenceClassification"]}
    assert spec_from_config(around, scalar=True) == spec
    with pytest.raises(UserError):
        spec_from_config(around)


def test_new_weights_are_those_of_the_layouts() -> None:
    model = made(spec_from_config(TEXT))
    values = {name: parameter for name, parameter in model.named_parameters() if parameter.dim() == 1}
    assert values["layers.0.attention.A_log"].dtype == values["layers.0.attention.dt_bias"].dtype == torch.float32
    assert (
        values["layers.0.attention_norm.weight"].eq(0).all() and values["layers.1.attention.q_norm.weight"].eq(0).all()
    )
    assert values["layers.0.attention.norm.weight"].eq(1).all() and values["layers.0.attention.dt_bias"].eq(1).all()


def fields_of(spec: ModelSpec, **sections: Any) -> list[tuple[str, ...]]:
    mapping = {"model": {"path": "m"}, "environment": {"dataset": "d"}, **sections}
    return [problem.fields for problem in spec_problems(recipe_from_mapping(mapping), spec)]


def test_settings_that_these_models_do_not_allow() -> None:
    spec = replace(spec_from_config(TEXT), max_positions=1 << 20)
    assert fields_of(spec) == []
    assert fields_of(spec, engine={"speculation": {"name": "ngram"}, "prefix_cache": "keep"}) == []
    outer = replace(spec_from_config(OUTER), max_positions=1 << 20)
    assert fields_of(outer, algorithm={"name": "ppo"}) == []
    mixture = spec_from_config(preset_config("qwen3.5-35b-a3b"))
    lora = {"path": "m", "lora": {"rank": 8, "experts": True}}
    assert fields_of(mixture, model=lora) == [("model.lora.experts",)]


@pytest.mark.parametrize(
    ("engine", "slots", "most_rows"),
    [
        ({}, 10, 1),
        ({"prefix_cache": "off"}, 8, 1),
        ({"state_snapshots": 7, "speculation": {"name": "ngram", "max_draft_tokens": 5}}, 15, 6),
    ],
)
def test_the_memory_estimate_has_the_slots(engine: dict[str, Any], slots: int, most_rows: int) -> None:
    spec, sections = spec_from_config(TEXT), {"model": {"path": "m"}, "environment": {"dataset": "d"}}
    recipe = recipe_from_mapping({**sections, "engine": {"max_batch": 6, **engine}})
    policy = precision_policy(spec, recipe.fp8)
    estimate = estimate_memory(recipe, spec, policy.precisions(), on_gpu=True, device_bytes=1 << 36)
    (part,) = (part for part in estimate.parts if part.name == STATES)
    model = Decoder(spec, policy, "rollout", device="meta")
    states = SequenceStates(model, state_slots(recipe.engine, 6), torch.device("meta"), recipe.engine.most_rows)
    assert state_slots(recipe.engine, 6) == slots and recipe.engine.most_rows == most_rows
    assert part.num_bytes == sum(kept.nbytes for one in states.layers.values() for kept in one)
    assert part.when == "generating"


class Allocated(TorchDispatchMode):
    """The most bytes that tensors made under it took at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.held = 0, 0, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for storage in (one.untyped_storage() for one in tree_leaves(made) if isinstance(one, torch.Tensor)):
            if storage._cdata not in self.held:
                self.held[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, storage._cdata)
        return made

    def _free(self, key: int) -> None:
        self.now -= self.held.pop(key)


def test_the_estimate_for_a_cpu_has_what_the_plain_backward_takes() -> None:
    shape, tokens = DeltaShape(2, 4, 64, 64), 512
    inputs = delta_inputs(tokens, shape, torch.bfloat16)
    with Allocated() as rule:
        delta_rule_packed_backward_reference(inputs[2], *inputs, bounds_of(tokens))
    assert 0.8 < rule.most / (4 * tokens * GatedDeltaLayout(shape)._rule_on_cpu()) < 1.02
    x, weight = torch.randn(tokens, shape.channels).bfloat16(), torch.randn(shape.channels, 4).bfloat16()
    with Allocated() as conv:
        conv_heads_backward_reference(*inputs[:3], x, weight, bounds_of(tokens), shape)
    assert 0.8 < conv.most / (4 * tokens * CONV_ON_CPU * shape.channels) < 1.02
