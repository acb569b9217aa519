"""Which models and recipes workers can share by rows, and what each of them gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octetrl.config.load import recipe_from_mapping
from octetrl.config.rules_shape import spec_problems
from octetrl.models.families import spec_from_config
from octetrl.models.tensor_rows import cut_rows_of
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import allowed_sizes, largest_cut, why_not_cut
from octetrl.shapes.tensor_cut import VOCAB_CHUNK, TensorCut

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
