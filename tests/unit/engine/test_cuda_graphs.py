"""Which sizes of decode batch are captured. The graphs themselves are under test on a GPU (test_rollout_forward.py)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octetrl.engine.cuda_graphs import padded_batch


@given(st.integers(1, 512), st.integers(0, 512))
def test_a_batch_fits_and_is_padded_by_less_than_a_step(num_sequences: int, more: int) -> None:
    size = padded_batch(num_sequences, max_batch=num_sequences + more)
    assert num_sequences <= size <= num_sequences + more
    assert size - num_sequences < max(16, num_sequences / 4 + 1)


def test_few_sizes_serve_all_batches() -> None:
    assert sorted({padded_batch(n, 256) for n in range(1, 257)}) == [
        1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256,
    ]  # fmt: skip
    assert padded_batch(3, max_batch=3) == 3
