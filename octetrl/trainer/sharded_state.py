"""The state of a worker that owns some rows of each parameter, as files of a checkpoint, and back.

    weight/<parameter>                        the owned rows
    exp_avg/<parameter>, exp_avg_sq/...       the same rows
    master/<parameter>                        the same rows, where the optimizer has its own
    exp_avg_exponents/<parameter>, ...        of 8-bit moments: one for each 128 elements of the owned rows
    step_count                                in every file, and equal

models/row_shards.py names and reads the files. A worker reads the rows that it owns now. As many workers may have
written them, another number, or one, whose checkpoint has each tensor whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octetrl.config.errors import UserError
from octetrl.kernels.optimizer.adamw import STATE_BLOCK
from octetrl.models.row_shards import STEM, WEIGHT, RowRange, RowShards, file_stem, index_bytes
from octetrl.trainer.shards import Share
from octetrl.trainer.state_files import FORMATS, Content


class OwnedRows(Protocol):
    """What is asked of an optimizer's slot."""

    @property
    def name(self) -> str: ...

    @property
    def parameter(self) -> Tensor:
        """The whole parameter; its memory may be freed."""

    @property
    def first(self) -> int:
        """Number of the first owned element in the whole parameter."""


@dataclass(frozen=True, slots=True)
class OwnedState:
    """What one worker owns of a model that is trained. Live tensors, of the rows of `slots`."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    slots: Sequence[OwnedRows]
    share: Share


def shard_files(own: OwnedState, stem: str = STEM, *, with_weights: bool = True) -> dict[str, Content]:
    """The two files of one worker: its tensors, live, and the index of their rows."""
    tensors = {**(_named(own.weights) if with_weights else {}), **own.optimizer}
    name = file_stem(own.share.rank, own.share.count, stem)
    return {f"{name}.safetensors": tensors, f"{name}.json": index_bytes(_ranges(tensors, own.slots))}


def read_weights(shards: RowShards, own: OwnedState) -> dict[str, Tensor]:
    """The saved weights of the rows that this worker owns now. UserError: they are another model's."""
    return _unnamed(_read_rows(shards, _named(own.weights), own.slots))


def read_optimizer(shards: RowShards, own: OwnedState) -> dict[str, Tensor]:
    """The same of the optimizer's state."""
    return _read_rows(shards, own.optimizer, own.slots)


def own_weights(whole: Mapping[str, Tensor], own: OwnedState) -> dict[str, Tensor]:
    """The rows that this worker owns of a one-worker checkpoint's weights."""
    return _unnamed(_own_rows(_named(whole), _named(own.weights), own.slots))


def own_optimizer(whole: Mapping[str, Tensor], own: OwnedState) -> Mapping[str, Tensor]:
    """The same of the optimizer's state. What does not fit is left for the optimizer to refuse."""
    return whole if own.share.count == 1 else _own_rows(whole, own.optimizer, own.slots)


def _named(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {WEIGHT + name: tensor for name, tensor in weights.items()}


def _unnamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items()}


def _read_rows(shards: RowShards, own: Mapping[str, Tensor], slots: Iterable[OwnedRows]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, one in _ranges(own, slots).items():
        saved = shards.ranges.get(name)
        if saved is None or saved.shape != one.shape:
            there = "is missing" if saved is None else f"is {list(saved.shape)}, not {list(one.shape)}"
            raise UserError(
                f"state of another model or optimizer in '{shards.folder}': '{name}' {there}; resume with the recipe"
                f" that the checkpoint was written by"
            )
        found[name] = shards.rows(name, one.start, one.start + own[name].shape[0] if one.shape else None)
    return found


def _own_rows(whole: Mapping[str, Tensor], own: Mapping[str, Tensor], slots: Iterable[OwnedRows]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, one in _ranges(own, slots).items():
        if name in whole:
            fits = one.shape and tuple(whole[name].shape) == one.shape
            found[name] = whole[name][one.start : one.start + own[name].shape[0]] if fits else whole[name]
    return found


def _ranges(tensors: Mapping[str, Tensor], slots: Iterable[OwnedRows]) -> dict[str, RowRange]:
    """Which rows these tensors of owned rows are."""
    by_name = {slot.name: slot for slot in slots}
    ranges: dict[str, RowRange] = {}
    for name, tensor in tensors.items():
        kind, _, parameter = name.partition("/")
        dtype = FORMATS[tensor.dtype]
        if not parameter or tensor.dim() == 0:
            ranges[name] = RowRange(0, tuple(tensor.shape), dtype)
            continue
        slot = by_name[parameter]
        whole = tuple(slot.parameter.shape)
        elements = slot.parameter.numel()
        if kind.endswith("_exponents"):
            assert slot.first % STATE_BLOCK == 0, f"{name}: rows cut a block of states"
            ranges[name] = RowRange(slot.first // STATE_BLOCK, (-(-elements // STATE_BLOCK),), dtype)
        else:
            ranges[name] = RowRange(slot.first // max(elements // whole[0], 1), whole, dtype)
    return ranges
