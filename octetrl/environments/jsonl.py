"""Scores completions by equality with the reference answer, for prompts and answers from a file.

`data/tasks.py` reads the tasks. The reward is 1 if the completion's answer equals the reference answer character by
character, and 0 otherwise. For any other comparison, write a reward function (`environments/python_reward.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from octetrl.environments.answers import extract_answer
from octetrl.records import Task


@dataclass(frozen=True)
class ExactScorer:
    """1.0 if the answer after `answer_marker` (None: the whole completion) equals `task.answer`, else 0.0."""

    answer_marker: str | None = None

    def __call__(self, task: Task, completion_text: str) -> float:
        if task.answer is None:
            raise ValueError(f"task '{task.id}' has no answer to compare with; give one, or a reward function")
        return float(self.answered(task, completion_text) == task.answer.strip())

    def answered(self, task: Task, completion_text: str) -> str | None:
        return extract_answer(completion_text, self.answer_marker)
