"""Opening the memory of other GPUs: what fails on one worker is given up by all. CUDA's calls are replaced; the real
ones are in tests/gpu/test_tensor_parallel.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from octetrl.kernels.rows.gather_from_peers import PROGRAMS, inbox_words
from octetrl.trainer import peers as module
from tests.team import run_team

COUNT = 2


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(module, "_handle_of", lambda _: [1])
    monkeypatch.setattr(module, "_open", lambda *_: torch.zeros(inbox_words(COUNT) + PROGRAMS * COUNT).int())
    monkeypatch.setattr(module, "_passes", lambda _: True)


def opened() -> list[tuple[Any, str]]:
    """On both workers."""
    return run_team(COUNT, lambda peers: module.open_peer_memory(peers, torch.device("cpu"), 5.0))


def refused(*_: object) -> Any:
    raise RuntimeError("no peer access\nfurther lines")


def test_all_workers_have_it() -> None:
    for rank, (found, why) in enumerate(opened()):
        assert why == "" and (found.memory.rank, found.memory.count) == (rank, COUNT)
        assert found.memory.polls == module.polls_of(5.0) and found.memory.flags.numel() == PROGRAMS * COUNT
        assert found.memory.inbox_P[rank] == found.memory.inbox.data_ptr()
        assert found.memory.flags_P[rank] == found.memory.flags.data_ptr()


@pytest.mark.parametrize("name", ["_handle_of", "_open"])
def test_a_refusal_of_cuda_is_one_line_on_all_workers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, refused)
    assert opened() == [(None, "a GPU's memory cannot be opened on another: no peer access")] * COUNT


def test_a_trial_that_fails_on_one_worker_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_passes", lambda memory: memory.rank == 0)
    assert opened() == [(None, "a trial over the GPUs' memory failed")] * COUNT


def test_several_hosts_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(("one", "other"))
    monkeypatch.setattr(module, "_host", lambda: next(hosts))
    assert opened() == [(None, "the workers are on several hosts")] * COUNT
