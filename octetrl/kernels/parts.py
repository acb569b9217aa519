"""What the kernels of a training step are for, told to a profiler that listens: `with part("gemm_wgrad"): ...`.

cuBLAS's names do not tell a forward GEMM from a gradient's. bench/parts.py reads these ranges from a trace. Without
a profiler they cost a function call; a range itself costs ten microseconds, which small models would feel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch.profiler import record_function

Part = Literal[
    "gemm_forward",
    "gemm_dgrad",
    "gemm_wgrad",
    "quantize",
    "attention_forward",
    "attention_backward",
    "rows",
    "lm_head",
    "gradients",
    "optimizer",
    "requantize",
]
_SILENT: AbstractContextManager[None] = nullcontext()


def part(name: Part) -> AbstractContextManager[object]:
    """A range of this name where a profiler runs, nothing elsewhere."""
    return record_function(name) if torch.autograd._profiler_enabled() else _SILENT
