"""Calls code that we did not write: many calls in flight at once, each with a time limit.

    ticket = calls.start(environment.reply, (conversation,), seconds=30.0)
    for ticket, called in calls.poll(0.1): ...

An async function runs on one event loop, in a thread of its own, that lives as long as the run, so a client that it
keeps open serves every step. Any other function gets a thread of its own for each call. Neither runs in the thread that
runs the rollout. That thread checks the time limits in `poll`, so the run continues whatever a call does. An exception,
also SystemExit, is the result of its call.

Rewards run in processes instead. Here a conversation's state, open connections and the tools that share them would have
to cross a process boundary in every turn. The cost is that nothing can be killed. A function that hangs is abandoned.
Its thread lives on until it returns or the run ends; it never prevents the run from ending. Long computations slow the
step down, because they share its interpreter. Code that crashes the interpreter or fills the memory ends the run. Code
with that risk belongs in `score`, which runs in a process, or in a sandbox.

An async function that blocks (`time.sleep` instead of `asyncio.sleep`) blocks the loop and everything on it. If a
call's time is over and the loop does not answer either, later calls get a new loop. The error names the line that
blocks the old one.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from octetrl.environments.scoring import logged
from octetrl.environments.turns import Conversation, current
from octetrl.system.errors import UserError, error_line, error_trace

_LOOP_ANSWERS_WITHIN = 2.0  # seconds


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
        now, changes = self.now(), []
        if now.folder != self.folder:
            os.chdir(self.folder)
            changes.append(f"the working directory is '{now.folder}', was '{self.folder}': use absolute paths")
        torch = sys.modules.get("torch")
        if torch is not None and now.dtype != (dtype := self.dtype or torch.float32):
            torch.set_default_dtype(dtype)
            changes.append(f"torch's default dtype is {now.dtype}, was {dtype}: give each tensor its dtype")
        for name in ("stdout", "stderr"):
            if getattr(now, name) is None is not getattr(self, name):
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


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call. `error` is None if the function returned; `raised`: what it raised instead."""

    value: Any = None
    raised: BaseException | None = None
    error: str | None = None  # one line
    trace: str | None = None
    timed_out: bool = False


@dataclass(slots=True, eq=False)
class _Pending:
    function: Callable[..., Any]
    ends: float
    seconds: float
    task: Future[Any] | None = None  # on the loop; None: in a thread


