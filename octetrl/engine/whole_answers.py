"""`generate` of an engine by its own session: requests in, all their completions out. Every backend calls it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from octetrl.engine.request import RequestGroup, RunningSequence
from octetrl.records import Completion, OnCompletions


class Advances(Protocol):
    """An open session that is advanced by its owner, as engine/session.py."""

    @property
    def has_work(self) -> bool: ...

    def accept(self, group: RequestGroup, /) -> None: ...

    def advance(self) -> Iterable[tuple[RunningSequence, Completion]]: ...


def whole_answers(
    session: Advances, groups: Sequence[RequestGroup], on_completions: OnCompletions | None
) -> list[list[Completion]]:
    """The completions of each group, in the order of its siblings. `on_completions` receives each when it ends."""
    finished: list[dict[int, Completion]] = [{} for _ in groups]
    for group in groups:
        session.accept(group)
    while session.has_work:
        ended = [(one.group.index, one.sibling, completion) for one, completion in session.advance()]
        for index, sibling, completion in ended:
            finished[index][sibling] = completion
        if on_completions is not None:
            on_completions(ended)
    return [[by_sibling[number] for number in sorted(by_sibling)] for by_sibling in finished]
