"""The boxes of an environment: each belongs to a rollout and ends with it, after its rewards.

boxes = Boxes(recipe.environment.box)
own = boxes.of(task);   box = await own.open(image="swe:1");   own.lost();   await own.close()
boxes.close()                                                  at the end of the run
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from octetrl.boxes.box import Box, BoxError, program_of
from octetrl.boxes.bubblewrap import BubblewrapBox
from octetrl.boxes.containers import Container, sweep
from octetrl.boxes.loop import on_loop, start_on_loop
from octetrl.records import Task
from octetrl.system.errors import UserError

if TYPE_CHECKING:  # pydantic takes as long to import as a reward process takes to start
    from octetrl.config.box import BoxConfig

_TRIED_PORT = 40_000  # in a box where nothing else runs


async def open_box(config: BoxConfig) -> Box:
    """Start a box. Raises BoxError."""
    if sys.platform != "linux":
        raise BoxError(f"boxes need Linux, this is {sys.platform}")
    box = BubblewrapBox(config) if config.kind == "bubblewrap" else Container(config)
    try:
        await on_loop(box.start())
    except BaseException:  # cancelled, too
        await box.close()
        raise
    return box


class RolloutBoxes:
    """The boxes of one rollout. `opened` has those that its code opened, in their order."""

    def __init__(self, owner: Boxes | None = None, task: Task | None = None) -> None:
        self._owner, self._task = owner or Boxes(None), task
        self.opened: list[Box] = []
        self._failure: str | None = None

    @property
    def config(self) -> BoxConfig | None:
        """Of the recipe."""
        return self._owner.config

    async def open(self, *, policy_port: int | None = None, **changes: Any) -> Box:
        """Start a box by the recipe's settings, with these changes. policy_port: of this machine, which programs in
        the box reach too. Raises BoxError, or UserError for wrong settings."""
        config = self._owner.settings(self._task, changes)
        try:
            box = await self._owner.open(config)
            self.opened.append(box)
            if policy_port is not None:
                await box.forward(policy_port)
        except BoxError as error:
            self._failure = str(error)
            raise
        self._failure = None  # its code has tried again
        return box

    @property
    def is_used(self) -> bool:
        return bool(self.opened) or self._failure is not None

    def lost(self) -> str | None:
        """Why a box is lost or did not start."""
        for box in self.opened:
            box.alive()
        return self._failure or next((box.lost for box in self.opened if box.lost is not None), None)

    async def close(self) -> None:
        await _close(self.opened)
        self._owner.running.difference_update(self.opened)


class Boxes:
    """Those of an environment. config: the recipe's, None if it has none."""

    def __init__(self, config: BoxConfig | None) -> None:
        self.config = config
        self.running: set[Box] = set()
        self._swept: list[list[str]] = []  # programs
        self._lock = threading.Lock()

    def of(self, task: Task) -> RolloutBoxes:
        return RolloutBoxes(self, task)

    def settings(self, task: Task | None, changes: dict[str, Any]) -> BoxConfig:
        """The recipe's with `changes`, and with the task's columns in the image's name. Raises UserError."""
        from pydantic import ValidationError

        from octetrl.config.box import BoxConfig

        given = {} if self.config is None else self.config.model_dump()
        changed = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
        try:
            config = BoxConfig(**{**given, **changed})
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"box: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if config.image is None or task is None:
            return config
        return config.model_copy(update={"image": image_of(config.image, task)})

    async def open(self, config: BoxConfig) -> Box:
        """Before the first box of a program, those are removed that killed runs have left. Raises BoxError."""
        await asyncio.to_thread(self._sweep, config)
        box = await open_box(config)
        self.running.add(box)
        return box

    def close(self) -> None:
        """End the boxes that still run."""
        start_on_loop(_close(self.running)).result()

    def _sweep(self, config: BoxConfig) -> None:
        with self._lock:
            if config.kind == "bubblewrap" or program_of(config) in self._swept:
                return
            self._swept.append(program_of(config))
            try:
                sweep(config)
            except OSError as error:
                raise BoxError(f"{config.kind}: {error}") from error


async def _close(boxes: Collection[Box]) -> None:
    await asyncio.gather(*(box.close() for box in boxes))


def image_of(name: str, task: Task) -> str:
    """The image with each {column} replaced by the task's. Raises UserError for a column that it lacks."""
    columns = {**task.metadata, "id": task.id}

    def value(found: re.Match[str]) -> str:
        if found[1] not in columns:
            known = ", ".join(columns)
            raise UserError(f"environment.box.image: task {task.id} has no column '{found[1]}'; it has {known}")
        return str(columns[found[1]])

    return re.sub(r"\{(\w+)\}", value, name)


def try_box(config: BoxConfig, task: Task | None, *, calls_policy: bool) -> None:
    """Start a box for the task and run a command in it. calls_policy: programs in it will call the policy. Raises
    UserError if that is not possible."""

    async def tried() -> None:
        boxes = Boxes(config)
        async with await boxes.open(boxes.settings(task, {})) as box:
            if calls_policy:
                await box.forward(_TRIED_PORT)
            result = await box.run(["true"], seconds=60.0)
            if result.code != 0:
                raise BoxError(f"'true' ends with {result.stopped or result.code}: {result.stderr.strip()[-200:]}")

    try:
        asyncio.run(tried())
    except BoxError as error:
        raise UserError(f"environment.box: {error}") from error
