"""Which rows of the whole model's parameters a tensor-parallel worker has (shapes/tensor_cut.py).

A fused parameter has a range of rows of each of its parts: of q, of k and of v. Its rows on a worker are therefore
several ranges of the whole parameter. Loading, drawing, adapters and checkpoints use this one table. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from octetrl.config.lora import lora_parts
from octetrl.config.schema import LoraConfig
from octetrl.shapes.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Rows `start` to `start + rows` of a worker's parameter, which are rows `whole` to `whole + rows` of the whole."""

    start: int
    whole: int
    rows: int


@dataclass(frozen=True, slots=True)
class CutRows:
    """The pieces of one parameter, in order, and the number of rows of the whole parameter."""

    pieces: tuple[RowPiece, ...]
    whole_rows: int

    def within(self, start: int, stop: int) -> Iterator[RowPiece]:
        """The pieces of the worker's rows `start` to `stop`."""
        for piece in self.pieces:
            first, last = max(start, piece.start), min(stop, piece.start + piece.rows)
            if first < last:
                yield RowPiece(first, piece.whole + first - piece.start, last - first)


def cut_rows_of(spec: ModelSpec, lora: LoraConfig | None = None) -> Mapping[str, CutRows]:
    """The rows of this part of a model, by parameter. A parameter without an entry is whole on every worker."""
    cut = spec.tensor
    if cut.size == 1:
        return {}
    own = cut.vocabulary(spec.vocab_size)
    vocabulary = CutRows((RowPiece(0, own.start, len(own)),), spec.vocab_size)
    found = {"embedding.weight": vocabulary}
    for name, linear in spec.linears():
        rows = _equal_parts((part.rows for part in linear.parts), cut.rank, cut.size)
        found[f"{name}.weight"] = rows
        if linear.bias:
            found[f"{name}.bias"] = rows
        adapted = () if lora is None else lora_parts(linear, lora)
        if adapted:
            found[f"{name}.lora.b"] = _equal_parts((part.stop - part.start for part in adapted), cut.rank, cut.size)
    if not spec.tied_embeddings:
        found["lm_head.weight"] = vocabulary
    return found


def _equal_parts(parts: Iterable[int], rank: int, size: int) -> CutRows:
    """`parts`: rows that every worker has of each part."""
    pieces: list[RowPiece] = []
    start = 0
    for rows in parts:
        pieces.append(RowPiece(start, start * size + rank * rows, rows))
        start += rows
    return CutRows(tuple(pieces), start * size)


def pieces_of(rows: CutRows | None, start: int, stop: int) -> Sequence[RowPiece]:
    """The pieces of a parameter's rows `start` to `stop`. `rows` None: the parameter is whole."""
    return (RowPiece(start, start, stop - start),) if rows is None else tuple(rows.within(start, stop))
