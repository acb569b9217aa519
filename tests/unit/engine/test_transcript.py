"""Results come late and in arrays: whose they are, which are dropped, and which sequences may have ended."""

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
