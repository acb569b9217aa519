"""Foreign code with a time limit: whatever it does, it comes to something, and others are not held up."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.environments import calls as calls_module
from octetrl.environments.calls import CallResult, Calls
from octetrl.environments.turns import Conversation
from octetrl.records import Task
from octetrl.system.errors import UserError


@pytest.fixture
def calls() -> Iterator[Calls]:
    calls_ended.clear()
    released.clear()
    made = Calls()
    yield made
    released.set()
    made.close()


def all_of(calls: Calls, *functions: Callable[..., Any], seconds: float = 60.0) -> list[CallResult]:
    """What these come to; of others, what is pending stays so unless it ends meanwhile."""
    tickets = [calls.start(function, (), seconds=seconds) for function in functions]
    found: dict[int, CallResult] = {}
    while not set(tickets) <= set(found):
        found |= dict(calls.poll(5.0))
    calls_ended.update(found)
    return [found[ticket] for ticket in tickets]


calls_ended: dict[int, CallResult] = {}
released = threading.Event()  # ends what waits for longer than it should
gate = threading.Lock()


def sync_seven() -> int:
    return 7


async def async_seven() -> int:
    await asyncio.sleep(0.01)
    return 7


class OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def odd() -> None:
    raise OddError


async def async_leave() -> None:
    sys.exit("leaving")


async def cancelled() -> None:
    raise asyncio.CancelledError


async def blocks() -> None:
    with gate:  # where an asyncio.Lock was meant
        pass


def test_functions_of_both_kinds_give_their_value(calls: Calls) -> None:
    async def loop() -> int:
        return id(asyncio.get_running_loop())

    assert [called.value for called in all_of(calls, sync_seven, async_seven, lambda: async_seven())] == [7, 7, 7]
    assert len({called.value for called in all_of(calls, loop, loop)}) == 1


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda: sys.exit("leaving"), r"SystemExit: leaving \(test_calls.py:\d+\)"),
        (async_leave, r"SystemExit: leaving \(test_calls.py:\d+\)"),
        (cancelled, "CancelledError"),
        (odd, "OddError"),
        (lambda: {}["x"], r"KeyError: 'x' \(test_calls.py:\d+\)"),
    ],
)
def test_whatever_is_raised_is_an_answer(function: Callable[..., Any], error: str, calls: Calls) -> None:
    (called,) = all_of(calls, function)
    assert called.error is not None and not called.timed_out
    assert re.match(error, called.error), called.error
    assert [one.value for one in all_of(calls, sync_seven, async_seven)] == [7, 7]


def test_a_call_that_hangs_is_abandoned_and_others_go_on(calls: Calls) -> None:
    async def sleeps() -> None:
        await asyncio.sleep(600)

    stuck = [calls.start(function, (), seconds=1.5) for function in (lambda: released.wait(600), sleeps)]
    assert [one.value for one in all_of(calls, sync_seven, async_seven)] == [7, 7]
    found: dict[int, CallResult] = {}
    while len(found) < 2:
        found |= dict(calls.poll(5.0))
    assert [found[ticket].timed_out for ticket in stuck] == [True, True]
    assert "sleeps returned nothing in 1.5 s" in str(found[stuck[1]].error)
    assert calls.abandoned == 2


def test_what_came_in_time_counts_though_nobody_looked(calls: Calls) -> None:
    ticket = calls.start(sync_seven, (), seconds=0.5)
    while calls._done.empty():  # it has come; only then is its time over
        time.sleep(0.01)
    time.sleep(0.6)
    assert calls.poll(0.0) == [(ticket, CallResult(7))]


def test_async_code_that_stops_its_loop_stops_nothing(calls: Calls) -> None:
    async def stops() -> int:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return 7

    assert [one.value for one in (*all_of(calls, stops), *all_of(calls, async_seven))] == [7, 7]


def test_async_code_that_blocks_the_loop_is_found_out(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "_LOOP_ANSWERS_WITHIN", 0.3)
    begun, blocked, freed = (threading.Event() for _ in range(3))

    async def waits() -> int:
        begun.set()
        while not freed.is_set():
            await asyncio.sleep(0.01)
        return 7

    async def blocks_here() -> None:
        blocked.set()
        await blocks()

    innocent = calls.start(waits, (), seconds=120.0)
    assert begun.wait(60.0)
    gate.acquire()
    ticket = calls.start(blocks_here, (), seconds=0.2)
    assert blocked.wait(60.0)  # before anybody looks whether its time is over
    while ticket not in calls_ended:
        calls_ended.update(calls.poll(5.0))
    called = calls_ended[ticket]
    assert called.timed_out
    assert "async code blocks the event loop (test_calls.py:" in str(called.error)
    assert "where an asyncio.Lock was meant" in str(called.trace)
    assert [one.value for one in all_of(calls, async_seven)] == [7]  # on a new loop
    assert innocent not in calls_ended
    freed.set()
    gate.release()
    while calls_ended.get(innocent) is None:  # on the old one, when that is free again
        calls_ended.update(calls.poll(5.0))
    assert calls_ended[innocent] == CallResult(7)


def test_a_hundred_threads_wait_at_once(calls: Calls) -> None:
    """As `asyncio.to_thread` would not let them, with its few."""

    hundred = threading.Barrier(100)  # nobody leaves it before all are there

    async def waits() -> int:
        return await asyncio.to_thread(hundred.wait, 60.0)

    together = all_of(calls, *[waits] * 50, *[lambda: hundred.wait(60.0)] * 50, seconds=90.0)
    assert sorted(called.value for called in together) == list(range(100))


def test_a_tool_may_ask_whose_it_is(calls: Calls) -> None:
    mine = Conversation(Task(id="mine", prompt="?"), random.Random(0))

    async def asks() -> list[str]:
        return [Conversation.current().task.id, await asyncio.to_thread(lambda: Conversation.current().task.id)]

    calls.start(asks, (), seconds=60.0, conversation=mine)
    calls.start(lambda: Conversation.current().task.id, (), seconds=60.0, conversation=mine)
    found: list[Any] = []
    while len(found) < 2:
        found += [called.value for _, called in calls.poll(5.0)]
    assert ["mine", "mine"] in found and "mine" in found
    with pytest.raises(UserError, match="no conversation runs here"):
        Conversation.current()


def test_a_hanging_call_does_not_keep_the_interpreter_from_ending() -> None:
    program = (
        "import time, asyncio\n"
        "from octetrl.environments.calls import Calls\n"
        "async def hang(): await asyncio.to_thread(time.sleep, 60)\n"
        "calls = Calls()\n"
        "calls.start(time.sleep, (60,), seconds=0.1); calls.start(hang, (), seconds=0.1)\n"
        "time.sleep(0.2); print(len(calls.poll(1.0))); calls.close()\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.stderr, run.returncode) == ("2\n", "", 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: os.chdir("/"), "was '"),
        (lambda: torch.set_default_dtype(torch.float64), "float64"),
        (lambda: setattr(sys, "stdout", None), r"sys\.stdout"),
        (lambda: setattr(sys, "stderr", None), r"sys\.stderr"),
    ],
)
def test_what_the_whole_process_has_is_put_back_and_refused(
    change: Callable[[], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = Calls()
    calls.start(change, (), seconds=60.0)
    with pytest.raises(UserError, match=said):
        calls.poll(60.0)
    assert (Path.cwd(), torch.get_default_dtype()) == (tmp_path, torch.float32)
    assert sys.stdout is not None and sys.stderr is not None
    calls.start(int, (), seconds=60.0)
    assert [called.value for _, called in calls.poll(60.0)] == [0]
    calls.close()
