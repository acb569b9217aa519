"""What holds for tests on a GPU: where several workers share one, none takes more than twice its share of the memory.

A third of the memory is allowed in any case: the largest tests take 30 GB. A test that asks for more (an engine whose
cache is sized by what is free, say) fails itself, instead of a neighbour. What a file of tests leaves to PyTorch's
allocator goes back after it: one process was seen to hold 41 GB while two neighbours failed for want of 3.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.gpu_order import sharing


@pytest.fixture(scope="session", autouse=True)
def a_share_of_the_memory() -> None:
    import torch

    workers = sharing(os.environ)
    if torch.cuda.is_available() and workers > 2:
        torch.cuda.set_per_process_memory_fraction(max(2 / workers, 1 / 3))


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
