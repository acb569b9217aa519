"""What workers exchange, against the same computed in one place."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.kernels.rows.gather_from_peers import PROGRAMS, inbox_words
from octetrl.trainer import tensor_peers as module
from octetrl.trainer.peers import Alone, Peers, PeersLost, ProcessGroupPeers, join_store
from octetrl.trainer.shards import Cut, Rows, buckets, cut_rows
from tests.team import run_team

SHAPES = ((300, 7), (5,), (1100, 3), (128, 2), (768, 5))  # the last is even on 2 and on 3 workers


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def test_buckets_have_every_row_once_and_a_limit() -> None:
    cuts = [Cut(one, rows) for one, rows in zip(tensors(0), cut_rows(SHAPES, 3), strict=True)]
    for limit in (1, 2000, 1 << 20):
        seen = [torch.zeros(shape, dtype=torch.int64) for shape in SHAPES]
        of = {cut.tensor.data_ptr(): one for cut, one in zip(cuts, seen, strict=True)}
        for bucket in buckets(cuts, limit):
            parts = [cut.part(rank) for cut in bucket for rank in range(3)]
            assert sum(part.numel() for part in parts) <= max(limit, 3 * 128 * 7)
            for cut in bucket:
                for rows in cut.rows:
                    rows.of(of[cut.tensor.data_ptr()]).add_(1)
        assert all(bool((one == 1).all()) for one in seen)


@pytest.mark.parametrize(("count", "owners"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("in_place_from", [0, 1 << 20])
def test_sums_go_to_owners_and_their_rows_to_everybody(count: int, owners: int, in_place_from: int) -> None:
    table = cut_rows(SHAPES, owners)

    def work(peers: Peers) -> tuple[list[Tensor], list[Tensor]]:
        given = tensors(peers.share.rank)
        sums: list[list[Tensor]] = [[] for _ in SHAPES]
        names = {one.data_ptr(): number for number, one in enumerate(given)}
        for bucket in buckets([Cut(*cut) for cut in zip(given, table, strict=True)], 2000):
            for cut, part in zip(bucket, peers.sum_to_owners(bucket, "sums"), strict=True):
                sums[names[cut.tensor.data_ptr()]].append(part.clone())
        mine = [torch.full_like(one, torch.nan, dtype=torch.bfloat16) for one in given]
        for whole, rows, parts in zip(mine, table, sums, strict=True):
            rows[peers.owners.rank].of(whole).copy_(torch.cat(parts))
        versions = [one._version for one in (mine[0], mine[-1])]
        assert isinstance(peers, ProcessGroupPeers)
        peers.bucket_elements, peers.in_place_from = 2000, in_place_from  # several exchanges
        peers.gather_from_owners([Cut(*cut) for cut in zip(mine, table, strict=True)], "rows")
        assert mine[0]._version > versions[0] and mine[-1]._version > versions[1]  # autograd can tell
        return [torch.cat(parts) for parts in sums], mine

    results = run_team(count, work, owners=owners)
    exact = [sum(parts) for parts in zip(*(tensors(rank) for rank in range(count)), strict=True)]
    for number, want in enumerate(exact):
        together = torch.cat([sums[number] for sums, _ in results[:owners]])
        torch.testing.assert_close(together, want, rtol=1e-6, atol=1e-6)
        for _, gathered in results:
            assert torch.equal(gathered[number], together.bfloat16())
    for rank, (again, _) in enumerate(run_team(count, work, owners=owners)):
        assert all(map(torch.equal, results[rank % owners][0], again))  # other groups have the bits of the first


def test_an_even_cut_is_shared_equally_and_in_the_order_of_ranks() -> None:
    whole = torch.zeros(6, 2)
    assert Cut(whole, (Rows(0, 3), Rows(3, 6))).is_even and Cut(whole, (Rows(0, 6),)).is_even
    for rows in (
        (Rows(0, 4), Rows(4, 6)),
        (Rows(3, 6), Rows(0, 3)),
        (Rows(0, 2), Rows(2, 4)),
        (Rows(0, 3), Rows(3, 5)),
    ):
        assert not Cut(whole, rows).is_even


def test_small_things_are_combined_in_the_order_of_ranks() -> None:
    def work(peers: Peers) -> tuple[object, ...]:
        rank = peers.share.rank
        return (
            peers.sum(torch.tensor([1.0, 1e-9 * rank]), "sum").tolist(),
            peers.maximum(torch.tensor([float(rank), -1.0, torch.nan if rank == 1 else 0.0]), "amax").tolist()[:2],
            bool(peers.maximum(torch.tensor([torch.nan if rank == 1 else 0.0]), "amax").isnan()),
            [one.tolist() for one in peers.gather(torch.arange(rank), "tokens")],
            peers.gather_records({"rank": rank, "x": 0.1}, "records"),
            peers.agree("broken" if rank == 2 else None, "check"),
            peers.agree(None, "check"),
            peers.agree(f"broken {rank}" if rank else None, "check"),
        )

    records = [{"rank": rank, "x": 0.1} for rank in range(3)]
    (sums, *first), *others = run_team(3, work)
    assert sums == pytest.approx([3.0, 3e-9])
    assert first == [[2.0, -1.0], True, [[], [0], [0, 1]], records, "broken", None, "broken 1"]
    assert all([sums, *first] == list(other) for other in others)
    assert work(Alone())[3:] == ([[]], records[:1], None, None, None)


def test_a_worker_that_stalls_is_an_error_that_names_phase_and_seconds() -> None:
    has_failed = threading.Event()

    def work(peers: Peers) -> str:
        peers.sum(torch.ones(1), "warm-up")
        assert isinstance(peers, ProcessGroupPeers)
        peers._deadline_seconds = 0.5  # only now: a busy machine takes long to connect
        if peers.share.rank == 1:
            assert has_failed.wait(60.0)  # it stalls for as long as it takes
            return ""
        with pytest.raises(PeersLost) as error:
            peers.gather_from_owners([Cut(torch.zeros(256, 2), (Rows(0, 128), Rows(128, 256)))], "new weights")
        has_failed.set()
        return str(error.value)

    message, _ = run_team(2, work)
    assert "worker 0 of 2, phase 'new weights': no answer" in message and "0.5 s" in message
    with pytest.raises(PeersLost, match=r"no worker serves 127\.0\.0\.1:1 "):
        join_store("127.0.0.1:1", deadline_seconds=0.2)


@pytest.mark.parametrize("count", [2, 3])
def test_the_speed_of_the_link_counts_what_a_worker_receives(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(0 < speed < 1000 for speed in run_team(count, lambda peers: peers.link_speed()))
    assert Alone().link_speed() == 0.0
    taken = {rank: iter([1.0, 0.5, 2.0, 0.7]) for rank in range(count)}  # seconds; the fastest counts
    exchanges: list[str] = []

    def seconds_of(peers: ProcessGroupPeers, start: object, phase: str) -> float:
        exchanges.append(phase)
        return next(taken[peers.share.rank])

    monkeypatch.setattr(ProcessGroupPeers, "_seconds_of", seconds_of)
    (speed, *_) = run_team(count, lambda peers: peers.link_speed())
    assert speed == pytest.approx(2 * (8 << 20) * (count - 1) / count / 1e9, rel=1e-6)
    assert exchanges == ["link"] * 4 * count


def test_a_worker_that_does_not_answer_ends_the_measurement_of_the_link() -> None:
    def work(peers: Peers) -> None:
        assert isinstance(peers, ProcessGroupPeers)
        peers._deadline_seconds = 0.5
        if peers.share.rank == 0:
            with pytest.raises(PeersLost, match="phase 'link'"):
                peers.link_speed()

    run_team(2, work)


# ---------------------------------------------------------------- memory of other GPUs


COUNT = 2


@pytest.fixture
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


@pytest.mark.usefixtures("without_cuda")
def test_all_workers_have_it() -> None:
    for rank, (found, why) in enumerate(opened()):
        assert why == "" and (found.memory.rank, found.memory.count) == (rank, COUNT)
        assert found.memory.polls == module.polls_of(5.0) and found.memory.flags.numel() == PROGRAMS * COUNT
        assert found.memory.inbox_P[rank] == found.memory.inbox.data_ptr()
        assert found.memory.flags_P[rank] == found.memory.flags.data_ptr()


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("name", ["_handle_of", "_open"])
def test_a_refusal_of_cuda_is_one_line_on_all_workers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, refused)
    assert opened() == [(None, "a GPU's memory cannot be opened on another: no peer access")] * COUNT


@pytest.mark.usefixtures("without_cuda")
def test_a_trial_that_fails_on_one_worker_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_passes", lambda memory: memory.rank == 0)
    assert opened() == [(None, "a trial over the GPUs' memory failed")] * COUNT


@pytest.mark.usefixtures("without_cuda")
def test_several_hosts_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(("one", "other"))
    monkeypatch.setattr(module, "_host", lambda: next(hosts))
    assert opened() == [(None, "the workers are on several hosts")] * COUNT
