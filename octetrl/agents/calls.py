"""The calls of one rollout as token sequences: each sampled token is trained on once, in the context it was sampled in.

    call A   prompt p            answer a
    call B   prompt p a q        answer b        continues A: one segment  p [a] q [b]
    call C   prompt p a r        answer c        another branch: a segment of its own, in which a is part of the prompt

Calls are taken from the longest token sequence to the shortest. Each joins the first longer sequence that contains it
at its own place, if no other call there has sampled the same positions. What joins nothing begins a segment.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octetrl.records import Completion, Turn


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One answer to one request of a program, in the order of arrival."""

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    is_constrained: bool = False  # by a grammar, so its log-probs are from before the mask; or it shall not be trained
    request: str = ""  # several answers of one request (`n`) have the same

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.completion.token_ids

    @property
    def sampled(self) -> range:
        """The positions of the answer."""
        return range(len(self.prompt_token_ids), len(self.prompt_token_ids) + len(self.completion.token_ids))


def discarded(calls: Sequence[AgentCall]) -> set[int]:
    """The numbers of calls whose answer the program dropped: the answer of another request with the same prompt was
    continued, and theirs was not. A client that retries after a lost answer leaves such a call."""
    prompts = sorted(_bytes(call.prompt_token_ids) for call in calls)

    def is_continued(call: AgentCall) -> bool:
        whole = _bytes(call.token_ids)
        place = bisect_left(prompts, whole)  # of the first prompt that may begin with it
        return place < len(prompts) and prompts[place].startswith(whole)

    continued = {number for number, call in enumerate(calls) if is_continued(call)}
    asked: dict[tuple[int, ...], set[str]] = {}  # requests whose answer was continued, by prompt
    for number in continued:
        asked.setdefault(calls[number].prompt_token_ids, set()).add(calls[number].request)
    return {
        number
        for number, call in enumerate(calls)
        if number not in continued and asked.get(call.prompt_token_ids, set()) - {call.request}
    }


def turns_of(calls: Sequence[AgentCall], left_out: Collection[int] = ()) -> tuple[Turn, ...]:
    """The turns of all segments (`Rollout.turns`). Constrained answers are no turns, nor those numbered in
    `left_out`."""
    taken = [call for number, call in enumerate(calls) if number not in left_out and call.completion.token_ids]
    longest_first = sorted(range(len(taken)), key=lambda number: (-len(taken[number].token_ids), number))
    texts = [_bytes(call.token_ids) for call in taken]
    members: dict[int, list[int]] = {}  # by the number of the call whose tokens are the segment
    for number in longest_first:
        fitting = (
            root for root in members if texts[root].startswith(texts[number]) and _fits(taken, members[root], number)
        )
        root = next(fitting, number)
        members.setdefault(root, []).append(number)
    turns: list[Turn] = []
    for root in sorted(members):
        token_ids, position, begins = taken[root].token_ids, 0, True
        for call in sorted((taken[number] for number in members[root]), key=lambda call: call.sampled.start):
            if call.is_constrained:
                continue
            new = token_ids[position : call.sampled.start]
            turns.append(Turn(new, call.completion, is_fork=begins and bool(turns)))
            position, begins = call.sampled.stop, False
    return tuple(turns)


def _fits(calls: Sequence[AgentCall], members: Sequence[int], number: int) -> bool:
    """Whether no other call there has sampled the same positions."""
    start, stop = calls[number].sampled.start, calls[number].sampled.stop
    return all(calls[one].sampled.start >= stop or calls[one].sampled.stop <= start for one in members)


def _bytes(token_ids: Sequence[int]) -> bytes:
    """Bytes are compared much faster than tuples: a rollout may have a thousand calls of 100,000 tokens."""
    return array("I", token_ids).tobytes()
