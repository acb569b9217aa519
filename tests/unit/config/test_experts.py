"""What a GPU's kernels ask of experts is said in one line, before a model is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octetrl.config.load import recipe_from_mapping
from octetrl.config.rules_shape import experts_refused_on_gpu
from octetrl.config.schema import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.layers.tensor_group import ONE_WORKER
from octetrl.models.build_blocks import LayerBuilder
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError


def refusal(sizes: dict[str, int], preset: str = "tiny-moe", **sections: Any) -> str | None:
    model = sections.pop("model", {})
    mapping = {"model": {"path": "m", **model}, "environment": {"dataset": "d"}, **sections}
    recipe, spec = recipe_from_mapping(mapping), spec_from_config(preset_config(preset) | sizes)
    policy = precision_policy(spec, recipe.fp8)
    found = experts_refused_on_gpu(recipe, spec, policy.precisions())
    assert found is None or "\n" not in found
    return found


FP8 = {"fp8": {"rollout": True, "train": True}}
UNLIKE = {"fp8": {"rollout": True, "train": True, "ignore": ["*.experts.*"]}}  # experts alone are in BF16


@pytest.mark.parametrize(
    ("sizes", "sections", "words"),
    [
        ({"moe_intermediate_size": 1440}, {"fp8": {"rollout": True}}, "128; set fp8.ignore=['*.experts.*'],"),
        ({"moe_intermediate_size": 64}, FP8, "a width of 64 (layers.0.mlp.experts.down_proj)"),
        ({"hidden_size": 144, "moe_intermediate_size": 272}, FP8, "a width of 144 and 272 (layers.0.mlp."),
        ({"moe_intermediate_size": 1444}, FP8, "multiples of 128; set cluster.device=cpu"),
        ({"moe_intermediate_size": 1444}, {}, "must be multiples of 8; set cluster.device=cpu"),
        ({"hidden_size": 100, "moe_intermediate_size": 40}, {}, "a width of 100 (layers.0.mlp.experts.gate_up_proj)"),
        ({"moe_intermediate_size": 1444}, UNLIKE, "a width of 1,444 (layers.0.mlp.experts.gate_up_proj) do not run on"),
        ({}, {"model": {"dtype": "float32"}}, "a mixture of experts runs on a GPU in bfloat16"),
        ({}, {"fp8": {"train": True, "emulate": True}}, "its FP8 is not emulated there"),
    ],
)
def test_what_does_not_run_is_refused(sizes: dict[str, int], sections: dict[str, Any], words: str) -> None:
    assert words in (refusal(sizes, **sections) or "")


@pytest.mark.parametrize(
    ("sizes", "sections"),
    [
        ({}, FP8),
        ({"moe_intermediate_size": 1440}, {}),
        ({"moe_intermediate_size": 1440}, UNLIKE),
        ({"hidden_size": 104, "moe_intermediate_size": 40}, {}),
    ],
)
def test_what_runs_is_not(sizes: dict[str, int], sections: dict[str, Any]) -> None:
    assert refusal(sizes, **sections) is None


def test_a_model_that_is_built_is_refused_in_the_words_of_the_check() -> None:
    spec = spec_from_config(preset_config("tiny-moe") | {"moe_intermediate_size": 272})
    policy = precision_policy(spec, Fp8Config(train=True))
    with pytest.raises(UserError) as refused:
        Decoder(spec, policy, "train", device="meta", backend="scaled_mm")
    assert str(refused.value) == refusal({"moe_intermediate_size": 272}, **FP8)


def test_so_is_one_in_bf16() -> None:
    sizes = {"hidden_size": 100, "moe_intermediate_size": 40}
    spec = spec_from_config(preset_config("tiny-moe") | sizes)
    policy = precision_policy(spec, Fp8Config())
    with pytest.raises(UserError) as refused:
        LayerBuilder(spec, policy, "train", torch.bfloat16, "cuda", "emulated", None, ONE_WORKER, True)
    assert str(refused.value) == refusal(sizes)
    LayerBuilder(spec, policy, "train", torch.bfloat16, "cpu", "emulated", None, ONE_WORKER, True)


def test_a_model_without_experts_is_not_asked() -> None:
    assert refusal({"hidden_size": 144}, "tiny", model={"dtype": "float32"}) is None
