"""The state of a worker that owns some rows of each parameter, as files of a checkpoint, and back.

    weight/<parameter>                        the owned rows
    exp_avg/<parameter>, exp_avg_sq/...       the same rows
    master/<parameter>                        the same rows, where the optimizer has its own
    exp_avg_exponents/<parameter>, ...        of 8-bit moments: one for each 128 elements of the owned rows
    step_count                                in every file, and equal

models/row_shards.py names and reads the files. A worker reads the rows that it owns now. As many workers may have
written them, another number, or one, whose checkpoint has each tensor whole. Files count rows of the whole model, also
where tensor-parallel workers have parts of it (models/tensor_rows.py).

**Shared loading.** Loads one model on several workers, each of which reads and quantises some of its rows.

    a matrix     each worker reads the rows that it owns (trainer/shards.py), and quantises them if it is FP8; all then
                 gather codes and scales from their owners, or BF16 rows, as after an update (trainer/shared_weights.py)
    a vector     every worker reads all of it: norms, biases

Owned rows are whole blocks of the FP8 scales, so codes and scales have the bits that one worker computes. A worker that
updates a weight keeps its rows in BF16. Of a weight that nobody updates it keeps the codes alone.

Workers that train nothing load together too, and then end their connection. One worker alone reads the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from octetrl.kernels.optimizer.adamw import STATE_BLOCK
from octetrl.layers.many_linears import adopt_codes
from octetrl.layers.weight_memory import LoadCount, Loading
from octetrl.models.decoder import Decoder
from octetrl.models.row_shards import STEM, WEIGHT, RowRange, RowShards, file_stem, index_bytes
from octetrl.models.tensor_rows import CutRows, RowPiece, pieces_of
from octetrl.system.errors import UserError
from octetrl.trainer.optimizer import owned_rows
from octetrl.trainer.peers import Peers, PeersLost
from octetrl.trainer.shards import Cut, Rows, Share
from octetrl.trainer.shared_weights import cuts_of_codes, units_of
from octetrl.trainer.state_writer import FORMATS, Content


class OwnedRows(Protocol):
    """What is asked of an optimizer's slot."""

    @property
    def name(self) -> str: ...

    @property
    def parameter(self) -> Tensor:
        """The whole parameter, or this worker's part of it; its memory may be freed."""

    @property
    def first(self) -> int:
        """Number of the first owned element in the whole parameter."""


@dataclass(frozen=True, slots=True)
class OwnedState:
    """What one worker owns of a model that is trained. Live tensors, of the rows of `slots`.

    `share`: among the workers that own all rows of all parts of the model together. `writes` false: a worker of
    another group owns the same rows, and saves them. `cut`: parameters of which the model has some rows.
    `writes_uncut` false: another worker that has a part of its model writes all others.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    slots: Sequence[OwnedRows]
    share: Share
    writes: bool = True
    cut: Mapping[str, CutRows] = field(default_factory=dict)
    writes_uncut: bool = True
    untrained: Mapping[str, Tensor] = field(default_factory=dict)  # whole on every worker; the first one saves them


def shard_files(own: OwnedState, stem: str = STEM, *, with_weights: bool = True) -> dict[str, Content]:
    """The two files of one worker: its tensors, live, and the index of their rows. None if another writes the same."""
    if not own.writes:
        return {}
    tensors = {**(_named(own.weights) if with_weights else {}), **own.optimizer}
    parts: dict[str, Tensor] = {}
    ranges: dict[str, RowRange] = {}
    for name, place in _places(tensors, own).items():
        if not (own.writes_uncut or place.is_cut or not place.shape):
            continue
        for number, piece in enumerate(place.pieces):
            stored = f"{name}#{number}" if number else name
            rows = tensors[name] if len(place.pieces) == 1 else _rows(tensors[name], piece.start, piece.rows)
            parts[stored] = rows
            of = name if number else None
            ranges[stored] = RowRange(piece.whole, place.shape, FORMATS[rows.dtype], of)
    if with_weights and own.share.rank == 0:
        whole = _named(own.untrained)
        parts |= whole
        ranges |= {name: RowRange(0, tuple(one.shape), FORMATS[one.dtype]) for name, one in whole.items()}
    name = file_stem(own.share.rank, own.share.count, stem)
    return {f"{name}.safetensors": parts, f"{name}.json": index_bytes(ranges)}


def read_untrained(shards: RowShards, own: OwnedState) -> None:
    """Copies the saved values of `own.untrained` into them. UserError: they are another model's."""
    for name, tensor in own.untrained.items():
        saved = shards.ranges.get(WEIGHT + name)
        if saved is None or saved.shape != tuple(tensor.shape):
            raise UserError(
                f"state of another model in '{shards.folder}': it has no '{name}' of {list(tensor.shape)}; resume with"
                f" the recipe that the checkpoint was written by"
            )
        tensor.copy_(shards.rows(WEIGHT + name))


