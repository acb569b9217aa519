"""A way to run the row kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import pytest

import octetrl.kernels.gemm.linear_logprobs as linear_logprobs
import octetrl.kernels.instructions as instructions
import octetrl.kernels.rows.rms_norm as rms_norm
import octetrl.kernels.rows.rope as rope
import octetrl.kernels.rows.silu_mul as silu_mul
from tests.unit.kernels.interpreting import interpret


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the row kernels, and the device functions of Triton that they call, in Triton's interpreter."""
    interpret(monkeypatch, instructions, linear_logprobs, rms_norm, rope, silu_mul)
