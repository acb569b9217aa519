"""Into how many parts a model can be cut for tensor-parallel workers, and which part is the largest. No torch.

What a part is stands in shapes/tensor_cut.py, and `ModelSpec.cut` gives its shape.
"""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.shapes.spec import ModelSpec
from octetrl.shapes.tensor_cut import CUT_ROWS, VOCAB_CHUNK, WHOLE_MODEL, TensorCut

SHARING = (2, 4, 8)  # numbers of workers that may train on one micro-batch together
MOST_WORKERS = 64  # largest tensor-parallel group that `allowed_sizes` tries


def why_not_cut(spec: ModelSpec, size: int) -> str | None:
    """Say what of this model `size` workers cannot share. None: the model can be cut so."""
    if size == 1:
        return None
    if not all(block.can_be_cut for block in spec.distinct_blocks):
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


def why_not_shared(spec: ModelSpec, size: int) -> str | None:
    """Say why `size` workers cannot train on one micro-batch together, each with all its tokens of some heads. None:
    they can."""
    if any(block.is_whole_layer or block.state_bytes(spec, 2, 1) for block in spec.distinct_blocks):
        return f"the blocks of {spec.family} need all tokens on one worker"
    if spec.num_heads % size or (spec.num_kv_heads % size and size % spec.num_kv_heads):
        return f"the model's {spec.num_heads} heads and {spec.num_kv_heads} KV heads do not divide among {size} workers"
    return None


def sharing_sizes(spec: ModelSpec) -> tuple[int, ...]:
    """The numbers of workers that can train on one micro-batch of this model together, ascending."""
    return tuple(size for size in SHARING if why_not_shared(spec, size) is None)


def allowed_sizes(spec: ModelSpec) -> Iterator[int]:
    """Yield the numbers of workers that can share this model."""
    return (size for size in range(1, MOST_WORKERS + 1) if why_not_cut(spec, size) is None)


def largest_cut(spec: ModelSpec, size: int) -> TensorCut:
    """The part with the most rows of the vocabulary, for estimates; the whole model if it cannot be cut so."""
    if why_not_cut(spec, size) is not None:
        return WHOLE_MODEL
    parts = (TensorCut(rank, size) for rank in range(size))
    return max(parts, key=lambda part: len(part.vocabulary(spec.vocab_size)))
