"""What a model of experts or a shared model allows: refused in the words of the check, and how each part is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.load import recipe_from_mapping
from octetrl.config.rules_shape import experts_refused_on_gpu, spec_problems
from octetrl.fp8.policy import precision_policy
from octetrl.layers.tensor_group import ONE_WORKER
from octetrl.models.build_blocks import LayerBuilder
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.tensor_rows import cut_rows_of
from octetrl.shapes.model_cuts import allowed_sizes, largest_cut, why_not_cut
from octetrl.shapes.presets import preset_config
from octetrl.shapes.tensor_cut import VOCAB_CHUNK, TensorCut
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
        ({"moe_intermediate_size": 1448}, {"fp8": {"rollout": True}}, "16; set fp8.ignore=['*.experts.*'],"),
        ({"moe_intermediate_size": 72}, FP8, "a width of 72 (layers.0.mlp.experts.down_proj)"),
        ({"hidden_size": 136, "moe_intermediate_size": 268}, FP8, "a width of 136 and 268 (layers.0.mlp."),
        ({"moe_intermediate_size": 1444}, FP8, "multiples of 16; set cluster.device=cpu"),
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
        ({"moe_intermediate_size": 1440}, FP8),
        ({"moe_intermediate_size": 1448}, {}),
        ({"moe_intermediate_size": 1448}, UNLIKE),
        ({"hidden_size": 104, "moe_intermediate_size": 40}, {}),
    ],
)
def test_what_runs_is_not(sizes: dict[str, int], sections: dict[str, Any]) -> None:
    assert refusal(sizes, **sections) is None


def test_a_model_that_is_built_is_refused_in_the_words_of_the_check() -> None:
    spec = spec_from_config(preset_config("tiny-moe") | {"moe_intermediate_size": 264})
    policy = precision_policy(spec, Fp8Config(train=True))
    with pytest.raises(UserError) as refused:
        Decoder(spec, policy, "train", device="meta", backend="scaled_mm")
    assert str(refused.value) == refusal({"moe_intermediate_size": 264}, **FP8)


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


SPEC = spec_from_config(preset_config("qwen3-8b"))


def test_published_models_are_cut_as_their_heads_allow() -> None:
    assert list(allowed_sizes(SPEC)) == [1, 2, 4, 8]
    assert why_not_cut(SPEC, 3) == "3 does not divide the model's 8 KV heads"
    assert why_not_cut(replace(SPEC, intermediate_size=12_416), 2) == (
        "2 parts of the intermediate size 12,416 are not multiples of 128"
    )
    small = replace(SPEC, vocab_size=VOCAB_CHUNK + 1)
    assert why_not_cut(small, 2) is None
    assert why_not_cut(small, 4) == "the vocabulary of 4,097 has 2 chunks of 4,096, fewer than 4"
    mixture = why_not_cut(spec_from_config(preset_config("qwen3-30b-a3b")), 2)
    assert mixture is not None and "only attention with KV heads and gated MLPs are" in mixture


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_parts_are_the_whole(size: int) -> None:
    parts = [SPEC.cut(TensorCut(rank, size)) for rank in range(size)]
    assert all(part.whole == SPEC for part in parts)
    whole_rows = {name: linear.out_features for name, linear in SPEC.linears()}
    rows: dict[str, list[int]] = {}
    for part in parts:
        for name, cut in cut_rows_of(part).items():
            for piece in cut.pieces:
                rows.setdefault(name, []).extend(range(piece.whole, piece.whole + piece.rows))
                assert piece.whole % 128 == 0
            if name.startswith("layers."):
                assert cut.whole_rows == whole_rows[name.removesuffix(".weight")]
    assert all(sorted(found) == list(range(len(found))) for found in rows.values())
    assert len(rows["embedding.weight"]) == SPEC.vocab_size
    vectors = SPEC.num_layers * (2 * SPEC.hidden_size + 2 * SPEC.head_size) + SPEC.hidden_size
    assert sum(part.num_parameters - vectors for part in parts) == SPEC.num_parameters - vectors
    widest = max(part.vocab_rows for part in parts)
    assert SPEC.cut(largest_cut(SPEC, size)).vocab_rows == widest


def problems(size: int, **changes: Any) -> list[str]:
    tree = {
        "model": {"preset": "qwen3-8b", "init": "random", "tokenizer": "."},
        "environment": {"dataset": "chain_sum"},
        "cluster": {"cpus": size, "tensor_parallel": size},
    }
    return [problem.text for problem in spec_problems(recipe_from_mapping(tree | changes), SPEC)]


def test_what_a_recipe_with_shared_models_may_not_ask() -> None:
    assert problems(8) == []
    assert problems(3) == [
        "cluster.tensor_parallel: 3, but 3 does not divide the model's 8 KV heads; use 1 or 2 or 4 or 8"
    ]
