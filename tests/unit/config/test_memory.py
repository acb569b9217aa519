"""The estimate against sums done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from octetrl.config.load import recipe_from_mapping
from octetrl.config.memory import MemoryEstimate, Precisions, estimate_memory, linear_elements
from octetrl.config.presets import preset_config
from octetrl.config.schema import Recipe
from octetrl.fp8.policy import LINEARS
from octetrl.models.families import spec_from_config

TINY = spec_from_config(preset_config("tiny"))
LINEAR_NAMES = [f"layers.{layer}.{kind}" for layer in range(4) for kind in LINEARS]
PLAIN = Precisions([], [], "bf16", "bf16")
FULL = Precisions(LINEAR_NAMES, LINEAR_NAMES, "fp8", "fp8")
P, P8 = 1_033_600, 4 * 245_760  # 245,760 = 128 * (256 + 128 + 1024 + 512): qkv, o, gate and up, down


def recipe(**sections: Any) -> Recipe:
    return recipe_from_mapping({"model": {"path": "m"}, "environment": {"dataset": "d"}, **sections})


def parts_of(estimate: MemoryEstimate) -> dict[str, int]:
    return {part.name: part.num_bytes for part in estimate.parts}


def test_the_linears_and_the_rest_are_all_parameters() -> None:
    assert sum(linear_elements(TINY).values()) == P8 // 4
    norms, embeddings = 4 * (2 * 128 + 2 * 32) + 128, 384 * 128
    assert P8 + norms + embeddings == P == TINY.num_parameters


def test_parts_in_bf16() -> None:
    plain = recipe(trainer={"tokens_per_micro_batch": 4096, "logprob_chunk": 100})
    parts = parts_of(estimate_memory(plain, TINY, PLAIN, on_gpu=True, device_bytes=None))
    layer = 4 * 128 + 128 + 3 * 512 + 2 * (128 + 2 * 64)
    assert parts == {
        "weights": 2 * P,
        "gradients": 4 * P,
        "optimizer": 12 * P,
        "activations": 2 * 4096 * (4 * 128 + layer),
        "logits": 12 * 100 * 384 + 6 * 384 * 128,
    }


def test_fp8_adds_codes_and_for_training_the_transposed_ones() -> None:
    def copies(precisions: Precisions, on_gpu: bool = True) -> int:
        return parts_of(estimate_memory(recipe(), TINY, precisions, on_gpu=on_gpu, device_bytes=None))["FP8 copies"]

    scales = 4 * (P8 // 128**2)
    assert copies(FULL) == 2 * P8 + scales
    assert copies(Precisions(LINEAR_NAMES, [], "bf16", "bf16")) == P8 + scales
    assert copies(FULL, on_gpu=False) == 9 * P8 + scales  # emulated


@pytest.mark.parametrize(
    ("fp8", "precisions", "expected"),
    [
        ({}, PLAIN, 4 * 64 * 4),
        ({"kv_cache": "calibrated"}, FULL, 4 * 64 * 2),
        ({"kv_cache": "calibrated"}, Precisions([], [], "bf16", "fp8"), 4 * 64 * 3),
        ({"kv_cache": "dynamic"}, FULL, 4 * (64 * 2 + 2 * 2 * 4)),
    ],
)
def test_bytes_of_a_token_in_the_cache(fp8: dict, precisions: Precisions, expected: int) -> None:
    estimate = estimate_memory(recipe(fp8=fp8), TINY, precisions, on_gpu=True, device_bytes=None)
    assert estimate.kv_bytes_per_token == expected


def test_capacity_is_what_was_told_a_share_of_what_is_free_or_a_steps_requests() -> None:
    def tokens(on_gpu: bool, device_bytes: int | None, **engine: Any) -> int | None:
        sized = recipe(engine=engine, rollout={"max_prompt_tokens": 100, "max_new_tokens": 100})
        return estimate_memory(sized, TINY, PLAIN, on_gpu=on_gpu, device_bytes=device_bytes).kv_cache_tokens

    assert tokens(True, None, kv_cache_tokens=1000) == 896
    assert tokens(True, None) is None
    assert tokens(True, 18 * P + 1024 * 2560, kv_memory_fraction=0.5) == 1280
    assert tokens(True, 0) == 0
    assert tokens(False, None, max_batch=10) == 10 * 256


def test_choices_that_cost_or_save_memory() -> None:
    def parts(**sections: Any) -> dict[str, int]:
        return parts_of(estimate_memory(recipe(**sections), TINY, FULL, on_gpu=True, device_bytes=None))

    base = parts()
    assert parts(trainer={"optimizer": {"master": "stochastic_rounding"}})["optimizer"] == base["optimizer"] - 4 * P
    assert parts(trainer={"activation_checkpointing": "none"})["activations"] > base["activations"]
    assert parts(algorithm={"kl_coefficient": 0.1})["reference model"] == base["weights"] + base["FP8 copies"]
    assert parts(model={"path": "m", "dtype": "float32"})["optimizer"] == 8 * P
