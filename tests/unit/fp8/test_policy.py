"""The table of what is FP8: its digest, and the cached tensors that a recipe may choose."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from octetrl.config.schema import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError

SPEC = spec_from_config(preset_config("tiny"))
K_STAYS_BF16 = replace(SPEC, qk_norm=False, qkv_bias=True)
LATENT = spec_from_config(preset_config("tiny-mla-moe"))


def digest_of(spec: ModelSpec = SPEC, **fp8: Any) -> str:
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
