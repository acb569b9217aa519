"""The conversations of several environments, at least one of which has several turns.

Each task is answered by its own environment, with its own tools, rewards and limits. A task of an environment with one
turn is a conversation that ends after the model's first answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from octetrl.environments.mixed.scorer import MixedScorer
from octetrl.environments.turns.calls import Calls
from octetrl.environments.turns.dialogue import Dialogue, Dialogues
from octetrl.records import Task


class MixedDialogues(Dialogues):
    """`members` by environment. It closes them."""

    def __init__(self, members: Mapping[str, Dialogue]) -> None:
        self._members, self.calls = dict(members), Calls()
        scorers = {name: member.scorer for name, member in members.items() if member.scorer is not None}
        self.scorer = MixedScorer(scorers) if scorers else None

    def of(self, task: Task) -> Dialogue:
        return self._members[task.environment]

    def close(self) -> None:
        self.calls.close()
        for member in self._members.values():
            member.close()
