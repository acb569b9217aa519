"""AdamW's moments in the format of `trainer.optimizer.states`, and the memory that holds them.

    float32    8 bytes a parameter        bfloat16   4        8bit   2 + 2 / 128, codes and block exponents

kernels/optimizer/adamw.py defines the formats. With `offload` moments and masters are in one pinned block of the host's
memory, so that the GPU can copy them while it computes (trainer/optimizer_offload.py).

In a checkpoint their names are `exp_avg/<parameter>` and `exp_avg_sq/<parameter>`, in the parameter's shape, and for
8bit also `exp_avg_exponents/<parameter>` and `exp_avg_sq_exponents/<parameter>`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from octetrl.kernels.optimizer.adamw import STATE_BLOCK, Moment
from octetrl.system.errors import UserError

StateFormat = Literal["float32", "bfloat16", "8bit"]

DTYPES: dict[StateFormat, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
ALIGNMENT = 256  # bytes: each tensor in the host's block starts at a multiple


class HostMemory:
    """One block of host memory, pinned as long as this object exists. Tensors cut from it may outlive it.

    torch's own pinned allocator rounds each request up to a power of two, which would waste up to half of the memory.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        *,
        setting: str = "trainer.optimizer.offload",
        remedy: str = "set it to false, or use trainer.optimizer.states=8bit",
    ) -> None:
        """UserError, about `setting` and with `remedy`: the memory cannot be pinned."""
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8).zero_()  # all pages, by several threads
        self._used = 0
        if device.type == "cuda" and num_bytes:
            runtime = torch.cuda.cudart()
            address = self._bytes.data_ptr()
            with torch.cuda.device(device):
                error = int(runtime.cudaHostRegister(address, num_bytes, 0))
            if error:
                raise UserError(
                    f"{setting}: {num_bytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error {error});"
                    f" {remedy}"
                )
            weakref.finalize(self, _unlock, self._bytes).atexit = False

    def take(self, like: Tensor) -> Tensor:
        """A zeroed tensor of `like`'s shape and dtype."""
        start = self._used
        self._used += aligned(like.nbytes)
        return self._bytes[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _unlock(block: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def meta_moment(parameter: Tensor, states: StateFormat) -> Moment:
    """One moment on the meta device: shapes and dtypes without memory."""
    values = torch.empty(parameter.shape, dtype=DTYPES[states], device="meta")
    if states != "8bit":
        return Moment(values)
    return Moment(values, torch.empty(-(-parameter.numel() // STATE_BLOCK), dtype=torch.uint8, device="meta"))


def zero_moment(parameter: Tensor, states: StateFormat, host: HostMemory | None) -> Moment:
    """A moment of zeros: in `host`, or if that is None on the parameter's device."""

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros_like(like, device=parameter.device) if host is None else host.take(like)

    meta = meta_moment(parameter, states)
    if meta.exponents is None:
        return Moment(zeros(meta.values))
    return Moment(zeros(meta.values), zeros(meta.exponents).fill_(1))


def named_tensors(kind: str, parameter_name: str, moment: Moment) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one moment, by their names in a checkpoint. `kind`: exp_avg or exp_avg_sq."""
    yield f"{kind}/{parameter_name}", moment.values
    if moment.exponents is not None:
        yield f"{kind}_exponents/{parameter_name}", moment.exponents


def check_format(tensors: Mapping[str, Tensor], states: StateFormat) -> None:
    """Raise UserError if the moments of a checkpoint have another format than `states`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, tensor in tensors.items():
        if name.startswith("exp_avg/") and tensor.dtype != DTYPES[states]:
            theirs = names.get(tensor.dtype, str(tensor.dtype))
            raise UserError(
                f"the checkpoint's optimizer states are {theirs}, trainer.optimizer.states is {states}:"
                f" resume with trainer.optimizer.states={theirs}"
            )
