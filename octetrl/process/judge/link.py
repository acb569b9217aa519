"""The judge's side of the link to the contestant.

Every message of the contestant (the model's code) may be an attack. The judge turns it into plain data of exact types,
a node of a linked list or tree (`nodes.py`), a stand-in (`remote.py`), or a generator of its own, which is read once.
None of these can change what the judge does; a stand-in only answers questions about its object. A message that is not
an answer ends the judgement. So does an answer that is late: the judge counts the seconds that it waits.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import socket
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from octetrl.process.judge.remote import BuiltObject, Function, Origin, Record, Remote, origin_of
from octetrl.process.judge.wire import KEPT, LONGEST_LINE, RUN, Malformed, Nodes, pack_global, unpack

_LONGEST_START = 1 << 16  # of the first message, in bytes: that the code has run, or what it raised
_ITEMS_ONE_BY_ONE, _MOST_ITEMS = 8, 1024  # of an iterator, in one message
TESTS, TEST_FILE = "__main__", "test "
"""The name of the tests' module, and the prefix of its file names."""


ENDED = "the program ended"


class BrokenTest(Exception):
    """The test can't be run with any code."""


class LinkClosed(BaseException):
    """The contestant has ended. A test's `except Exception` must not catch this, so it is a BaseException."""


class RemoteError(Exception):
    """An exception of a class that the judge does not know."""


