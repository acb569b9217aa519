"""Kernels in Gluon: where they can run, and what happens where they do not compile.

Gluon is an experimental part of Triton, and its kernels here are written for Hopper. Each has a kernel in plain Triton
beside it, slower and with the same bits, which runs everywhere else.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from functools import cache

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from octetrl.fp8.architectures import architecture_of

COMPILER_ERRORS = (ImportError, CompilationError, OutOfResources, PTXASError, RuntimeError)
ALIGNMENT = 16  # bytes: of the rows that a Gluon kernel copies
fallbacks: dict[Hashable, str] = {}  # what does not compile here, FP8 GEMMs by their config: its name and the reason


def is_of_compiler(error: Exception) -> bool:
    """Whether Gluon is missing or could not be compiled; plain Triton then gives the same bits. MLIR's passes raise a
    plain RuntimeError. A failed launch, or missing memory, is an error of its own and not a reason to fall back."""
    return not isinstance(error, RuntimeError) or (type(error) is RuntimeError and "PassManager" in str(error))


def can_run(kernel: str, *tensors: Tensor) -> bool:
    """Whether `kernel` may be tried on these tensors: on Hopper, aligned, and not given up before."""
    if gave_up(kernel) or not all(x.is_cuda and x.data_ptr() % ALIGNMENT == 0 for x in tensors):
        return False
    return has_gluon(tensors[0].device)


@cache
def has_gluon(device: torch.device) -> bool:
    """Whether the GPU runs the kernels in Gluon (fp8/architectures.py)."""
    return architecture_of(torch.cuda.get_device_capability(device)).gluon


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def gave_up(kernel: Hashable) -> bool:
    """Whether `kernel` is known not to compile here."""
    return kernel in fallbacks


def give_up(kernel: Hashable, error: Exception, name: str | None = None) -> None:
    """Notes that `kernel` does not compile here, with a warning; raises `error` if it is another one. `name`: in
    texts, if it is not the key itself."""
    if not is_of_compiler(error):
        raise error
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    fallbacks[kernel] = f"{name or kernel}: {reason}"
    said = f"{name or kernel} does not compile on this machine, so a slower kernel runs ({reason})"
    warnings.warn(said, stacklevel=3)
