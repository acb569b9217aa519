"""Results come late and in arrays: whose they are, which are dropped, and who may have ended."""

from __future__ import annotations

import numpy as np

from octetrl.engine.request import RequestGroup, RunningSequence
from octetrl.engine.stopping import Stopping, TextDecoder
from octetrl.engine.transcript import Batch, Transcript
from octetrl.records import GenerationRequest, SamplingParams

EOS = frozenset({1})


def sequence(
    row: int, *, prompt: int = 3, new: int = 10, stop_token_ids: frozenset[int] = EOS, stop: str = ""
) -> RunningSequence:
    asked = GenerationRequest(str(row), tuple(range(prompt)), SamplingParams(new))
    stops = (stop,) if stop else ()
    stopping = Stopping(stop_token_ids, stops, prompt + new, decode=TextDecoder(lambda token_ids: ""))
    made = RunningSequence(RequestGroup(asked, row, prompt + new, 1), 0, stopping, list(range(prompt)))
    made.row = row
    return made


def add(transcript: Transcript, batch: Batch, *tokens: int) -> list[RunningSequence]:
    return transcript.add(batch, np.array(tokens, np.int32), -np.array(tokens, np.float32))


def test_tokens_become_the_sequences_own_when_it_leaves() -> None:
    transcript = Transcript(4, 10, EOS)
    a, b = sequence(2), sequence(0)
    transcript.open([a, b])
    batch = transcript.batch((a, b))
    assert add(transcript, batch, 5, 6) == add(transcript, batch, 7, 8) == []
    assert (transcript.last_token(a), transcript.num_tokens(a)) == (7, 5)
    transcript.close(a, 2)
    assert a.token_ids == [0, 1, 2, 5, 7] and a.logprobs == [-5.0, -7.0]
    assert b.token_ids == [0, 1, 2]


def test_what_comes_for_a_place_that_was_given_away_is_dropped() -> None:
    transcript = Transcript(2, 10, EOS)
    old, other = sequence(0), sequence(1)
    transcript.open([old, other])
    launched = transcript.batch((old, other))
    add(transcript, launched, 5, 5)
    transcript.close(old, 0)
    new = sequence(0)
    transcript.open([new])
    assert transcript.num_added(launched) == 1
    assert add(transcript, launched, 1, 6) == []  # an EOS, drawn for the old one
    assert add(transcript, transcript.batch((new, other)), 8, 9) == []
    transcript.close(new, 0)
    transcript.close(other, 1)
    assert new.token_ids == [0, 1, 2, 8] and other.token_ids == [0, 1, 2, 5, 6, 9]


def test_only_those_that_may_have_ended_are_looked_at() -> None:
    transcript = Transcript(6, 10, EOS)
    rows = [
        sequence(0),  # draws EOS
        sequence(1),
        sequence(2, new=1),  # reaches its limit
        sequence(3, stop_token_ids=frozenset()),  # ignores EOS
        sequence(4, stop_token_ids=frozenset({1, 9})),  # has stop tokens of its own
        sequence(5, stop="x"),  # its text is watched
    ]
    transcript.open(rows)
    assert add(transcript, transcript.batch(tuple(rows)), 1, 2, 2, 1, 2, 2) == [rows[0], rows[2], rows[4], rows[5]]


def test_a_token_that_could_not_be_drawn_is_looked_at() -> None:
    transcript = Transcript(2, 10, EOS)
    rows = (sequence(0), sequence(1))
    transcript.open(rows)
    assert add(transcript, transcript.batch(rows), 4, -1) == [rows[1]]


def test_a_sequence_that_comes_back_goes_on_where_it_was() -> None:
    transcript = Transcript(2, 10, EOS)
    one = sequence(0, new=3)
    transcript.open([one])
    add(transcript, transcript.batch((one,)), 5)
    transcript.close(one, 0)
    one.row = 1
    transcript.open([one])
    batch = transcript.batch((one,))
    assert add(transcript, batch, 6) == [] and add(transcript, batch, 7) == [one]  # its third is its last
    assert transcript.num_tokens(one) == 6


def test_runs_of_tokens_are_stored_at_once_unless_a_sequence_may_end_within_them() -> None:
    transcript = Transcript(6, 10, EOS)
    rows = (
        sequence(0),
        sequence(1, stop="x"),  # its text is watched
        sequence(2),  # draws EOS as its second
        sequence(3),  # has ended meanwhile
        sequence(4, stop_token_ids=frozenset()),  # ignores EOS
        sequence(5, new=2),  # reaches its limit
    )
    transcript.open(rows)
    batch = transcript.batch(rows)
    transcript.close(rows[3], 3)
    token_N = np.array([5, 6, 7, 2, 3, 4, 1, 8, 9, 1, 2, 3, 4], dtype=np.int32)
    first_B, count_B = np.array([0, 3, 5, 7, 8, 11]), np.array([2, 1, 2, 1, 3, 2])
    row_n, ends_B = transcript.add_runs(batch, first_B, count_B, token_N, -token_N.astype(np.float32))
    assert ends_B.tolist() == [False, True, True, False, False, True]
    assert row_n.tolist() == [0, 1, 8, 9, 10]
    assert transcript.num_new(batch) == [2, 0, 0, 0, 3, 0]
    assert transcript.since(rows[0], 0) == ([5, 6], [-5.0, -6.0])
    assert transcript.since(rows[4], 1) == ([1, 2], [-1.0, -2.0])
    row_n, ends_B = transcript.add_runs(batch, first_B, np.array([2, 1, 1, 1, 1, 1]), token_N, np.zeros(13, np.float32))
    assert ends_B.tolist() == [False, True, False, False, False, False] and row_n.tolist() == [0, 1, 5, 8, 11]
    assert transcript.since(rows[0], 0)[0] == [5, 6, 5, 6] and transcript.since(rows[5], 0)[0] == [3]
