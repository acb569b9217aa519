"""An unfinished answer continues in another engine, with the tokens that it has: no bit shows that it moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from octetrl.records import GenerationRequest, SessionEvent
from octetrl.system.errors import UserError
from tests.unit.engine.test_session import ASKED, Answers, all_alone, engine_of
from tests.unit.engine.tiny_engine import request


@pytest.mark.parametrize(
    ("room", "precision"), [("ahead", "bf16"), ("few pages ahead", "bf16"), ("crowded", "fp8_full")]
)
def test_an_answer_continues_in_another_engine(room: str, precision: str) -> None:
    """It moves with what it has said, as to another worker: tokens, log-probs, text and stops are those of one that
    never moved. A stop string may begin before the move."""
    for steps in (1, 9):
        moved: list[GenerationRequest] = []
        found: Answers = {}
        with engine_of(room, precision).session() as session:
            for one in ASKED:
                session.submit(one)
            for _ in range(steps):
                found |= completions_of(session.events())
            for (name, sibling), (token_ids, logprobs) in session.answers_so_far().items():
                whole = next(one for one in ASKED if one.id == name)
                said = (tuple(token_ids), tuple(logprobs))
                moved.append(replace(whole, id=f"{name} {sibling}", first_sibling=sibling, num_siblings=1, said=said))
        with engine_of("roomy", precision).session() as session:
            for one in moved:
                session.submit(one)
            while session.has_work:
                for (name, sibling), completion in completions_of(session.events()).items():
                    found[name.split()[0], sibling] = completion
        assert steps == 1 or any(one.said[0] for one in moved)
        assert found == all_alone(precision)


def completions_of(events: Sequence[SessionEvent]) -> Answers:
    return {(one.request_id, one.sibling): one.completion for one in events if one.completion is not None}


def test_what_cannot_continue_is_refused() -> None:
    with engine_of("roomy").session() as session:
        whole = request("whole", prompt_length=5, num_siblings=2, max_new_tokens=3)
        for wrong in (
            replace(whole, said=((5,), (-1.0,))),  # whose siblings?
            replace(whole, num_siblings=1, said=((5, 6), (-1.0,))),
            replace(whole, num_siblings=1, said=((5, 6, 7), (-1.0, -1.0, -1.0))),  # it has ended
        ):
            with pytest.raises(UserError, match=r"said is .*; give one sibling, fewer tokens than its limit"):
                session.submit(wrong)
