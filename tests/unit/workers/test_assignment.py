"""Which worker draws what: every sibling once, no worker idle while another has two shares, and turns go back."""

from __future__ import annotations

import random
from collections import Counter

from octetrl.records import GenerationRequest, SamplingParams
from octetrl.workers.assignment import Assignment, RequestPiece, Room

LARGE = Room(sequences=256, tokens=1 << 20)


def request(name: str, siblings: int = 1, expected: int | None = 10, **more: object) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=100)
    return GenerationRequest(name, (1, 2), sampling, num_siblings=siblings, expected_tokens=expected, **more)  # type: ignore[arg-type]


def siblings_of(pieces: list[RequestPiece]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for piece in pieces:
        counts[piece.worker] += piece.request.num_siblings
    return counts


def test_few_large_groups_are_shared_equally_and_many_small_ones_stay_together() -> None:
    few = Assignment([LARGE] * 3)
    for name in ("a", "b"):
        few.add(request(name, siblings=8))
    pieces = list(few.give())
    assert sorted(siblings_of(pieces).values()) == [5, 5, 6]
    drawn = sorted(
        (piece.of, piece.request.first_sibling + i) for piece in pieces for i in range(piece.request.num_siblings)
    )
    assert drawn == [(name, sibling) for name in ("a", "b") for sibling in range(8)]

    many = Assignment([LARGE] * 2)
    for number in range(20):
        many.add(request(str(number), siblings=4))
    pieces = list(many.give())
    assert len(pieces) == 20 and siblings_of(pieces) == {0: 40, 1: 40}


def test_the_longest_go_first_and_what_has_no_room_waits_for_the_first_that_has() -> None:
    assignment = Assignment([Room(sequences=1, tokens=1 << 20)] * 2)
    for name, expected in (("short", 5), ("long", 50), ("unknown", None), ("middle", 20)):
        assignment.add(request(name, expected=expected))
    first = list(assignment.give())
    assert [piece.of for piece in first] == ["unknown", "long"] and assignment.num_waiting == 2
    assert list(assignment.give()) == []
    assignment.finish(first[1].worker, first[1].request.id, 0)
    (next_one,) = assignment.give()
    assert (next_one.of, next_one.worker) == ("middle", first[1].worker)


def test_tokens_of_the_cache_are_room_too() -> None:
    assignment = Assignment([Room(sequences=64, tokens=50), LARGE])
    for number in range(20):
        assignment.add(request(str(number), expected=18))
    counts = siblings_of(list(assignment.give()))
    assert counts == {0: 3, 1: 17}  # 20 tokens each: the third is begun below 50


def test_a_turn_goes_back_to_its_pages_where_there_is_room() -> None:
    assignment = Assignment([Room(sequences=2, tokens=1 << 20)] * 2)
    assignment.add(request("first", siblings=2))
    pieces = {piece.request.first_sibling: piece for piece in assignment.give()}
    for sibling, piece in pieces.items():
        assignment.finish(piece.worker, piece.request.id, sibling)
    for sibling, piece in pieces.items():
        assignment.add(request(f"second {sibling}", continues=("first", sibling)))
        (turn,) = assignment.give()
        assert turn.worker == piece.worker
    full = Assignment([Room(sequences=1, tokens=1 << 20)] * 2)
    full.add(request("first"))
    (piece,) = full.give()
    full.finish(piece.worker, piece.request.id, 0)
    full.add(request("other"))
    (other,) = full.give()
    assert other.worker == piece.worker
    full.add(request("second", continues=("first", 0)))
    (turn,) = full.give()
    assert turn.worker != piece.worker


def test_every_sibling_is_drawn_once_whatever_comes_and_goes() -> None:
    draw = random.Random(1)
    for count in (1, 2, 5):
        assignment = Assignment([Room(draw.randint(1, 6), draw.randint(50, 300)) for _ in range(count)])
        running: list[tuple[int, str, str, int]] = []
        asked, drawn, cancelled = Counter[str](), Counter[tuple[str, int]](), set[str]()
        for number in range(60):
            siblings = draw.randint(1, 9)
            name = str(number)
            asked[name] = siblings
            assignment.add(request(name, siblings, draw.choice([None, 5, 40])))
            if draw.random() < 0.1:
                cancelled.add(name)
                for piece in assignment.cancel(name):
                    running = [one for one in running if one[2] != piece.of]
            while True:
                for piece in assignment.give():
                    first = piece.request.first_sibling
                    running += [
                        (piece.worker, piece.request.id, piece.of, sibling)
                        for sibling in range(first, first + piece.request.num_siblings)
                    ]
                if not running or (number < 59 and draw.random() < 0.3):
                    break
                worker, piece_id, whole, sibling = running.pop(draw.randrange(len(running)))
                assignment.finish(worker, piece_id, sibling)
                drawn[whole, sibling] += 1
        expected = {(name, sibling) for name, n in asked.items() if name not in cancelled for sibling in range(n)}
        assert set(drawn) >= expected and set(drawn.values()) == {1}
        assert not assignment.has_work and not any(assignment.busy(worker) for worker in range(count))


def test_a_worker_s_unfinished_siblings_move_with_what_they_have_said() -> None:
    assignment = Assignment([Room(8, 10_000), Room(8, 10_000)])
    sampling = SamplingParams(max_new_tokens=20)
    assignment.add(GenerationRequest("whole", (1, 2, 3), sampling, num_siblings=6, seed=1))
    assignment.add(GenerationRequest("new", (4,), sampling, num_siblings=2, seed=2))
    pieces = list(assignment.give())
    mine = [piece for piece in pieces if piece.worker == 0]
    assert mine and assignment.tail_tokens == 6 * 13 + 2 * 11
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
    assignment.add(GenerationRequest("later", (1,), sampling))
    assert [piece.worker for piece in assignment.give()] == [1]
