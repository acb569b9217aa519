"""A sequence of tasks that are created on access, so that a run generates only the tasks that it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from octetrl.records import Task


@dataclass(frozen=True)
class MadeTasks(Sequence[Task]):
    """`size` tasks; number `index` is `make(index)`, the same each time."""

    size: int
    make: Callable[[int], Task]

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self.make(place) for place in range(*index.indices(self.size))]
        if not 0 <= index < self.size:
            raise IndexError(f"task {index} of {self.size}")
        return self.make(index)


def expect_tasks(tasks: Sequence[Task], indices: Iterable[int]) -> None:
    """Say which tasks are asked for next, in order. A `make` with a method `expect` may then create several at once."""
    expect = getattr(tasks.make, "expect", None) if isinstance(tasks, MadeTasks) else None
    if expect is not None:
        expect(indices)
