"""Memory of an FP8 weight that its linear does not keep whole.

Forward and dgrad read codes, so only an update needs the weight. Three cases:

    whole       one worker updates all rows
    own rows    one of several workers keeps the rows that it updates (trainer/shards.py), in `Float8Linear.own_rows`
    none        nobody updates the weight: its linear is frozen, or the model does not train

In the last two the parameter keeps its shape, and its memory is freed. `filling` gives it memory for the time in which
one weight is written. The weight is then quantised whole, its own rows are copied, and the memory is freed again. A
model is loaded so with at most one whole weight at a time, to the same codes.

R own rows, K in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from octetrl.layers.linear import Float8Linear
from octetrl.layers.own_rows import OwnRows


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


def filling(model: nn.Module) -> Callable[[str], AbstractContextManager[None]]:
    """For the name of a parameter: a context in which all its rows are written. Afterwards a weight without memory of
    its own is codes, scales and own rows. Raises NonFiniteError naming a weight that is not finite, on a CPU only."""
    linears = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear) and module.weight is not None and not module.has_weight
    }

    def fill(name: str) -> AbstractContextManager[None]:
        return _filled(linears[name], name) if name in linears else nullcontext()

    return fill


@contextmanager
@torch.no_grad()
def _filled(linear: Float8Linear, name: str) -> Iterator[None]:
    weight = linear.weight
    assert weight is not None
    memory = weight.untyped_storage()
    memory.resize_(weight.numel() * weight.element_size())
    try:
        yield
        linear.requantize(name, check=False)
        if linear.own_rows is not None:
            first, rows_RK = linear.own_rows
            rows_RK.copy_(weight[first : first + len(rows_RK)])
    finally:
        memory.resize_(0)
