"""The boxes of an environment: each belongs to a rollout and ends with it, after its rewards.

boxes = Boxes(recipe.environment.box)
own = boxes.of(task);   box = await own.open(image="swe:1");   own.lost();   await own.close()
boxes.close()                                                  at the end of the run
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import ValidationError

from octetrl.boxes.box import Box, BoxError
from octetrl.boxes.bubblewrap import BubblewrapBox
from octetrl.boxes.containers import Container, sweep
from octetrl.config.box import BoxConfig
from octetrl.records import Task
from octetrl.system.errors import UserError

_ENDING = 16  # boxes that end at once
_TRIED_PORT = 40_000  # in a box where nothing else runs


async def open_box(config: BoxConfig) -> Box:
    """Start a box. Raises BoxError."""
    box = _made(config)
    try:
        await asyncio.to_thread(box.start)
    except BaseException:  # cancelled, too
        await asyncio.shield(box.close())
        raise
    return box


def _made(config: BoxConfig) -> Box:
    if sys.platform != "linux":
        raise BoxError(f"boxes need Linux, this is {sys.platform}")
    return BubblewrapBox(config) if config.kind == "bubblewrap" else Container(config)


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
        await asyncio.gather(*(box.close() for box in self.opened))
        self._owner.forget(self.opened)


class Boxes:
    """Those of an environment. config: the recipe's, None if it has none."""

    def __init__(self, config: BoxConfig | None) -> None:
        self.config = config
        self._open: list[Box] = []
        self._swept: dict[tuple[str, ...], BoxConfig] = {}
        self._lock = threading.Lock()

    def of(self, task: Task) -> RolloutBoxes:
        return RolloutBoxes(self, task)

    def settings(self, task: Task | None, changes: dict[str, Any]) -> BoxConfig:
        """The recipe's with `changes`, and with the task's columns in the image's name. Raises UserError."""
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
        await asyncio.to_thread(self._sweep, config)
        box = await open_box(config)
        with self._lock:
            self._open.append(box)
        return box

    def forget(self, closed: Sequence[Box]) -> None:
        with self._lock:
            self._open = [box for box in self._open if box not in closed]

    def close(self) -> None:
        """End the boxes that are still open, and those that earlier runs left."""
        with ThreadPoolExecutor(_ENDING) as threads:
            list(threads.map(Box.end, self._open))
        self._open = []
        for config in self._swept.values():
            with contextlib.suppress(BoxError):  # what makes them is gone, and all boxes of this run have been ended
                _swept(config)

    def _sweep(self, config: BoxConfig) -> None:
        """Before the first box of a program."""
        program = (config.kind, *(config.program or ()))
        with self._lock:
            if program not in self._swept and config.kind != "bubblewrap":
                self._swept[program] = config
                _swept(config)


def _swept(config: BoxConfig) -> None:
    try:
        sweep(config)
    except OSError as error:
        raise BoxError(f"{config.kind}: {error}") from error


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
