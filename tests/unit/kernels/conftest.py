"""All tests of this folder run their kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import pytest

from octetrl.kernels.attention import qkv_rotate, qkv_rotate_backward
from octetrl.kernels.rows import rms_norm_backward
from tests.unit.kernels.interpreting import interpreted  # noqa: F401


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training's row kernels, with few programs and small tiles."""
    monkeypatch.setattr(rms_norm_backward, "PROGRAMS", 3)
    monkeypatch.setattr(rms_norm_backward, "TILE_ELEMENTS", 256)
    monkeypatch.setattr(qkv_rotate_backward, "PROGRAMS", 2)
    for module in (qkv_rotate, qkv_rotate_backward):
        monkeypatch.setattr(module, "WARPS", 1)


@pytest.fixture(autouse=True)
def kernels_are_interpreted(interpreted: None) -> None:  # noqa: F811
    pass
