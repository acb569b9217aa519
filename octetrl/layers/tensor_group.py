"""What tensor-parallel workers exchange inside a forward and a backward.

All workers of a group run the same forwards with the same tokens. Each owns whole rows of every linear
(shapes/tensor_cut.py). Values are gathered, never added, in the forward, so its bits are those of one worker. In the
backward the products over the split rows are added in float32, in the order of ranks, with equal bits on all workers.

Small tensors of GPUs that reach each other's memory are gathered by one kernel (kernels/rows/gather_from_peers.py),
which a CUDA graph can contain. All others travel by `stack` and `exchange`. Both move bytes, so the bits are equal.

T workers of the group, M tokens, C columns of all workers, L columns of one.
"""

from __future__ import annotations

from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.quantize.quantize_activation import scale_rows_of
from octetrl.kernels.rows.gather_from_peers import PeerMemory, gather_from_peers

DIRECT_BYTES = 8 << 20  # of one worker's tensor: larger ones are as fast over NCCL, which needs no inbox


class TensorGroup(Protocol):
    """The workers that share a model's rows, as one of them sees them. Every method is called by all, in one order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def memory(self) -> PeerMemory | None:
        """The shared memory of GPUs that reach each other's; None elsewhere."""

    def stack(self, values: Tensor) -> Tensor:
        """The tensors of all workers, [T, ...], in the order of ranks. They have one shape and dtype."""

    def exchange(self, parts: Tensor) -> Tensor:
        """[T, ...] of [T, ...]: part `rank` of every worker, in the order of ranks."""


class OneWorker:
    """The only worker of a group: its model is whole."""

    rank = 0
    size = 1
    memory: PeerMemory | None = None

    def stack(self, values: Tensor) -> Tensor:
        return values.unsqueeze(0)

    def exchange(self, parts: Tensor) -> Tensor:
        return parts


ONE_WORKER = OneWorker()


def join_columns(group: TensorGroup, x_ML: Tensor) -> Tensor:
    """x [M, C]: the columns of all workers, of any dtype."""
    if group.size == 1:
        return x_ML
    memory = direct_memory(group, x_ML)
    if memory is not None:
        return gather_from_peers(memory, x_ML.contiguous())[0]
    return group.stack(x_ML.contiguous()).movedim(0, 1).reshape(x_ML.shape[0], -1)


def join_codes(group: TensorGroup, own: Quantized) -> Quantized:
    """The operand [M, C] whose columns [M, L] the workers have as codes and scales, in blocks of 1 x 128."""
    memory = direct_memory(group, own.codes)
    if memory is None:
        codes_MC = join_columns(group, own.codes.view(torch.uint8)).view(own.codes.dtype)
        return Quantized(codes_MC, join_rows(group, own.scale.t()).t())  # strides (1, M), as the GEMM reads it
    codes_MC, scales = gather_from_peers(memory, own.codes, flat_F=scale_rows_of(own).view(-1))
    rows = own.codes.shape[0]
    return Quantized(codes_MC, scales.view(group.size * own.scale.shape[1], -1).t()[:rows])


def join_rows(group: TensorGroup, x_L: Tensor) -> Tensor:
    """The rows of all workers, of any dtype, which may be a transposed view."""
    return x_L if group.size == 1 else group.stack(x_L.contiguous()).flatten(0, 1)


def direct_memory(group: TensorGroup, values: Tensor, widest: int | None = None) -> PeerMemory | None:
    """The memory by which `values` of all workers travel; None: by `stack`. In a captured graph always by memory.

    All workers must choose alike. `widest`: the columns of the worker with most, where they differ."""
    if group.memory is None or not values.is_cuda:
        return None
    most = values.nbytes if widest is None else values.shape[0] * widest * values.element_size()
    return group.memory if most <= DIRECT_BYTES or torch.cuda.is_current_stream_capturing() else None


def own_columns(group: TensorGroup, x_MC: Tensor) -> Tensor:
    """The columns that this worker owns, as a view."""
    width = x_MC.shape[1] // group.size
    return x_MC[:, group.rank * width : (group.rank + 1) * width]


def add_in_order(parts: Tensor) -> Tensor:
    """The sum over the first axis, in its order. float32."""
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part
    return total


def sum_over(group: TensorGroup, partial: Tensor) -> Tensor:
    """The sum of the workers' tensors, float32, with equal bits on all of them. Each adds one part of it."""
    if group.size == 1:
        return partial
    parts = _in_parts(group, partial.float())
    return _whole(group.stack(add_in_order(group.exchange(parts))), partial)


def sum_own_columns(group: TensorGroup, partial_MC: Tensor) -> Tensor:
    """The sum of the workers' [M, C], float32: only the columns [M, L] that this worker owns."""
    if group.size == 1:
        return partial_MC
    parts_TML = partial_MC.float().unflatten(1, (group.size, -1)).movedim(1, 0).contiguous()
    return add_in_order(group.exchange(parts_TML))


def sum_of_one(group: TensorGroup, values: Tensor) -> Tensor:
    """The values [M, L], of a dtype of two bytes, that one worker has where all others have zeros, bit for bit: their
    bytes are joined."""
    if group.size == 1:
        return values
    memory = direct_memory(group, values)
    if memory is not None:
        parts_MTL = gather_from_peers(memory, values.contiguous())[0].view(torch.int16).unflatten(1, (group.size, -1))
        return reduce(torch.bitwise_or, parts_MTL.unbind(1)).view(values.dtype)  # a late peer's NaN has all bits
    parts = group.exchange(_in_parts(group, values.contiguous().view(torch.int16)))
    return _whole(group.stack(parts.sum(0, dtype=torch.int16)), values.view(torch.int16)).view(values.dtype)


def _in_parts(group: TensorGroup, values: Tensor) -> Tensor:
    """[T, n]: all elements, padded with zeros."""
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % group.size)).view(group.size, -1)


def _whole(parts: Tensor, like: Tensor) -> Tensor:
    return parts.reshape(-1)[: like.numel()].view(like.shape)
