"""Captures of decode on a GPU, and what may go on beside them in the process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from octetrl.engine.forward_graphs import ForwardGraphs
from octetrl.engine.kv_cache import KVCache

pytestmark = pytest.mark.gpu

CACHE = cast("KVCache", object())  # only its identity counts here


def replayed_beside(what: Callable[[], None]) -> Tensor:
    """What a graph gives whose capture had `what` done in the midst of it."""
    x = torch.arange(1000.0, device="cuda")

    def decode(size: int, draws: bool, filters: bool, cache: KVCache) -> Tensor:
        doubled = 2 * x
        if torch.cuda.is_current_stream_capturing():
            what()
        return doubled + size

    graphs = ForwardGraphs(torch.device("cuda"))
    graphs.run(decode, 3, True, False, CACHE)
    x.add_(1)
    return graphs.run(decode, 3, True, False, CACHE) - 2 * x


def test_garbage_that_holds_graphs_waits_for_the_capture() -> None:
    given_up = ForwardGraphs(torch.device("cuda"))
    given_up.run(lambda size, *_: torch.ones(size, device="cuda"), 2, True, False, CACHE)
    held = [given_up]
    del given_up

    def give_up() -> None:
        cycle: list[object] = [held.pop()]
        cycle.append(cycle)
        del cycle
        assert len([[] for _ in range(100_000)]) == 100_000  # enough to make Python look for garbage

    assert (replayed_beside(give_up) == 3).all() and not held
    assert gc.isenabled()


def test_another_thread_may_take_memory_meanwhile() -> None:
    taken: list[int] = []

    def take() -> None:
        taken.append(torch.ones(1 << 26, device="cuda").nbytes)

    def beside() -> None:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    assert (replayed_beside(beside) == 3).all() and taken


def test_an_exception_in_a_capture_leaves_python_collecting() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replayed_beside(fail)
    assert gc.isenabled()
    assert (replayed_beside(lambda: None) == 3).all()
