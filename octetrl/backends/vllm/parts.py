"""Which part of a parameter a rank of a tensor-parallel vLLM holds, made from the rows that the workers have.

    q, k, v, gate, up      rows: vLLM's rank and our worker have the same ones, so nothing travels
    o_proj, down_proj      our worker has rows [R / T, C], vLLM's rank columns [R, C / T]: an exchange of blocks
    their biases           whole on vLLM's ranks: gathered
    embedding, lm_head     rows of equal ranges of the padded vocabulary; ours are whole chunks (shapes/tensor_cut.py)
    norms                  whole on both sides

Codes and scales are moved, never made: columns are cut at multiples of 128, whole blocks of a scale (`why_not_cut`).
An exchange takes at most `BUCKET_BYTES`, so that no tensor is there twice as a whole.

T ranks, R rows and C columns of the whole parameter, n rows of one exchange, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from octetrl.backends.vllm.ranks import Ranks
from octetrl.config.backends import padded_vocabulary
from octetrl.shapes.spec import ModelSpec

BUCKET_BYTES = 1 << 26
VOCABULARY = ("embedding.weight", "lm_head.weight")


class VllmParts:
    """`spec`: of the part of the model that this worker has. `ranks` None: both sides have it whole."""

    def __init__(self, spec: ModelSpec, ranks: Ranks | None) -> None:
        self._spec, self._ranks = spec, ranks
        self._joined = {name for name, linear in spec.linears() if linear.joins}
        size, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
        self._size = size
        self.vocabulary_rows = padded_vocabulary(spec.vocab_size) // size  # of vLLM's parameter
        first, last = (min(at * self.vocabulary_rows, spec.vocab_size) for at in (rank, rank + 1))
        self.vocabulary = range(first, last)  # those that are no padding

    def shape(self, name: str, ours: Sequence[int]) -> tuple[int, ...]:
        """Of vLLM's parameter, without padding. `name`: of ours, or `LINEAR.scale`. `ours`: the shape of our part."""
        rows, *columns = ours
        if name in VOCABULARY:
            return (len(self.vocabulary), *columns)
        if self._is_joined(name):
            return (rows * self._size, *(width // self._size for width in columns))
        return tuple(ours)

    def pieces(self, name: str, ours: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield what rows of vLLM's parameter must hold, and the first of these rows.

        All ranks iterate together, to the end. Each piece is valid until the next one.
        """
        if self._ranks is None:
            yield 0, ours
        elif name in VOCABULARY:
            yield from self._vocabulary_pieces(self._ranks, ours)
        elif self._is_joined(name) and ours.dim() > 1:
            yield from self._columns(self._ranks, ours)
        elif self._is_joined(name):
            yield 0, self._ranks.stack(ours).flatten(0, 1)
        else:
            yield 0, ours

    def _is_joined(self, name: str) -> bool:
        return self._ranks is not None and name.rpartition(".")[0] in self._joined

    def _columns(self, ranks: Ranks, ours_RC: Tensor) -> Iterator[tuple[int, Tensor]]:
        octets_RB = ours_RC.contiguous().view(torch.uint8)
        rows, width = octets_RB.shape
        most = max(1, BUCKET_BYTES // width)
        for first in range(0, rows, most):
            lot_nB = octets_RB[first : first + most]
            sent = lot_nB.unflatten(1, (ranks.size, -1)).movedim(1, 0).contiguous()
            for rank, taken in enumerate(ranks.exchange(sent)):
                yield rank * rows + first, taken.view(ours_RC.dtype)

    def _vocabulary_pieces(self, ranks: Ranks, ours: Tensor) -> Iterator[tuple[int, Tensor]]:
        cut, own = self._spec.tensor, self.vocabulary
        shares = [cut.vocabulary(self._spec.vocab_size, rank) for rank in range(ranks.size)]
        widest = max(map(len, shares))
        most = max(1, BUCKET_BYTES // (ranks.size * ours.shape[1] * ours.element_size()))
        for first in range(0, widest, most):
            sent = ours.new_zeros(min(most, widest - first), ours.shape[1])
            given = ours[first : first + most]
            sent[: given.shape[0]] = given
            for share, taken in zip(shares, ranks.stack(sent), strict=True):
                start = share.start + first
                low, high = max(start, own.start), min(start + len(sent), share.stop, own.stop)
                if low < high:
                    yield low - own.start, taken[low - start : high - start]