def read_weights(shards: RowShards, own: OwnedState) -> dict[str, Tensor]:
    """The saved weights of the rows that this worker owns now. UserError: they are another model's."""
    return _unnamed(_read_rows(shards, _named(own.weights), own))


def read_optimizer(shards: RowShards, own: OwnedState) -> dict[str, Tensor]:
    """The same of the optimizer's state."""
    return _read_rows(shards, own.optimizer, own)


def own_weights(whole: Mapping[str, Tensor], own: OwnedState) -> dict[str, Tensor]:
    """The rows that this worker owns of a one-worker checkpoint's weights."""
    return _unnamed(_own_rows(_named(whole), _named(own.weights), own))


def own_optimizer(whole: Mapping[str, Tensor], own: OwnedState) -> Mapping[str, Tensor]:
    """The same of the optimizer's state. What does not fit is left for the optimizer to refuse."""
    return whole if own.share.count == 1 else _own_rows(whole, own.optimizer, own)


def _named(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {WEIGHT + name: tensor for name, tensor in weights.items()}


def _unnamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items()}


def _rows(tensor: Tensor, start: int, rows: int) -> Tensor:
    return tensor[start : start + rows]


def _read_rows(shards: RowShards, tensors: Mapping[str, Tensor], own: OwnedState) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, place in _places(tensors, own).items():
        saved = shards.ranges.get(name)
        if saved is None or saved.shape != place.shape:
            there = "is missing" if saved is None else f"is {list(saved.shape)}, not {list(place.shape)}"
            raise UserError(
                f"state of another model or optimizer in '{shards.folder}': '{name}' {there}; resume with the recipe"
                f" that the checkpoint was written by"
            )
        if not place.shape:
            found[name] = shards.rows(name)
        else:
            found[name] = _joined([shards.rows(name, one.whole, one.whole + one.rows) for one in place.pieces])
    return found


def _own_rows(whole: Mapping[str, Tensor], tensors: Mapping[str, Tensor], own: OwnedState) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, place in _places(tensors, own).items():
        if name in whole:
            fits = place.shape and tuple(whole[name].shape) == place.shape
            rows = [_rows(whole[name], one.whole, one.rows) for one in place.pieces] if fits else [whole[name]]
            found[name] = _joined(rows)
    return found


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class _Place(NamedTuple):
    """Where the rows of an owned tensor lie in the whole tensor of `shape`. Pieces are in units of its first axis."""

    shape: tuple[int, ...]
    pieces: Sequence[RowPiece]
    is_cut: bool


