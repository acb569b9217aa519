"""What parity and the fused forwards are promised for, beside what built models say of themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.load import recipe_from_mapping
from octetrl.config.schema import Recipe
from octetrl.fp8.backends import BackendName
from octetrl.fp8.parity import parity_of, refused_gate, why_measured
from octetrl.fp8.policy import formats_by_layer, precision_policy
from octetrl.fp8.slow_paths import slow_paths, why_not_fused
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.rollout_forward import can_fuse
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError

SPEC = replace(spec_from_config(preset_config("tiny")), num_layers=1)
SUPERVISED = {"algorithm": {"name": "sft", "conversations": "a.jsonl"}, "environment": {}}


def recipe_of(**sections: Any) -> Recipe:
    return recipe_from_mapping(
        {"model": {"preset": "tiny", "init": "random", "tokenizer": "t"}, "environment": {"dataset": "chain_sum"}}
        | sections
    )


@pytest.mark.parametrize("precision", ["bf16", "fp8_rollout", "fp8", "fp8_full"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("emulate", [None, True])
def test_a_model_is_fused_where_the_recipe_says_so(precision: str, dtype: str, emulate: bool | None) -> None:
    if dtype == "float32" and precision != "bf16":
        return  # refused (config/validate.py)
    model = {"preset": "tiny", "init": "random", "tokenizer": "t", "dtype": dtype}
    recipe = recipe_of(precision=precision, model=model, fp8={"emulate": emulate})
    policy = precision_policy(SPEC, recipe.fp8)
    backend: BackendName = "emulated" if emulate else "scaled_mm"
    for side in ("rollout", "train"):
        built = Decoder(SPEC, policy, side, dtype=getattr(torch, dtype), device="meta", backend=backend)
        assert can_fuse(built) == (why_not_fused(recipe, policy, side) is None), side
    lines = slow_paths(recipe, policy, on_gpu=True)
    assert len(lines) == 2 if dtype == "float32" else all("fp8.emulate" in line for line in lines)
    assert slow_paths(recipe, policy, on_gpu=False) == []
    assert not any("training" in line for line in slow_paths(recipe, policy, on_gpu=True, trains=False))


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({}, None),
        ({"precision": "fp8_full"}, None),
        ({"precision": "fp8_rollout"}, "FP8 on one side only"),
        ({"precision": "fp8_full", "fp8": {"kv_replay": False}}, "fp8.kv_replay: false"),
        ({"engine": {"prefix_cache": "keep"}}, "engine.prefix_cache: keep"),
        (SUPERVISED, "sft samples no rollouts"),
    ],
)
def test_an_explicit_gate_is_refused_where_it_could_never_close(sections: dict[str, Any], why: str | None) -> None:
    for asked in ("auto", True, False):
        recipe = recipe_of(**sections, mismatch={"fail_on_difference": asked})
        policy = precision_policy(SPEC, recipe.fp8)
        reason, refused = (ask(recipe, policy, on_gpu=False) for ask in (why_measured, refused_gate))
        assert (reason is None) == (why is None)
        assert parity_of(recipe, policy, on_gpu=False) == ("promised" if why is None else "measured")
        assert (refused is not None) == (asked is True and why is not None)
        if why is not None and refused is not None:
            assert why in refused and refused.startswith("mismatch.fail_on_difference: true") and "auto" in refused


def test_neighbouring_layers_with_equal_formats_are_one_line() -> None:
    fp8 = recipe_of(precision="fp8_rollout", fp8={"bf16_last_layers": 1, "ignore": ["layers.0.*.o_proj"]}).fp8
    mixed = "FP8 in the rollout, float32 in training"
    first = ("0", f"{mixed}; attention.o_proj float32")
    found = formats_by_layer(precision_policy(replace(SPEC, num_layers=4), fp8), plain="float32")
    assert found == [first, ("1 to 2", mixed), ("3", "float32")]


# ---------------------------------------------------------------- the table of what is FP8


WHOLE_SPEC = spec_from_config(preset_config("tiny"))
K_STAYS_BF16 = replace(WHOLE_SPEC, qk_norm=False, qkv_bias=True)
LATENT = spec_from_config(preset_config("tiny-mla-moe"))


def digest_of(spec: ModelSpec = WHOLE_SPEC, **fp8: Any) -> str:
    return precision_policy(spec, Fp8Config(**fp8)).digest


def test_every_format_has_another_digest() -> None:
    """Otherwise the trainer would take samples that an engine drew with other codes."""
    on = {"rollout": True, "train": True}
    digests = {
        "bf16": digest_of(),
        "fp8": digest_of(**on),
        "rollout": digest_of(rollout=True),
        "layers": digest_of(bf16_first_layers=1, **on),
        "linears": digest_of(ignore=("*.down_proj",), **on),
        "power of two": digest_of(power_of_two=True, **on),
        "calibrated": digest_of(kv_cache="calibrated", **on),
        "dynamic": digest_of(kv_cache="dynamic", **on),
        "K alone": digest_of(kv_cache="dynamic", kv_cache_tensors="k", **on),
        "V alone": digest_of(kv_cache="dynamic", kv_cache_tensors="v", **on),
    }
    same = [pair for pair in combinations(digests, 2) if digests[pair[0]] == digests[pair[1]]]
    assert not same and all(len(digest) == 16 for digest in digests.values())


def test_what_changes_no_code_keeps_the_digest() -> None:
    assert digest_of(kv_cache_tensors="k") == digest_of(), "no cached tensor is FP8"


@pytest.mark.parametrize(("spec", "said"), [(K_STAYS_BF16, "would leave nothing in FP8"), (LATENT, "latent attention")])
def test_a_cached_tensor_that_cannot_be_fp8_is_refused_only_in_an_fp8_cache(spec: ModelSpec, said: str) -> None:
    with pytest.raises(UserError, match=f"kv_cache_tensors: 'k' .*{said}"):
        precision_policy(spec, Fp8Config(kv_cache="dynamic", kv_cache_tensors="k"))
    policy = precision_policy(spec, Fp8Config(kv_cache="none", kv_cache_tensors="k"))
    assert {stored for _, stored in policy.cache} == {"bf16"}
