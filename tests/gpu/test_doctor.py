"""The doctor on the forwards that a Hopper GPU runs: nothing differs, and a kernel that is an ulp off is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.doctor.attribution import attribute
from octetrl.doctor.findings import examine
from octetrl.doctor.taps import Site
from octetrl.fp8.quantize import Quantized
from octetrl.models.blocks.mlp import rollout, training
from tests.e2e import tiny_run
from tests.unit.doctor.test_examine import subject

pytestmark = pytest.mark.gpu

WIDE = {  # enough for FP8's blocks to differ
    "hidden_size": 512,
    "intermediate_size": 1152,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
ON_THE_GPU = {"cluster__device": "cuda", "engine__kv_cache_tokens": 1 << 14}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make_model(tmp_path_factory.mktemp("doctor") / "model", tie_word_embeddings=False, **WIDE)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_full"])
def test_engine_and_trainer_are_equal_op_by_op(model: Path, precision: str) -> None:
    one = subject(model, precision, **ON_THE_GPU)
    assert one.is_fused, "the forwards of the product, not the modules"
    report = examine(one).report
    assert report.equal, report.verdict


def test_a_wrong_branch_of_an_adapter_is_named(model: Path) -> None:
    one = subject(model, "fp8_full", model__lora={}, **ON_THE_GPU)
    assert one.is_fused and examine(one).report.equal
    for _, adapter in one.worker.engine_model.adapters():
        adapter.scale *= 10
    first = examine(one).report.first
    assert first is not None and first.site == Site(0, "qkv_proj")


def test_what_brings_the_mismatch_is_told(model: Path) -> None:
    found = attribute(examine(subject(model, "fp8_rollout", **ON_THE_GPU)))
    shares = {share.kind: share.of_mean_abs for share in found.shares}
    assert list(shares) == ["weights", "activations"]
    assert sum(shares.values()) + found.rest.mean_abs == pytest.approx(1.0)
    assert all(share > 0.05 for share in shares.values()) and abs(found.rest.mean_abs) < 0.05


@pytest.mark.parametrize("namespace", [rollout, training], ids=["engine", "trainer"])
def test_a_kernel_that_is_an_ulp_off_is_named(model: Path, monkeypatch: pytest.MonkeyPatch, namespace: Any) -> None:
    own = namespace.silu_mul_quantize

    def off(*args: Any, **kwargs: Any) -> Quantized:
        made: Quantized = own(*args, **kwargs)
        first = made.scale[0, 0]  # in place: the GEMMs ask for the strides that it has
        first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
        return made

    monkeypatch.setattr(namespace, "silu_mul_quantize", off)
    report = examine(subject(model, "fp8_full", **ON_THE_GPU)).report
    assert report.first is not None and report.first.site == Site(0, "SiLU, quantised")
