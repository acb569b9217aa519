"""Metrics of the kernels that a run takes, and their warnings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octetrl.kernels import gluon
from octetrl.workers import kernel_paths
from octetrl.workers.kernel_paths import FallbackWatch, path_metrics


def model_on_a_gpu(size: int, memory: object = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What `path_metrics` reads of a model that `size` workers share."""
    group = SimpleNamespace(rank=0, size=size, memory=memory)
    weight = SimpleNamespace(is_cuda=True)
    own = {"has_fused_forms": True, "float8_linears": lambda: []}
    return SimpleNamespace(lm_head_weight=weight, dtype=dtype, group=group, **own)


@pytest.fixture(autouse=True)
def no_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "fallbacks", {})
    monkeypatch.setattr(kernel_paths, "fused_layer_runner", lambda model, kind: None)


@pytest.mark.parametrize(("memory", "captured"), [(None, 0.0), (object(), 1.0)])
def test_workers_that_share_a_model_capture_where_they_reach_each_others_memory(
    memory: object, captured: float
) -> None:
    shared = model_on_a_gpu(2, memory)
    assert path_metrics(trained=shared, generating=shared)["rollout/captured"] == captured


def test_metrics_of_each_path(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model_on_a_gpu(1)
    plain = {"train/fused": 0.0, "fp8/gluon_fallbacks": 0.0}
    assert path_metrics(trained=whole, generating=whole) == {**plain, "rollout/fused": 1.0}
    in_float32 = model_on_a_gpu(1, dtype=torch.float32)
    assert path_metrics(trained=whole, generating=in_float32) == {**plain, "rollout/fused": 0.0}
    assert path_metrics(trained=whole, generating=None) == plain
    monkeypatch.setattr(kernel_paths, "fused_layer_runner", lambda model, kind: "runs")
    monkeypatch.setitem(gluon.fallbacks, "attention", "attention: no compiler")
    assert path_metrics(trained=whole, generating=None) == {"train/fused": 1.0, "fp8/gluon_fallbacks": 1.0}


def test_each_fallback_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = FallbackWatch()
    assert watch.warning({"rollout/captured": 1.0}) is None and watch.warning({}) is None
    assert "rollout/captured: 0" in str(watch.warning({"rollout/captured": 0.0}))
    assert watch.warning({"rollout/captured": 0.0}) is None
    for name in ("attention", "gemm"):
        monkeypatch.setitem(gluon.fallbacks, name, f"{name}: no compiler")
        assert f"{name}: no compiler" in str(watch.warning({})) and watch.warning({}) is None
