"""The calls of one rollout as token sequences: each sampled token is trained on once, in the context it was sampled in.

    call A   prompt p            answer a
    call B   prompt p a q        answer b        continues A: one segment  p [a] q [b]
    call C   prompt p a r        answer c        another branch: a segment of its own, in which a is part of the prompt

Prompts and answers are pieces of one tree (rollout/history.py), so a rollout of many calls holds each token once. A
segment is a path from the root to the end of an answer, longest first. It has every answer on it that no segment before
has taken, and whose positions no other answer on it has sampled.

**Unread answers.** An answer whose client had gone before it was there, and that no retry has fetched, is not trained
on: nothing in the rollout depends on it. Every answer that a program has received is trained on, also one that it
dropped. To leave those out would be a bias: a program that asks twice and goes on with the better answer would teach
that answers are better than they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octetrl.records import Completion, Turn
from octetrl.rollout.history import Piece


@dataclass(slots=True, eq=False)
class AgentCall:
    """One answer to one request of a program. prompt, end: where its prompt and its tokens end in the tree."""

    prompt: Piece
    end: Piece
    completion: Completion
    request: str = ""
    sibling: int = 0
    is_constrained: bool = False  # by a grammar, so its log-probs are from before the mask; or it shall not be trained
    is_unread: bool = False


def after(prompt: Piece, token_ids: tuple[int, ...], has_end: bool) -> Piece:
    """Adds an answer to the tree. has_end: its last token is a stop token. A point before it may be continued, because
    a template may end an answer in another way than the policy did."""
    body = prompt.add(token_ids[:-1], None) if has_end else prompt
    return body.add(token_ids[-1:] if has_end else token_ids, None)


def turns_of(calls: Sequence[AgentCall]) -> tuple[Turn, ...]:
    """The turns of all segments (`Rollout.turns`), those that arrived first before others. Answers that are not trained
    on are no turns. Which segment has an answer depends on tokens alone, not on which parallel call arrived first."""
    trained = [(number, call) for number, call in enumerate(calls) if call.completion.token_ids and not call.is_unread]
    lengths = Counter(call.end.num_tokens for _, call in trained)

    def place(numbered: tuple[int, AgentCall]) -> tuple[object, ...]:
        """Longest first, and the same in whatever order the calls arrived."""
        call, length = numbered[1], numbered[1].end.num_tokens
        tokens = call.end.all_tokens() if lengths[length] > 1 else ()
        drawn = call.completion.policy_version, call.completion.logprobs
        return -length, call.prompt.num_tokens, call.is_constrained, tokens, *drawn

    left = dict(sorted(trained, key=place))
    ending: dict[Piece, list[int]] = {}
    for number, call in left.items():
        ending.setdefault(call.end, []).append(number)
    segments: dict[int, list[AgentCall]] = {}  # by the call at the end, latest first
    for last in list(left):
        piece: Piece | None = calls[last].end if last in left else None
        free = calls[last].end.num_tokens  # positions that no answer of the segment has
        while piece is not None:
            fitting = (number for number in ending.get(piece, ()) if number in left and piece.num_tokens <= free)
            if (found := next(fitting, None)) is not None:
                segments.setdefault(last, []).append(left.pop(found))
                free = calls[found].prompt.num_tokens
            piece = piece.parent
    turns: list[Turn] = []
    for last in sorted(segments):
        token_ids, position, begins = calls[last].end.all_tokens(), 0, True
        for call in reversed(segments[last]):
            if call.is_constrained:
                continue
            new = token_ids[position : call.prompt.num_tokens]
            turns.append(Turn(new, call.completion, is_fork=begins and bool(turns)))
            position, begins = call.end.num_tokens, False
    return tuple(turns)