class Link:
    """The connection to the contestant, which runs the code at the first question.

    before_code: called just before that; its result, if any, is what is wrong with the test. seconds: how long the
    judge waits for the contestant, all questions together. own: finds the tests' own class for nodes, by its name."""

    def __init__(
        self, end: socket.socket, seconds: float, before_code: Callable[[], str | None], own: Callable[[str], Any]
    ) -> None:
        self._end, self._file = end, end.makefile("rwb")
        self._seconds_left = seconds
        self._before_code = before_code
        self._nodes = Nodes(-1, own)
        self._stand_ins: dict[tuple[int, bool], Any] = {}
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of generators
        self._exceptions: dict[str, type[Exception]] = {}
        self._has_answered = False  # with more than names of functions and classes
        self.has_run = self.is_closed = False
        self.broken: str | None = None  # what is wrong with the test, whatever the code does
        self.ended = ENDED  # why, if the link is closed
        self.code_error: Exception | None = None  # what the code raised before any test called it

    def name(self, name: str, *, is_class: bool) -> Any:
        """The code's object with this name. Raises KeyError if there is none."""
        answer = self._exchange("name", [name])
        if "missing" in answer or "module" in answer:
            raise KeyError(name)
        value = self._unpacked(answer.get("value"))
        if is_class and isinstance(value, Remote):
            value = BuiltObject(Origin(self, origin_of(value).number, name, is_class=True))
        self._has_answered |= not isinstance(value, Remote)
        return value

    def exception(self, name: str) -> type[Exception]:
        """The judge's own class for exceptions of a class of the code's."""
        return self._exceptions.setdefault(name, type(name, (RemoteError,), {"__module__": "solution"}))

    def ask(self, operation: str, *given: Any) -> Any:
        """Let the contestant do an action with `given`, and return the result."""
        answer = self._exchange(operation, self._nodes.pack(list(given), self._packed_stand_in))
        if operation == "call" and "changed" in answer:
            args, kwargs, changed = given[1], given[2], self._unpacked(answer["changed"])
            _take_changes((*args, *kwargs.values()), tuple(changed) if isinstance(changed, list) else ())
        is_built = operation in ("call", "get") and origin_of(given[0]).is_class
        return self._unpacked(answer.get("value"), is_built=is_built)

    def fields(self, remote: Remote) -> Any:
        """The object's contents, as JSON."""
        return self._exchange("fields", [self._packed_stand_in(remote)]).get("value")

    def next_items(self, origin: Origin, count: int, sent: Any = None) -> tuple[list[Any], Exception | None]:
        """The next `count` items of an iterator at most, and the exception with which it ended, if it has."""
        given = [Remote(origin), count, sent]
        answer = self._exchange("next", self._nodes.pack(given, self._packed_stand_in))
        items = self._unpacked(answer.get("value"))
        ended = self._exception(answer["end"], answer.get("fields")) if "end" in answer else None
        if not isinstance(items, list) or not (items or ended):
            raise self._closed()
        return items, ended

    def read(self, origin: Origin) -> Generator[Any, Any, Any]:
        """A generator of the items of a contestant's iterator. The first items are fetched one by one, because the code
        that produces them may have side effects."""
        taken, sent, was_sent = 0, None, False
        while True:
            one_by_one = taken < _ITEMS_ONE_BY_ONE or was_sent
            items, ended = self.next_items(origin, 1 if one_by_one else min(taken, _MOST_ITEMS), sent)
            for item in items:
                taken += 1
                sent = yield item
                was_sent |= sent is not None
            if isinstance(ended, StopIteration):
                return
            if ended is not None:
                raise ended

    def _exchange(self, operation: str, packed: Any) -> dict[str, Any]:
        if not self.has_run:
            self._run_code()
        self._has_answered |= operation != "name"
        answer = self._answered([operation, packed], LONGEST_LINE)
        if "raised" in answer:
            error = self._exception(answer["raised"], answer.get("fields"))
            if isinstance(error, StopIteration | StopAsyncIteration):  # would end a loop of the test's as a success
                error = RuntimeError(f"the code raised {type(error).__name__}")
            raise error
        return answer

    def _run_code(self) -> None:
        """Let the contestant run the code. An exception of its own ends the judgement: no test may catch it."""
        if fault := self._before_code():
            raise self._broken_test(fault)
        self.has_run = True
        answer = self._answered(RUN, _LONGEST_START)
        if "raised" in answer:
            self.code_error = self._exception(answer["raised"], answer.get("fields"))
            raise self._closed()

    def _answered(self, question: Any, longest: int) -> dict[str, Any]:
        """The contestant's answer. Any other message ends the judgement."""
        line, began = json.dumps(question).encode(), time.monotonic()
        try:
            self._end.settimeout(max(0.001, self._seconds_left))
            self._file.write(line + b"\n")
            self._file.flush()
            line = self._file.readline(longest)
            answer = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            self.ended = "wall_timeout" if isinstance(error, TimeoutError) else self.ended
            answer = None
        self._seconds_left -= time.monotonic() - began
        if not isinstance(answer, dict):
            raise self._closed()
        return answer

    def _closed(self) -> LinkClosed:
        self.is_closed = True
        with contextlib.suppress(OSError, ValueError):  # what was not sent
            self._file.close()
        return LinkClosed()

    def _broken_test(self, fault: str) -> BrokenTest:
        self.broken = fault
        return BrokenTest(fault)

    def _exception(self, description: Any, fields: Any) -> Exception:
        is_text = isinstance(description, list) and all(isinstance(text, str) for text in description)
        if not is_text or len(description) < 3:
            raise self._closed()
        name, known_name, text, *above = description
        known: Any = vars(builtins).get(known_name)
        if not isinstance(known, type) or not issubclass(known, Exception) or known is Exception:
            known = None
        caught = dict.fromkeys(self._exceptions[one] for one in (name, *above) if one in self._exceptions)
        given, attributes = self._plain_fields(fields)
        kind: Any = known
        if caught:
            with contextlib.suppress(TypeError, ValueError):  # some can't be bases together
                kind = type(name, (*caught, *([known] if known else [])), {})
        for args in (given, (text,)) if kind else ():
            with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError):  # some want more than a text
                made: Exception = kind(*args)
                if str(made) == text or args is not given:
                    vars(made).update(attributes)
                    return made
        return RemoteError(f"{name}: {text}")

    def _plain_fields(self, fields: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An exception's arguments and attributes, of plain data alone."""

        def refuse(kind: str, given: Any) -> Any:
            raise Malformed

        try:
            args, attributes = fields
            found = {name: unpack(value, refuse) for name, value in attributes.items() if not name.startswith("__")}
            given = unpack(args, refuse)
        except (ValueError, TypeError, AttributeError, RecursionError, MemoryError):
            return (), {}
        return (given if type(given) is tuple else ()), found

    def _unpacked(self, packed: Any, *, is_built: bool = False) -> Any:
        """is_built: whether `packed` itself, if it is an object, is one that the tests built."""
        try:
            if is_built and isinstance(packed, dict) and len(packed) == 1 and set(packed) <= {*KEPT} - {"record"}:
                ((kind, given),) = packed.items()
                return self._stand_in(kind, given, is_built=True)
            return self._nodes.unpack(packed, self._stand_in)
        except (Malformed, RecursionError, MemoryError):
            raise self._closed() from None  # not what `pack` makes: the code wrote to the link itself

    def _stand_in(self, kind: str, given: Any, *, is_built: bool = False) -> Any:
        """One stand-in for each object of the contestant, and one more if the tests built it. Neither has `is_class`:
        calling a class may return the class itself, whose methods build nothing."""
        if kind not in KEPT or not isinstance(given, list) or len(given) < 2:
            raise Malformed
        number, class_name = given[:2]
        if type(number) is not int or type(class_name) is not str:
            raise Malformed
        if (number, is_built) not in self._stand_ins:
            origin = Origin(self, number, class_name[:100])
            self._stand_ins[number, is_built] = BuiltObject(origin) if is_built else self._made(kind, origin, given[2:])
        return self._stand_ins[number, is_built]

    def _made(self, kind: str, origin: Origin, rest: list[Any]) -> Any:
        if kind == "record":
            if len(rest) != 2 or not all(type(part) is list for part in rest):
                raise Malformed
            return Record(origin, rest[0], [self._unpacked(item) for item in rest[1]])
        if kind == "iterator":
            reader = self.read(origin)
            self._numbers[reader] = origin.number
            return reader
        return Function(origin) if kind == "function" else Remote(origin)

    def _packed_stand_in(self, value: Any) -> Any:
        if isinstance(value, Remote | Record):
            return {"object": origin_of(value).number}
        if isinstance(value, types.GeneratorType) and value in self._numbers:
            return {"object": self._numbers[value]}
        packed = pack_global(value)
        if packed is None:
            said = f"a {type(value).__name__} can't be sent to the code; tests may pass plain data alone"
            # what the tests made of an answer may be of any type that the code chose: then the answer is wrong
            if self._has_answered and not _is_of_tests(value):
                raise TypeError(said)
            raise self._broken_test(said)
        return packed


def _is_of_tests(value: Any) -> bool:
    """Whether the tests define the type themselves, so that it can't be sent whatever the code answers."""
    if isinstance(value, types.GeneratorType):
        return value.gi_code.co_filename.startswith(TEST_FILE)
    return isinstance(value, types.ModuleType) or getattr(value, "__module__", None) == TESTS


def _take_changes(mine: Any, theirs: Any) -> None:
    """Copy the call's changes of its arguments back into the tests' own containers."""
    if type(mine) is not type(theirs):
        return
    if type(mine) is tuple:
        for one, other in zip(mine, theirs, strict=False):
            _take_changes(one, other)
    elif isinstance(mine, list | bytearray):
        mine[:] = theirs
    elif isinstance(mine, deque):
        mine.clear()
        mine.extend(theirs)
    elif isinstance(mine, set | dict):
        mine.clear()
        mine.update(theirs)
