"""A way to run the row kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import pytest
import triton.experimental.gluon  # noqa: F401  (the interpreter imports it, and must not find patched functions)
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import octetrl.kernels.instructions as instructions
import octetrl.kernels.linear_logprobs as linear_logprobs
import octetrl.kernels.rms_norm as rms_norm
import octetrl.kernels.rope as rope
import octetrl.kernels.silu_mul as silu_mul


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the row kernels, and the device functions of Triton that they call, in Triton's interpreter."""
    for module in (instructions, linear_logprobs, rms_norm, rope, silu_mul, tl, tl.standard):
        for name, member in list(vars(module).items()):
            if isinstance(member, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(member.fn))
