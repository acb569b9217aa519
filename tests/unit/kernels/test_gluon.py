"""Where kernels in Gluon run: nowhere without a GPU, and an error that is no compiler's is not hidden."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from octetrl.kernels import gluon
from octetrl.workers.kernel_paths import FallbackWatch, path_metrics


def test_a_cpu_runs_none() -> None:
    assert not gluon.can_run("some_gluon", torch.zeros(4))


def test_what_does_not_compile_is_named_once_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "fallbacks", {})
    with pytest.warns(UserWarning, match="some_gluon does not compile on this machine, so a slower kernel runs"):
        gluon.give_up("some_gluon", OutOfResources(300_000, 232_448, "shared memory"))
    assert list(gluon.fallbacks) == ["some_gluon"] and not gluon.can_run("some_gluon")
    on_gpu: Any = SimpleNamespace(
        lm_head_weight=SimpleNamespace(is_cuda=True), dtype=torch.float32, has_fused_forms=True
    )
    assert path_metrics(trained=on_gpu, generating=None)["fp8/gluon_fallbacks"] == 1.0
    said = FallbackWatch().warning({})
    assert said is not None and "some_gluon: OutOfResources" in said


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), torch.OutOfMemoryError("no memory")])
def test_other_errors_stay_errors(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "fallbacks", {})
    with pytest.raises(type(error)):
        gluon.give_up("some_gluon", error)
    assert not gluon.fallbacks
