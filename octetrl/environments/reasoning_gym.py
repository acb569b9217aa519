"""Any dataset of reasoning_gym, by name and parameters, scored by its own `score_answer`.

A dataset is a generator: task `i` is a function of (seed, i) and is created on access. Some of the hundred generators
iterate over sets of strings, whose order changes with each interpreter, and `list_functions` uses Python's global
random generator. So tasks are generated in one child process with a fixed hash seed, and the global generator is seeded
before each task. Every dataset then gives the same tasks in every run and after every resume. One call creates several
tasks, because a call takes longer than to create a sum.

The scorer receives the answer that `environment.answer_marker` finds (`environments/rewards.py`), or None if there is
none; most datasets score None as 0, some as 0.01. A dataset may give partial credit, a score between 0 and 1.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from octetrl.environments.rewards import extract_answer
from octetrl.environments.tasks import MadeTasks, TaskEnvironment
from octetrl.process.callable_process import CallableProcess, CallFailed, NoAnswer, ProcessDied
from octetrl.records import Task
from octetrl.system.errors import UserError, nearest

_logger = logging.getLogger(__name__)
_ATTEMPTS = 3  # number of processes that may fail on one task
_AT_ONCE = 64  # most tasks that one call creates
_CALL_SECONDS = 0.25  # after which a call begins no further task
_RESERVED = {"size": "environment.train_size and environment.eval_size", "seed": "environment.seed"}


def reasoning_gym_environment(
    dataset: str,
    parameters: Mapping[str, Any],
    *,
    size: int,
    seed: int,
    answer_marker: str | None = None,
    prompt_template: str = "{prompt}",
    task_seconds: float = 60.0,
) -> TaskEnvironment:
    """`size` tasks of `dataset`, generated on access, with the dataset's own scorer.

    prompt_template: `{prompt}` stands for the dataset's question. task_seconds: time limit of one task.
    Raises UserError for an unknown dataset or parameter (with the nearest name) or a value the dataset refuses.
    """
    check_dataset(dataset, parameters)
    generator = EntryGenerator(dataset, dict(parameters), size, seed)
    return TaskEnvironment(
        MadeTasks(size, EntryTasks(generator, prompt_template, task_seconds)),
        ReasoningGymScorer(dataset, dict(parameters), answer_marker),
    )


def check_dataset(dataset: str, parameters: Mapping[str, Any]) -> None:
    """Raises UserError unless reasoning_gym has `dataset` and the dataset accepts `parameters`."""
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise UserError(
            f"environment.dataset: reasoning_gym has no dataset '{dataset}'{nearest(dataset, DATASETS)}"
            f" ({len(DATASETS)} names, chain_sum among them)"
        )
    config_class = DATASETS[dataset][1]
    allowed = sorted({field.name for field in fields(config_class)} - _RESERVED.keys())
    for name in parameters:
        if name in _RESERVED:
            raise UserError(f"environment.parameters.{name}: set {_RESERVED[name]} instead")
        if name not in allowed:
            raise UserError(
                f"environment.parameters: dataset '{dataset}' has no parameter '{name}'{nearest(name, allowed)};"
                f" it takes {', '.join(allowed)}"
            )
    try:
        config_class(**parameters).validate()
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"environment.parameters: dataset '{dataset}' refuses {dict(parameters)}: {error}") from error


@dataclass(frozen=True)
class EntryGenerator:
    """`(indices) -> entries` of the first of them, at least one, to be run in a child process."""

    dataset: str
    parameters: Mapping[str, Any]
    size: int
    seed: int

    def __call__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        began, entries = time.monotonic(), [self.entry(indices[0])]
        for index in indices[1:]:
            if time.monotonic() - began > _CALL_SECONDS:
                break
            entries.append(self.entry(index))
        return entries

    def entry(self, index: int) -> dict[str, Any]:
        random.seed(f"{self.seed}/{index}")
        entry: dict[str, Any] = self._dataset[index]
        return entry

    @cached_property
    def _dataset(self) -> Any:
        import reasoning_gym

        return reasoning_gym.create_dataset(self.dataset, **self.parameters, seed=self.seed, size=self.size)


class EntryTasks:
    """`(indices) -> tasks`, from a child process that starts at the first call and ends with this object.

    A process that dies, or returns no task within `seconds`, is replaced, and the new process creates the same tasks.
    Raises UserError for a task that can't be created.
    """

    def __init__(self, generator: EntryGenerator, prompt_template: str, seconds: float = 60.0) -> None:
        self._generator, self._prompt_template, self._seconds = generator, prompt_template, seconds
        self._process: CallableProcess | None = None
        self.restarts = 0

    def __call__(self, indices: Sequence[int]) -> list[Task]:
        entries: list[dict[str, Any]] = []
        at_once = _AT_ONCE
        while len(entries) < len(indices):
            made, at_once = self._entries(indices[len(entries) :], at_once)
            entries += made
        return [
            Task(
                id=f"{self._generator.dataset}/{index}",
                prompt=self._prompt_template.replace("{prompt}", entry["question"]),
                answer=None if entry["answer"] is None else str(entry["answer"]),
                metadata={"entry": entry},
            )
            for index, entry in zip(indices, entries, strict=True)
        ]

    def _entries(self, indices: Sequence[int], at_once: int) -> tuple[list[dict[str, Any]], int]:
        """The entries of the first indices, and how many to ask for next. After a failure one by one, so that an error
        names its task, and the others do not fail with it again."""
        what = f"environment.dataset: reasoning_gym's '{self._generator.dataset}'"
        index, reason = indices[0], ""
        for wanted in (indices[:at_once], *[indices[:1]] * (_ATTEMPTS - 1)):
            if self._process is None:
                self._process = CallableProcess(self._generator)
            try:
                entries: list[dict[str, Any]] = self._process.call(wanted, seconds=self._seconds)
                return entries, at_once
            except CallFailed as error:
                if len(wanted) == 1:
                    remedy = "change environment.parameters"
                    raise UserError(f"{what} can't make task {index} ({error}); {remedy}") from error
            except (ProcessDied, NoAnswer) as error:
                reason = str(error)
                _logger.warning("%s made no task %d (%s); its process is replaced", what, index, reason)
                self._process.kill()
                self._process = None
                self.restarts += 1
            at_once = 1
        raise UserError(
            f"{what} made no task {index} in {_ATTEMPTS} processes ({reason});"
            " raise environment.task_timeout_seconds, or change environment.parameters"
        )


@dataclass(frozen=True)
class ReasoningGymScorer:
    """The dataset's `score_answer`, on the answer after `answer_marker`."""

    dataset: str
    parameters: Mapping[str, Any]
    answer_marker: str | None = None

    def __call__(self, task: Task, completion_text: str) -> float:
        answer = extract_answer(completion_text, self.answer_marker)
        return float(self._dataset.score_answer(answer, task.metadata["entry"]))

    def answered(self, task: Task, completion_text: str) -> str | None:
        return extract_answer(completion_text, self.answer_marker)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _ = self._dataset  # in the reward worker: imported before the first call, whose time is limited

    @cached_property
    def _dataset(self) -> Any:
        import reasoning_gym

        return reasoning_gym.create_dataset(self.dataset, **self.parameters, seed=0, size=1)
