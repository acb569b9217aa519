"""Which worker draws which siblings, and which runs which micro-batch: each once, and no worker far above its share."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from octetrl.config.cluster import ClusterConfig
from octetrl.models.families import spec_from_config
from octetrl.records import GenerationRequest, Sample, SamplingParams
from octetrl.shapes.presets import preset_config
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.workers.assignment import Assignment, Costs, RequestPiece, Room, WorkerPlace, deal, placed, shared_out

LARGE, ONE_EACH = Room(sequences=256, tokens=1 << 20), Room(sequences=1, tokens=1 << 20)
COSTS = Costs.of(spec_from_config(preset_config("qwen3-8b")))


def request(name: str, siblings: int = 1, expected: int | None = 10, **more: Any) -> GenerationRequest:
    """With a prompt of 2 tokens."""
    sampling = SamplingParams(max_new_tokens=100)
    return GenerationRequest(name, (1, 2), sampling, num_siblings=siblings, expected_tokens=expected, **more)


def assignment_of(rooms: list[Room], *requests: GenerationRequest) -> Assignment:
    assignment = Assignment(rooms)
    for one in requests:
        assignment.add(one)
    return assignment


def siblings_of(pieces: list[RequestPiece]) -> dict[int, int]:
    """Siblings by worker."""
    counts = Counter[int]()
    for piece in pieces:
        counts[piece.worker] += piece.request.num_siblings
    return dict(counts)


def drawn_by(pieces: list[RequestPiece]) -> list[tuple[int, str, str, int]]:
    """(worker, id of the piece, id of the request, sibling) of each sibling."""
    spans = [(one, one.request.first_sibling, one.request.num_siblings) for one in pieces]
    return [(one.worker, one.request.id, one.of, first + i) for one, first, count in spans for i in range(count)]


def test_few_large_groups_are_shared_equally_and_many_small_ones_stay_together() -> None:
    pieces = list(assignment_of([LARGE] * 3, request("a", 8), request("b", 8)).give())
    assert sorted(siblings_of(pieces).values()) == [5, 5, 6]
    assert sorted(one[2:] for one in drawn_by(pieces)) == [(name, n) for name in "ab" for n in range(8)]
    pieces = list(assignment_of([LARGE] * 2, *(request(str(number), 4) for number in range(20))).give())
    assert len(pieces) == 20 and siblings_of(pieces) == {0: 40, 1: 40}


def test_the_longest_go_first_and_what_has_no_room_waits_for_the_first_that_has() -> None:
    lengths = {"short": 5, "long": 50, "unknown": None, "middle": 20}
    assignment = assignment_of([ONE_EACH] * 2, *(request(name, expected=length) for name, length in lengths.items()))
    first = list(assignment.give())
    assert [piece.of for piece in first] == ["unknown", "long"] and assignment.num_waiting == 2
    assert list(assignment.give()) == []
    assignment.finish(first[1].worker, first[1].request.id, 0)
    assert [(piece.of, piece.worker) for piece in assignment.give()] == [("middle", first[1].worker)]


def test_tokens_of_the_cache_are_room_too() -> None:
    assignment = assignment_of([Room(64, tokens=50), LARGE], *(request(str(n), expected=18) for n in range(20)))
    assert siblings_of(list(assignment.give())) == {0: 3, 1: 17}  # 20 tokens each: the third is begun below 50


@pytest.mark.parametrize("has_room", [True, False])
def test_a_turn_goes_back_to_its_pages_where_there_is_room(has_room: bool) -> None:
    assignment = assignment_of([Room(2, 1 << 20)] * 2, request("first", 2))
    pieces = list(assignment.give())
    for worker, piece_id, _, sibling in drawn_by(pieces):
        assignment.finish(worker, piece_id, sibling)
    for piece in pieces:
        place = ("first", piece.request.first_sibling)
        if not has_room:
            assignment.close(piece.worker)
        assignment.add(request(f"second {place}", continues=place))
        turns = [turn.worker == piece.worker for turn in assignment.give()]
        assert turns == ([True] if has_room else [False] if piece is pieces[0] else [])


def test_every_sibling_is_drawn_once_whatever_comes_and_goes() -> None:
    draw = random.Random(1)
    for count in (1, 2, 5):
        assignment = Assignment([Room(draw.randint(1, 6), draw.randint(50, 300)) for _ in range(count)])
        running: list[tuple[int, str, str, int]] = []
        asked, drawn, cancelled = Counter[str](), Counter[tuple[str, int]](), set[str]()
        for name in map(str, range(60)):
            asked[name] = draw.randint(1, 9)
            assignment.add(request(name, asked[name], draw.choice([None, 5, 40])))
            if draw.random() < 0.1:
                cancelled.add(name)
                dropped = {piece.of for piece in assignment.cancel(name)}
                running = [one for one in running if one[2] not in dropped]
            while True:
                running += drawn_by(list(assignment.give()))
                if not running or (name != "59" and draw.random() < 0.3):
                    break
                worker, piece_id, whole, sibling = running.pop(draw.randrange(len(running)))
                assignment.finish(worker, piece_id, sibling)
                drawn[whole, sibling] += 1
        expected = {(name, sibling) for name, n in asked.items() if name not in cancelled for sibling in range(n)}
        assert set(drawn) >= expected and set(drawn.values()) == {1}
        assert not assignment.has_work and not any(assignment.busy(worker) for worker in range(count))


def test_a_worker_s_unfinished_siblings_move_with_what_they_have_said() -> None:
    assignment = assignment_of([Room(8, 10_000)] * 2, request("whole", 6, None), request("new", 2, None))
    pieces = list(assignment.give())
    mine = [piece for piece in pieces if piece.worker == 0]
    assert mine and assignment.tail_tokens == 8 * 52
    first = mine[0].request
    assignment.finish(0, first.id, first.first_sibling)
    begun = range(first.first_sibling + 1, first.first_sibling + first.num_siblings)
    before = assignment.sequences_of(0) + assignment.sequences_of(1)
    assignment.close(0)
    moved = assignment.move(0, 1, {(first.id, sibling): ([7, sibling], [-0.1, -0.2]) for sibling in begun})
    assert not assignment.busy(0) and assignment.sequences_of(1) == before
    of_first = {piece.request.first_sibling: piece.request for piece in moved if piece.of == mine[0].of}
    assert [of_first[sibling].said for sibling in begun] == [((7, sibling), (-0.1, -0.2)) for sibling in begun]
    assert all(piece.worker == 1 and piece.request.num_siblings == 1 for piece in moved)
    for piece in moved:  # those that had not begun have said nothing
        assert piece.of == mine[0].of or piece.request.said == ((), ())
        assignment.finish(1, piece.request.id, piece.request.first_sibling)
    assignment.add(request("later"))
    assert [piece.worker for piece in assignment.give()] == [1]


# ---------------------------------------------------------------- micro-batches


def test_costs_are_those_of_the_model() -> None:
    """Qwen3-8B. Moonlight: 27 layers, the first dense; 6 of 64 experts and 2 shared of 1,408; heads of 128 + 64 and
    128."""
    assert COSTS.token == 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    assert COSTS.pair == 36 * 4096
    costs = Costs.of(spec_from_config(preset_config("moonlight-16b-a3b")))
    attention = 2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * 256 + 16 * 128 * 2048
    experts = 3 * 2048 * 1408 * (6 + 2) + 64 * 2048
    assert costs.token == 27 * attention + 3 * 2048 * 11264 + 26 * experts
    assert costs.pair == 27 * 16 * ((512 + 512 + 64) + 5 * 192 + 4 * 128) / 7


def test_every_micro_batch_once_and_the_longest_sequences_apart() -> None:
    lengths = [4000, 4000, *[500] * 16, *[100] * 40]
    samples = [Sample((1,) * n, (False, *[True] * (n - 1)), None, 1.0, None) for n in lengths]
    batch = pack(samples, PackingLayout(4000, minibatches=2), "token")
    parts = deal(batch, 2, COSTS)
    assert all(part.loss_denominators == batch.loss_denominators for part in parts)
    for number, minibatch in enumerate(batch.minibatches):
        dealt = [one for part in parts for one in part.minibatches[number]]
        assert sorted(map(id, dealt)) == sorted(map(id, minibatch))
    assert [sum(one.max_seqlen == 4000 for one in part.minibatches[0]) for part in parts] == [1, 1]
    alone = deal(pack(samples[:1], PackingLayout(4000), "token"), 3, COSTS)
    assert [len(part.minibatches[0]) for part in alone] == [1, 0, 0]


def test_no_worker_has_much_more_than_its_share() -> None:
    draw = random.Random(0)
    for workers in (2, 3, 8):
        costs = [draw.lognormvariate(0, 1) for _ in range(10 * workers)]
        loads = [0.0] * workers
        for cost, owner in zip(costs, shared_out(costs, workers), strict=True):
            loads[owner] += cost
        assert max(loads) <= max(sum(costs) / workers * 1.1, max(costs))


def busy(costs: list[float], places: list[WorkerPlace], workers: int) -> float:
    """The share of the time until the last worker ends in which workers compute. A group begins when all are free."""
    ends = [0.0] * workers
    for cost, (first, size) in sorted(zip(costs, places, strict=True), key=lambda pair: -pair[1].size):
        ends[first : first + size] = [max(ends[first : first + size]) + cost / size] * size
    return sum(costs) / workers / max(ends)


def test_groups_of_workers_take_the_long_micro_batches_where_others_would_wait() -> None:
    """Log-normal samples with the costs of Qwen3-8B, 16K tokens on average and 128K at most."""
    draw = random.Random(0)
    found = {}
    for samples in (64, 256):
        tokens = [min(1 << 17, int(draw.lognormvariate(9.2, 1.0))) for _ in range(samples)]
        costs = [63.1e-6 * length + 37.8 * (length / (1 << 17)) ** 2 for length in tokens]
        whole, grouped = placed(costs, tokens, 8), placed(costs, tokens, 8, (1, 2, 4, 8))
        assert all(place.first % place.size == 0 for place in grouped)
        found[samples] = [round(busy(costs, places, 8), 2) for places in (whole, grouped)]
        if samples == 256:
            assert grouped == whole
    assert found == {64: [0.5, 1.0], 256: [1.0, 1.0]}


def test_a_shared_micro_batch_has_one_place_in_the_lists_of_its_workers() -> None:
    """With `gradients: sharded` all workers wait for each other after every micro-batch."""
    draw, seen = random.Random(0), Counter[int]()
    for _ in range(20):
        lengths = [min(8192, int(draw.lognormvariate(6.5, 1.2)) + 2) for _ in range(40)]
        samples = [Sample((1,) * n, (False, *[True] * (n - 1)), None, 1.0, None) for n in lengths]
        batch = pack(samples, PackingLayout(8192), "token")
        mixed = tuple(draw.sample(batch.minibatches[0], len(batch.minibatches[0])))
        parts = deal(replace(batch, minibatches=(mixed,)), 8, replace(COSTS, groups=(1, 2, 4, 8)))
        places: dict[int, list[tuple[int, int]]] = {}
        for worker, part in enumerate(parts):
            for place, one in enumerate(part.minibatches[0]):
                if one.shared is not None:
                    places.setdefault(id(one.token_ids_T), []).append((worker - one.shared.first, place))
        for members in places.values():
            assert members == [(rank, members[0][1]) for rank in range(len(members))]
            seen[len(members)] += 1
    assert set(seen) == {2, 4}


def test_each_worker_of_a_group_has_a_block_of_tokens() -> None:
    assert placed([9.0, 9.0, 1.0], [1000, 200, 100], 4, (4,)) == [(0, 4), (0, 2), (2, 1)]
    spec = spec_from_config(preset_config("qwen3-8b"))
    groups = {
        setting: Costs.of(
            spec, ClusterConfig.model_validate({"gpus_per_node": 6, "nodes": 2, "context_parallel": setting})
        )
        for setting in ("off", "auto", 4)
    }
    assert [one.groups for one in groups.values()] == [(1,), (1, 2), (4,)]  # no group of 4 within machines of 6