class Calls:
    """Calls in flight. One thread starts and polls them; `close` abandons those that still run."""

    def __init__(self) -> None:
        self._done: queue.SimpleQueue[tuple[int, CallResult]] = queue.SimpleQueue()
        self._pending: dict[int, _Pending] = {}  # by ticket
        self._tickets = itertools.count()
        self._loop: _Loop | None = None
        self._given_up: list[_Loop] = []
        self._process = ProcessState.now()
        self.abandoned = 0  # calls whose time was over

    def start(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        seconds: float,
        conversation: Conversation | None = None,
    ) -> int:
        """Start `function(*args)` and return its ticket. Tools inside the call can read `conversation`."""
        ticket = next(self._tickets)
        pending = _Pending(function, time.monotonic() + seconds, seconds)
        self._pending[ticket] = pending
        context = contextvars.copy_context()
        if conversation is not None:
            context.run(current.set, conversation)
            context.run(logged.set, conversation.logged)
        if inspect.iscoroutinefunction(function):
            self._loop = self._loop or _Loop()
            pending.task = self._loop.run(partial(self._await, ticket, function, args), context)
        else:
            run, name = partial(context.run, self._run, ticket, function, args), f"environment call {ticket}"
            threading.Thread(target=run, name=name, daemon=True).start()
        return ticket

    def poll(self, wait: float) -> list[tuple[int, CallResult]]:
        """Tickets and results of finished calls, in that order. Waits up to `wait` seconds for the first.

        Raises UserError if a call changed what the whole process has (`ProcessState`), which is put back."""
        now = time.monotonic()
        due = min((pending.ends for pending in self._pending.values()), default=now + wait)
        results = self._take(max(0.0, min(wait, due - now)))
        if changes := self._process.put_back():
            raise UserError(f"the code of environment or reward changed the run's process: {'; '.join(changes)}")
        now = time.monotonic()
        late = [ticket for ticket, pending in self._pending.items() if pending.ends <= now]
        results += self._take(0.0) if late else []  # what arrived in time but was not read yet
        return results + [(ticket, self._abandon(ticket)) for ticket in late if ticket in self._pending]

    def wake(self) -> None:
        """End the wait of `poll`. Any thread may call it."""
        self._done.put((-1, CallResult()))

    def forget(self) -> None:
        """Drop all calls in flight: their results will not be returned."""
        self._pending.clear()

    def close(self) -> None:
        self.forget()
        for loop in (self._loop, *self._given_up):
            if loop is not None:
                loop.stop()
        self._loop, self._given_up = None, []

    def _take(self, wait: float) -> list[tuple[int, CallResult]]:
        results: list[tuple[int, CallResult]] = []
        try:
            item = self._done.get(timeout=wait) if wait > 0 else self._done.get_nowait()
            while True:
                if self._pending.pop(item[0], None) is not None:  # not one that was abandoned
                    results.append(item)
                item = self._done.get_nowait()
        except queue.Empty:
            return results

    def _abandon(self, ticket: int) -> CallResult:
        pending = self._pending.pop(ticket)
        self.abandoned += 1
        name = getattr(pending.function, "__name__", type(pending.function).__name__)
        error = f"TimeoutError: {name} returned nothing in {pending.seconds:g} s"
        if pending.task is None or self._loop is None:
            return CallResult(error=error, timed_out=True)
        pending.task.cancel()
        if self._loop.answers(_LOOP_ANSWERS_WITHIN):
            return CallResult(error=error, timed_out=True)
        where, trace = self._loop.current_line()
        self._given_up.append(self._loop)  # its other calls may still finish
        self._loop = None
        text = f"{error}; async code blocks the event loop ({where}): await what it waits for"
        return CallResult(error=text, trace=trace, timed_out=True)

    def _run(self, ticket: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            value = function(*args)
            if inspect.iscoroutine(value):  # of a function that does not look async
                value = asyncio.run(value)
            called = CallResult(value)
        except BaseException as error:
            called = CallResult(raised=error, error=error_line(error), trace=error_trace(error))
        self._done.put((ticket, called))

    async def _await(self, ticket: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            called = CallResult(await function(*args))
        except BaseException as error:  # also a cancelled call, whose result is dropped
            called = CallResult(raised=error, error=error_line(error), trace=error_trace(error))
        self._done.put((ticket, called))


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop, self._is_over = asyncio.new_event_loop(), False
        self._loop.set_default_executor(_ThreadEach())
        self._thread = threading.Thread(target=self._serve, name="environments", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over:  # a coroutine may have stopped the loop
            self._loop.run_forever()
        self._loop.close()

    def run(self, make: Callable[[], Coroutine[Any, Any, None]], context: contextvars.Context) -> Future[Any]:
        return context.run(asyncio.run_coroutine_threadsafe, make(), self._loop)

    def answers(self, seconds: float) -> bool:
        """Whether the loop runs a new callback within that time."""
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(seconds)

    def current_line(self) -> tuple[str, str]:
        """The line that the loop's thread executes, and its whole stack."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        if not stack:
            return "it is gone", ""
        return f"{Path(stack[-1].filename).name}:{stack[-1].lineno}", "".join(traceback.format_list(stack)).strip()

    def stop(self) -> None:
        """Stop the loop when its current callback ends. Does not wait."""
        self._loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._is_over = True
        self._loop.call_soon(self._loop.stop)


class _ThreadEach(ThreadPoolExecutor):
    """Executor for `asyncio.to_thread`: a thread for each call, which does not keep the interpreter from ending."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="environment thread", daemon=True).start()
        return future
