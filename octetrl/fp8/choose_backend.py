"""Which backend multiplies FP8 operands on a device (backends.py)."""

from __future__ import annotations

import torch

from octetrl.fp8.architectures import architecture_of
from octetrl.fp8.backends import BackendName
from octetrl.system.errors import UserError


def choose_backend(device: torch.device | str, emulate: bool | None = None, *, mx: bool = False) -> BackendName:
    """The backend for `device`. `emulate` True or False forces a choice; None takes the fastest that the device has.
    `mx`: the linears are MXFP8, which is emulated on a device without a GEMM for it.

    Raises UserError for a GPU whose architecture has no FP8 products (architectures.py), and for a CPU with
    `emulate=False`.
    """
    device = torch.device(device)
    if mx:
        has_cores = device.type == "cuda" and not emulate
        products = architecture_of(torch.cuda.get_device_capability(device)).mx if has_cores else None
        return products or "mxfp8"
    if emulate:
        return "emulated"
    if device.type == "cpu":
        if emulate is None:
            return "emulated"
        raise UserError("fp8.emulate=false on a CPU: a CPU has no FP8 GEMM; set fp8.emulate=true or use a Hopper GPU")
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        fp8_products = architecture_of(capability).fp8
        if fp8_products is not None:
            return fp8_products
        given = f"{torch.cuda.get_device_name(device)} (SM{capability[0]}{capability[1]})"
    else:
        given = f"device '{device}'"
    raise UserError(
        f"{given} has no block-scaled FP8 GEMM, which needs a Hopper or Blackwell GPU (SM90, SM100);"
        f" set fp8.emulate=true to run FP8's numbers without its speed, or precision: bf16"
    )
