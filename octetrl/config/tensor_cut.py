"""How a model is cut for tensor parallelism: every worker of a group owns whole rows of every linear. No torch.

    q, k, v, gate, up, o, down    each part's rows in `size` equal ranges, multiples of 128: whole blocks of FP8 scales
    heads, KV cache               the rows of q, k and v are those of whole heads; a query's KV head is on its worker
    embedding, lm_head            whole chunks of VOCAB_CHUNK rows, so that shares may differ by one chunk
    norms, A of an adapter        whole on every worker

No product is split along K, so a log-prob's sums have one order, whatever the number of workers. o_proj and down_proj
join the workers' parts: their input is gathered before the product and their output after it (`LinearLayout.joins`).
A part that is cut at multiples of 128 rows has the codes and scales of the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octetrl.config.spec import ModelSpec

CUT_ROWS = 128  # a range of rows is a multiple of it: a block of FP8 scales, and of owned rows (trainer/shards.py)
VOCAB_CHUNK = 4096  # rows of lm_head whose log-sum-exp is one leaf of a log-prob's tree of sums
MOST_WORKERS = 64  # of one group; `allowed_sizes` tries no more


@dataclass(frozen=True, slots=True)
class TensorCut:
    """The part of worker `rank` of a group of `size`.

    Example: TensorCut(rank=1, size=4)
    """

    rank: int = 0
    size: int = 1

    def vocabulary(self, vocab_size: int, rank: int | None = None) -> range:
        """Rows of embedding and lm_head that worker `rank` of the group owns; None: this worker."""
        rank = self.rank if rank is None else rank
        chunks = -(-vocab_size // VOCAB_CHUNK)
        first, last = (chunks * at // self.size * VOCAB_CHUNK for at in (rank, rank + 1))
        return range(min(first, vocab_size), min(last, vocab_size))


WHOLE_MODEL = TensorCut()


def why_not_cut(spec: ModelSpec, size: int) -> str | None:
    """Say what of this model `size` workers cannot share. None: the model can be cut so."""
    if size == 1:
        return None
    blocks = dict.fromkeys(block for layer in range(spec.num_layers) for block in spec.blocks_of(layer))
    for block in blocks:
        if not block.can_be_cut:
            return f"the blocks of {spec.family} are not cut yet; only attention with KV heads and gated MLPs are"
    if spec.fused_files:
        return f"the fused weights in files of {spec.family} are not cut yet"
    if spec.num_kv_heads % size:
        return f"{size} does not divide the model's {spec.num_kv_heads} KV heads"
    for name, width in spec.linear_sizes().items():
        if width % (CUT_ROWS * size):
            return f"{size} parts of the {name} {width:,} are not multiples of {CUT_ROWS}"
    chunks = -(-spec.vocab_size // VOCAB_CHUNK)
    if chunks < size:
        return f"the vocabulary of {spec.vocab_size:,} has {chunks} chunks of {VOCAB_CHUNK:,}, fewer than {size}"
    return None


def allowed_sizes(spec: ModelSpec) -> Iterator[int]:
    """Yield the numbers of workers that can share this model."""
    return (size for size in range(1, MOST_WORKERS + 1) if why_not_cut(spec, size) is None)


def largest_cut(spec: ModelSpec, size: int) -> TensorCut:
    """The part with the most rows of the vocabulary, for estimates; the whole model if it cannot be cut so."""
    if why_not_cut(spec, size) is not None:
        return WHOLE_MODEL
    parts = (TensorCut(rank, size) for rank in range(size))
    return max(parts, key=lambda part: len(part.vocabulary(spec.vocab_size)))