def _places(tensors: Mapping[str, Tensor], own: OwnedState) -> dict[str, _Place]:
    by_name = {slot.name: slot for slot in own.slots}
    places: dict[str, _Place] = {}
    for name, tensor in tensors.items():
        kind, _, parameter = name.partition("/")
        if not parameter or tensor.dim() == 0:
            places[name] = _Place(tuple(tensor.shape), (RowPiece(0, 0, 1),), is_cut=False)
            continue
        slot, cut = by_name[parameter], own.cut.get(parameter)
        part = tuple(slot.parameter.shape)
        width = max(slot.parameter.numel() // part[0], 1)
        whole = part if cut is None else (cut.whole_rows, *part[1:])
        if not kind.endswith("_exponents"):
            first = slot.first // width
            pieces = _from(first, pieces_of(cut, first, first + tensor.shape[0]))
            places[name] = _Place(whole, pieces, cut is not None)
            continue
        assert slot.first % STATE_BLOCK == 0, f"{name}: rows cut a block of states"
        first, elements = slot.first // STATE_BLOCK, whole[0] * width
        blocks: Sequence[RowPiece] = (RowPiece(first, first, tensor.shape[0]),)
        if cut is not None:  # its pieces begin and end at multiples of a block
            start = slot.first // width
            rows = pieces_of(cut, start, start + tensor.shape[0] * STATE_BLOCK // width)
            blocks = [RowPiece(*(number * width // STATE_BLOCK for number in _numbers(one))) for one in rows]
        places[name] = _Place((-(-elements // STATE_BLOCK),), _from(first, blocks), cut is not None)
    return places


def _numbers(piece: RowPiece) -> tuple[int, int, int]:
    return piece.start, piece.whole, piece.rows


def _from(first: int, pieces: Sequence[RowPiece]) -> list[RowPiece]:
    """With `start` counted from row `first` of the part, where the owned rows begin."""
    return [RowPiece(one.start - first, one.whole, one.rows) for one in pieces]


PHASE = "load"

Load = Callable[[Decoder, Loading], None]


def load_shared(model: Decoder, peers: Peers, load: Load, count: LoadCount | None = None) -> None:
    """Fills `model` on all workers, which call this together. `load` fills the rows that it is given; filling more is
    allowed. `count` is added to.

    UserError, on all workers, is the first that `load` raised on any of them. Any other error is raised where it
    happened; the other workers raise PeersLost with its text.
    """
    began = time.perf_counter()
    table = _rows_to_share(model, peers)
    rows = {name: (own[peers.owners.rank].start, own[peers.owners.rank].stop) for name, own in table.items()}
    loading = Loading(rows, count or LoadCount())
    error: str | None = None
    failure: Exception | None = None
    try:
        load(model, loading)
    except UserError as found:
        error = str(found)
    except Exception as found:  # the others must not wait for this worker
        failure = found
    error = peers.agree(error, PHASE)
    text = None if failure is None else f"a worker failed in loading: {type(failure).__name__}: {failure}"
    told = peers.agree(text, PHASE)
    if failure is not None:
        raise failure
    if told is not None:
        raise PeersLost(told)
    if error is not None:
        raise UserError(error)
    _gather(model, table, peers)
    loading.count.seconds += time.perf_counter() - began


def _rows_to_share(model: Decoder, peers: Peers) -> dict[str, tuple[Rows, ...]]:
    """The rows of each worker of all matrices. Those of a trained one are the rows that the worker updates."""
    count = peers.owners.count
    if count == 1:
        return {}
    linears = {f"{name}.weight": linear for name, linear in model.float8_linears() if linear.weight is not None}
    units, trained = units_of(linears), dict(model.trained_parameters())
    frozen = {name: one for name, one in model.named_parameters() if name not in trained and ".lora." not in name}
    table = owned_rows(trained, count, units) | (owned_rows(frozen, count, units) if frozen else {})
    whole = {name for name, linear in linears.items() if linear.has_weight}  # quantised whole, at the end of loading
    return {name: table[name] for name in _matrices(model) if name not in whole}


def _matrices(model: Decoder) -> Mapping[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if one.dim() > 1 and ".lora." not in name}


def _gather(model: Decoder, table: Mapping[str, tuple[Rows, ...]], peers: Peers) -> None:
    if not table:
        return
    matrices = _matrices(model)
    linears = {f"{name}.weight": linear for name, linear in model.float8_linears() if f"{name}.weight" in table}
    cuts: list[Cut] = []
    for name, rows in table.items():
        cuts += cuts_of_codes(linears[name], rows) if name in linears else [Cut(matrices[name].detach(), rows)]
    peers.gather_from_owners(cuts, PHASE)
    adopt_codes(linears.values())
