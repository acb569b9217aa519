"""Running the training's row kernels in Triton's interpreter, with few programs and small tiles.

The interpreter takes sums in another order than a GPU and rounds to E4M3 in its own way, so float32 results are
compared closely here and codes by distance; bits are compared on a GPU (tests/gpu/test_training_rows.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import triton.runtime.interpreter as interpreter

import octetrl.kernels.attention.kv_codes as kv_codes
import octetrl.kernels.attention.qkv_rotate as qkv_rotate
import octetrl.kernels.attention.qkv_rotate_backward as qkv_rotate_backward
import octetrl.kernels.attention.qkv_store as qkv_store
import octetrl.kernels.quantize.quantize_activation as quantize_activation
import octetrl.kernels.rows.rms_norm_backward as rms_norm_backward
from tests.unit.kernels.interpreting import interpret

MODULES = (kv_codes, qkv_rotate, qkv_rotate_backward, qkv_store, quantize_activation, rms_norm_backward)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        """With NumPy 2.4 the interpreter can't use a number as a loop's bound."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_with_index)
    interpret(monkeypatch, *MODULES)
    monkeypatch.setattr(rms_norm_backward, "PROGRAMS", 3)
    monkeypatch.setattr(rms_norm_backward, "TILE_ELEMENTS", 256)
    monkeypatch.setattr(qkv_rotate_backward, "PROGRAMS", 2)
    for module in (qkv_rotate, qkv_rotate_backward):
        monkeypatch.setattr(module, "WARPS", 1)
