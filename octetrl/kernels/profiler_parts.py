"""Names for a profiler: which part of a training step a kernel belongs to. `with part("gemm_wgrad"): ...`.

cuBLAS's kernel names do not distinguish a forward GEMM from a gradient's. lab/profile.py reads these ranges from a
trace. Without a profiler a range costs one function call. With one it costs ten microseconds, which is noticeable for a
small model.
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
    """A profiler range with this name; nothing if no profiler runs."""
    return record_function(name) if torch.autograd._profiler_enabled() else _SILENT
