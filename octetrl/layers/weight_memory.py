"""Memory of an FP8 weight that its linear does not keep whole, and the rows of a model that one worker fills.

Forward and dgrad read codes, so only an update needs the weight. Three cases:

    whole       one worker updates all rows
    own rows    one of several workers keeps the rows that it updates (trainer/shards.py), in `Float8Linear.own_rows`
    none        nobody updates the weight: its linear is frozen, or the model does not train

In the last two the parameter keeps its shape, and its memory is freed. `filling` gives memory to the rows that are
written, quantises them, and frees it again. A model is loaded so with at most one whole weight at a time, to the same
codes. Where several workers load one model, each fills some rows of every weight (`Loading`), and they exchange them
(trainer/sharded_state.py).

R rows, K in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from octetrl.fp8.quantize import Quantized
from octetrl.layers.linear import Float8Linear
from octetrl.layers.own_rows import OwnRows
from octetrl.layers.stacked import Float8StackedLinear


@dataclass(slots=True)
class LoadCount:
    """What a worker did to load models: bytes of tensors read from files, bytes of weights quantised, and seconds."""

    read_bytes: int = 0
    quantized_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Loading:
    """Which rows of a model this worker fills. `rows`: start and stop by parameter; one without an entry is whole."""

    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    count: LoadCount = field(default_factory=LoadCount)

    def rows_of(self, name: str, parameter: Tensor) -> tuple[int, int]:
        return self.rows.get(name, (0, parameter.shape[0]))


def keep_rows(linear: Float8Linear, start: int, stop: int) -> Tensor:
    """Reduces the weight to its rows `start` to `stop`, and returns them [R, K]. A second call changes nothing.

    Their values are those of the weight, or undefined until it is filled.
    """
    weight = linear.weight
    assert weight is not None, "this linear has no weight"
    if linear.own_rows is None:
        own = weight.new_empty(stop - start, linear.in_features)
        if linear.has_weight:
            own.copy_(weight.detach()[start:stop])
        linear.own_rows = OwnRows(start, own)
        weight.untyped_storage().resize_(0)
    first, rows_RK = linear.own_rows
    assert (first, first + len(rows_RK)) == (start, stop), f"rows {first} + {len(rows_RK)} are kept, not {start}:{stop}"
    return rows_RK


def rows_per_unit(linear: Float8Linear) -> int:
    """Rows that can be quantised without the others, because they have scales of their own."""
    return linear.rows_per_unit if isinstance(linear, Float8StackedLinear) else linear.block[0]


def scale_row(linear: Float8Linear, row: int) -> int:
    """The row of the scales at which `row` begins: the first of a block, or the end."""
    return linear.scale_row(row) if isinstance(linear, Float8StackedLinear) else -(-row // linear.block[0])


@torch.no_grad()
def quantize_rows(linear: Float8Linear, first: int, rows_RK: Tensor, name: str) -> None:
    """Quantises rows into their place in the linear's codes and scales. `first`: the first row, which begins a block.

    Raises NonFiniteError naming the weight if it is not finite on a CPU. On a GPU its scales are then NaN.
    """
    linear.quantize(rows_RK, name=name, out=place_of_rows(linear, first, rows_RK))


def place_of_rows(linear: Float8Linear, first: int, rows_RK: Tensor) -> Quantized:
    """The linear's codes and scales of these rows: views. `first`: the first row, which begins a block."""
    assert first % rows_per_unit(linear) == 0, f"row {first} does not begin a block"
    stop = first + rows_RK.shape[0]
    return Quantized(linear.codes[first:stop], linear.scale[scale_row(linear, first) : scale_row(linear, stop)])


def filling(model: nn.Module, loading: Loading | None = None) -> Callable[[str], AbstractContextManager[OwnRows]]:
    """For the name of a parameter: a context in which its rows of `loading` are written, all of them by default. It
    gives these rows. Afterwards a weight without memory of its own is codes, scales and own rows. Raises NonFiniteError
    naming a weight that is not finite, on a CPU only.

    A weight of which only some rows were written has stale codes until its linear's `adopt_codes`.
    """
    loading = loading or Loading()
    parameters = dict(model.named_parameters())
    linears = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear) and module.weight is not None
    }

    def fill(name: str) -> AbstractContextManager[OwnRows]:
        linear = linears.get(name)
        start, stop = loading.rows_of(name, parameters[name])
        if linear is None or linear.has_weight:
            quantized = 0 if linear is None else parameters[name].nbytes
            return _written(OwnRows(start, parameters[name][start:stop]), loading.count, quantized)
        if (start, stop) == (0, len(parameters[name])):
            return _filled(linear, name, loading.count)
        return _rows_filled(linear, name, start, stop, loading.count)

    return fill


@contextmanager
def _written(rows: OwnRows, count: LoadCount, quantized_bytes: int) -> Iterator[OwnRows]:
    yield rows
    count.quantized_bytes += quantized_bytes


@contextmanager
@torch.no_grad()
def _filled(linear: Float8Linear, name: str, count: LoadCount) -> Iterator[OwnRows]:
    weight = linear.weight
    assert weight is not None
    memory = weight.untyped_storage()
    memory.resize_(weight.numel() * weight.element_size())
    try:
        yield OwnRows(0, weight)
        linear.requantize(name, check=False)
        count.quantized_bytes += weight.nbytes
        if linear.own_rows is not None:
            first, rows_RK = linear.own_rows
            rows_RK.copy_(weight[first : first + len(rows_RK)])
    finally:
        memory.resize_(0)


@contextmanager
@torch.no_grad()
def _rows_filled(linear: Float8Linear, name: str, start: int, stop: int, count: LoadCount) -> Iterator[OwnRows]:
    """The linear keeps these rows, or only their codes."""
    weight = linear.weight
    assert weight is not None
    rows_RK = weight.new_empty(stop - start, linear.in_features) if linear.own_rows is None else linear.own_rows.rows_RK
    assert linear.own_rows is None or linear.own_rows.first == start, f"'{name}' keeps other rows than it fills"
    yield OwnRows(start, rows_RK.detach())
    if stop > start:
        quantize_rows(linear, start, rows_RK, name)
    linear.mark_codes_stale()
    count.quantized_bytes += rows_RK.nbytes
