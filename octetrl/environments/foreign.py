"""Checks an environment that the user wrote, before anything is built. Each error is reported in one line.

Its attributes may be properties and its tasks may have any class, so each access may raise an exception or end the
process. The checks cover what the run reads later. All tasks of a list are checked. In other sequences only some tasks
are checked, because tasks may be created on access. Whatever this code changes for the whole process is put back.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import getitem
from typing import Any, NamedTuple, TypeVar

from octetrl.records import Task
from octetrl.system.errors import Terminated, UserError, type_of

T = TypeVar("T")
OPTIONAL = ("score", "answered", "start", "reply", "finish", "tools", "system_prompt")
MOST_TASKS = 100_000_000  # their order is kept in memory
_TRIED = 16  # of a sequence that is not a list


def result_of(action: Callable[[], T], what: str) -> T:
    """Call `action`, which runs the user's code, and return its result. Raises UserError if it raises any exception,
    including SystemExit."""
    try:
        with unchanged_process():
            return action()
    except (UserError, Terminated):
        raise
    except SystemExit as error:
        raise UserError(f"environment.dataset: {what} ends its process (sys.exit({error.code}))") from error
    except KeyboardInterrupt as error:
        if _may_be_ctrl_c(error):
            raise
        raise UserError(f"environment.dataset: {what} raises KeyboardInterrupt; fix the environment") from None
    except Exception as error:  # the user's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"environment.dataset: {what} fails ({reason}); fix the environment") from error


class ProcessState(NamedTuple):
    """What the user's code may change for the whole process. dtype: torch's default, None before its import. stdout and
    stderr may be replaced, but not by None."""

    folder: str
    dtype: Any
    stdout: Any
    stderr: Any

    @classmethod
    def now(cls) -> ProcessState:
        torch = sys.modules.get("torch")
        try:
            folder = os.getcwd()
        except FileNotFoundError:  # somebody removed it
            folder = "."
        return cls(folder, torch and torch.get_default_dtype(), sys.stdout, sys.stderr)

    def put_back(self) -> list[str]:
        """Put back what was changed, and return it in words."""
        found, changes = self.now(), []
        if found.folder != self.folder:
            os.chdir(self.folder)
            changes.append(f"the working directory is '{found.folder}', was '{self.folder}': use absolute paths")
        torch = sys.modules.get("torch")
        if torch is not None and found.dtype != (dtype := self.dtype or torch.float32):
            torch.set_default_dtype(dtype)
            changes.append(f"torch's default dtype is {found.dtype}, was {dtype}: give each tensor its dtype")
        for name in ("stdout", "stderr"):
            if getattr(found, name) is None is not getattr(self, name):
                setattr(sys, name, getattr(self, name))
                changes.append(f"sys.{name} is None: leave it as it was")
        return changes


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Put back what was changed for the whole process, and whether this thread computes gradients."""
    before, torch = ProcessState.now(), sys.modules.get("torch")
    computes_gradients = torch is None or torch.is_grad_enabled()
    try:
        yield
    finally:
        before.put_back()
        if torch := sys.modules.get("torch"):
            torch.set_grad_enabled(computes_gradients)


class ForeignTasks(Sequence[Task]):
    """Tasks of the user's environment, whose code runs at each access. `path`: the environment's name in the recipe."""

    def __init__(self, tasks: Sequence[Task], path: str) -> None:
        self._tasks, self._path = tasks, path

    def __len__(self) -> int:
        return result_of(lambda: len(self._tasks), f"'{self._path}': len(tasks)")

    def __iter__(self) -> Iterator[Task]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: Any) -> Any:
        return result_of(partial(getitem, self._tasks, place), f"'{self._path}': tasks[{place}]")


def _may_be_ctrl_c(error: KeyboardInterrupt) -> bool:
    """False only if a Python handler is installed, because the handler would then have raised it."""
    code = getattr(signal.getsignal(signal.SIGINT), "__code__", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return True
        trace = trace.tb_next
    return code is None


def check_tasks(environment: Any, path: str) -> None:
    """Raises UserError for tasks that a run cannot use. path: the environment's name in the recipe."""
    what = f"'{path}': "
    tasks = result_of(lambda: environment.tasks, f"{what}reading its tasks")
    has_places = hasattr(type(tasks), "__len__") and hasattr(type(tasks), "__getitem__")
    if not has_places or isinstance(tasks, str | bytes | Mapping):
        raise UserError(
            f"environment.dataset: {what}its tasks are {type_of(tasks)}; give a list of Task, or another"
            " sequence with a length and places"
        )
    number = result_of(lambda: len(tasks), f"{what}len(tasks)")
    if number > MOST_TASKS:
        raise UserError(
            f"environment.dataset: {what}it has {number:,} tasks, at most {MOST_TASKS:,} can be; give fewer"
        )
    found = {}
    if isinstance(tasks, list | tuple):
        found = dict(enumerate(tasks))
    elif number:
        found = dict(enumerate(result_of(lambda: list(islice(tasks, _TRIED)), f"{what}reading its tasks in order")))
        for place in sorted({number * eighth // 8 for eighth in range(8)} | {number - 1}):
            found[place] = result_of(partial(getitem, tasks, place), f"{what}tasks[{place}]")
    for place, task in found.items():
        _check_task(task, f"environment.dataset: {what}tasks[{place}]")
    repeated, times = next(iter(Counter(task.id for task in found.values()).most_common(1)), ("", 0))
    if times > 1:
        raise UserError(
            f"environment.dataset: {what}{times} tasks have the id {repeated[:60]!r}; give each an id of its own"
        )


def _check_task(task: Any, where: str) -> None:
    if not isinstance(task, Task):
        raise UserError(f"{where} is {type_of(task)}, not a Task; give Task(id=..., prompt=...)")
    for field, kinds, needed in (
        ("id", str, "a text"),
        ("prompt", str, "a text"),
        ("answer", str | None, "a text or None"),
        ("metadata", Mapping, "a mapping"),
    ):
        value = getattr(task, field)
        if not isinstance(value, kinds):
            raise UserError(f"{where}: its {field} is {type_of(value)}; give {needed}")
    environment = getattr(task, "environment", None)
    if not isinstance(environment, str) or environment:
        raise UserError(
            f"{where}: its environment is {environment!r}, but the run sets this field of a Task; leave it empty, and"
            " give a field of your own another name"
        )
