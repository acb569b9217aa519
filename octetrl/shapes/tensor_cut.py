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

from dataclasses import dataclass

CUT_ROWS = 128  # a range of rows is a multiple of it: a block of FP8 scales, and of owned rows (trainer/shards.py)
VOCAB_CHUNK = 4096  # rows of lm_head whose log-sum-exp is one leaf of a log-prob's tree of sums


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
