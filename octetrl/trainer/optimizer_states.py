"""AdamW's moments in the format of `trainer.optimizer.states`, and the memory that holds them.

    float32    8 bytes a parameter        bfloat16   4        8bit   2 + 2 / 128, codes and block exponents

kernels/optimizer/adamw.py defines the formats. With `offload` moments and masters are in one pinned block of the host's
memory, so that the GPU can copy them while it computes (trainer/optimizer_states.py).

In a checkpoint their names are `exp_avg/<parameter>` and `exp_avg_sq/<parameter>`, in the parameter's shape, and for
8bit also `exp_avg_exponents/<parameter>` and `exp_avg_sq_exponents/<parameter>`.

**Optimizer offload.** AdamW on the GPU with states in the host's memory.

Parameters are processed in pieces of at most PIECE_ELEMENTS. The states of a piece are copied to the device while the
piece before is updated and the one before that is copied back. Two sets of buffers on the device alternate:

    incoming   states of piece i, host to device        waits until piece i - 2 has left the same buffers
    current    update of piece i
    outgoing   states of piece i, device to host

Each state crosses the bus once in each direction: s bytes a parameter each way. s is 8, 4 or 2 for moments in float32,
BF16 or 8 bits, plus 4 for a float32 master. At 50 GB/s each way and 8 billion parameters, that is 98 GB and 2 s a step
for float32 with a master, and 16 GB and 0.33 s for 8 bits with stochastic rounding. The device holds two pieces of s
bytes an element. The bits equal those of states on the device: the same kernel runs on the same values, and random bits
depend on an element's number in its tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octetrl.kernels.optimizer.adamw import STATE_BLOCK, AdamScalars, Moment, adamw
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
        return parameter.new_zeros(like.shape, dtype=like.dtype) if host is None else host.take(like)

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


PIECE_ELEMENTS = 1 << 24  # a multiple of STATE_BLOCK


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Elements `first` and on of one parameter: flat views, `states` in the host's memory."""

    weight: Tensor
    gradient: Tensor
    states: tuple[Tensor, ...]  # exp_avg, exp_avg_sq, then their exponents and the master, if they exist
    has_exponents: bool
    has_master: bool
    name: str
    first: int
    decays: bool


@dataclass(frozen=True, slots=True)
class _Buffers:
    states: tuple[Tensor, ...]
    filled: torch.cuda.Event
    updated: torch.cuda.Event
    written: torch.cuda.Event


def pieces_of(
    name: str,
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    master: Tensor | None,
    decays: bool,
    elements: int | None = None,
    first: int = 0,
) -> Iterator[StatePiece]:
    """Cut one parameter into pieces of at most `elements` elements, a multiple of STATE_BLOCK.

    `first`: number of the first element of `weight` in the whole parameter.
    """
    elements = elements or PIECE_ELEMENTS
    assert elements % STATE_BLOCK == 0, f"pieces of {elements} elements cut a block of states"
    for start in range(0, weight.numel(), elements):
        piece, blocks = slice(start, start + elements), slice(start // STATE_BLOCK, (start + elements) // STATE_BLOCK)
        states = [exp_avg.values.view(-1)[piece], exp_avg_sq.values.view(-1)[piece]]
        states += [moment.exponents[blocks] for moment in (exp_avg, exp_avg_sq) if moment.exponents is not None]
        if master is not None:
            states.append(master.view(-1)[piece])
        yield StatePiece(
            name=name,
            weight=weight.view(-1)[piece],
            gradient=gradient.view(-1)[piece],
            states=tuple(states),
            has_exponents=exp_avg.exponents is not None,
            has_master=master is not None,
            first=first + start,
            decays=decays,
        )


def update_piece(piece: StatePiece, states: Sequence[Tensor], clip: Tensor, scalars: AdamScalars, key: int) -> None:
    """Update the piece, with `states` in place of its own states."""
    exponents = states[2:4] if piece.has_exponents else (None, None)
    master = states[-1] if piece.has_master else None
    moments = Moment(states[0], exponents[0]), Moment(states[1], exponents[1])
    adamw(piece.weight, master, piece.gradient, *moments, clip, scalars, key=key, first=piece.first)


class OffloadStream:
    """Two streams and two sets of buffers for pieces with the same kinds of states."""

    def __init__(self, pieces: Sequence[StatePiece], device: torch.device) -> None:
        self._incoming, self._outgoing = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._device = device
        self._buffers: dict[int, tuple[_Buffers, _Buffers]] = {}
        for count in {len(piece.states) for piece in pieces}:
            largest = max((piece for piece in pieces if len(piece.states) == count), key=lambda p: p.weight.numel())
            self._buffers[count] = self._buffers_like(largest), self._buffers_like(largest)

    def _buffers_like(self, piece: StatePiece) -> _Buffers:
        states = tuple(torch.empty_like(state, device=self._device) for state in piece.states)
        return _Buffers(states, *(torch.cuda.Event() for _ in range(3)))

    def step(
        self, pieces: Sequence[StatePiece], clip: Tensor, scalars: Sequence[AdamScalars], keys: Sequence[int]
    ) -> None:
        """Update every piece. Later work on the current stream finds the new states in the host's memory.

        `clip`: float32 scalar on the device. `scalars` and `keys`: one per piece.
        """
        current = torch.cuda.current_stream(self._device)
        self._incoming.wait_stream(current)
        self._outgoing.wait_stream(current)
        for number, (piece, own_scalars, key) in enumerate(zip(pieces, scalars, keys, strict=True)):
            buffers = self._buffers[len(piece.states)][number % 2]
            states = [buffer[: state.numel()] for buffer, state in zip(buffers.states, piece.states, strict=True)]
            with torch.cuda.stream(self._incoming):
                self._incoming.wait_event(buffers.written)
                for state, host in zip(states, piece.states, strict=True):
                    state.copy_(host, non_blocking=True)
                buffers.filled.record(self._incoming)
            current.wait_event(buffers.filled)
            update_piece(piece, states, clip, own_scalars, key)
            buffers.updated.record(current)
            with torch.cuda.stream(self._outgoing):
                self._outgoing.wait_event(buffers.updated)
                for state, host in zip(states, piece.states, strict=True):
                    host.copy_(state, non_blocking=True)
                buffers.written.record(self._outgoing)
        current.wait_stream(self._outgoing)
