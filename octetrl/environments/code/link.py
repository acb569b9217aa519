"""The judge's side of the link to the contestant.

Every message of the contestant (the model's code) may be an attack. The judge turns it into plain data of exact types,
a stand-in (`remote.py`), or a generator of its own, which is read once. None of these can change what the judge does;
a stand-in only answers questions about its object. A message that is not an answer ends the judgement.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import socket
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from octetrl.environments.code.remote import Function, Instance, Origin, Record, Remote, origin_of
from octetrl.environments.code.wire import KEPT, LONGEST_LINE, Malformed, pack, pack_global, unpack

_LONGEST_START = 1 << 16  # of the first message, in bytes: that the code has run, or what it raised
_ITEMS_ONE_BY_ONE, _MOST_ITEMS = 8, 1024  # of an iterator, in one message


TESTS, TEST_FILE = "tests", "test "
"""The name of the tests' module, and the prefix of its file names."""


class BrokenTest(Exception):
    """The test can't be run with any code."""


class LinkClosed(BaseException):
    """The contestant has ended. A test's `except Exception` must not catch this, so it is a BaseException."""


class RemoteError(Exception):
    """An exception of a class that the judge does not know."""


class Link:
    """The connection to the contestant. classes: names that the tests use as classes of the code; at_first_question:
    called before the first answer of the code is used."""

    def __init__(self, end: socket.socket, classes: frozenset[str], at_first_question: Callable[[], None]) -> None:
        self._file = end.makefile("rwb")
        self._at_first_question: Callable[[], None] | None = at_first_question
        self._stand_ins: dict[int, Any] = {}
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of generators
        self._classes = classes | {"Solution"}
        self._classes_are_named = bool(classes - {"Solution"})  # that one wraps a function, by custom
        self._has_answered = False  # with more than names of functions and classes
        self.is_closed = False

    def wait_until_run(self) -> None:
        """Wait until the code has run. Raises the exception that the code raised."""
        self._receive(_LONGEST_START)

    def name(self, name: str) -> Any:
        """The code's object with this name. Raises KeyError if there is none."""
        answer = self._exchange("name", [name])
        if "missing" in answer:
            raise KeyError(name)
        value = None if "module" in answer else self._unpacked(answer.get("value"), is_instance=name in self._classes)
        if name in sys.stdlib_module_names:
            if "module" in answer or type(value) is Remote:
                return importlib.import_module(name)  # the judge's own
            if isinstance(value, Function):
                origin_of(value).is_bare = True
        if isinstance(value, Instance):
            origin_of(value).is_class = name in self._classes
        self._has_answered |= not isinstance(value, Remote) and "module" not in answer
        return value

    def ask(self, operation: str, *given: Any) -> Any:
        """Let the contestant do an action with `given`, and return the result."""
        packed = [pack(item, self._packed_stand_in) for item in given]
        answer = self._exchange(operation, packed)
        if operation == "call" and "changed" in answer:
            args, kwargs, changed = given[1], given[2], self._unpacked(answer["changed"])
            _take_changes((*args, *kwargs.values()), tuple(changed) if isinstance(changed, list) else ())
        is_instance = operation == "call" and origin_of(given[0]).is_class
        return self._unpacked(answer.get("value"), is_instance=is_instance)

    def fields(self, remote: Remote) -> Any:
        """The object's contents, as JSON."""
        return self._exchange("fields", [pack(remote, self._packed_stand_in)]).get("value")

    def next_items(self, origin: Origin, count: int, sent: Any = None) -> tuple[list[Any], Exception | None]:
        """The next `count` items of an iterator at most, and the exception with which it ended, if it has."""
        packed = pack(sent, self._packed_stand_in)
        answer = self._exchange("next", [{"object": origin.number}, count, packed])
        items = self._unpacked(answer.get("value"))
        ended = self._exception(answer["end"]) if "end" in answer else None
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

    def _exchange(self, operation: str, packed: list[Any]) -> dict[str, Any]:
        if self._at_first_question is not None:
            self._at_first_question()
            self._at_first_question = None
        self._has_answered |= operation != "name"
        line = json.dumps([operation, packed]).encode()
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except (OSError, ValueError):
            raise self._closed() from None
        return self._receive()

    def _receive(self, longest: int = LONGEST_LINE) -> dict[str, Any]:
        """The next answer; raised if it is an exception. Any other message ends the judgement."""
        try:
            line = self._file.readline(longest)
            answer = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError, MemoryError):
            answer = None
        if not isinstance(answer, dict):
            raise self._closed()
        if "raised" in answer:
            error = self._exception(answer["raised"])
            if isinstance(error, StopIteration | StopAsyncIteration):  # would end a loop of the test's as a success
                error = RuntimeError(f"the code raised {type(error).__name__}")
            raise error
        return answer

    def _closed(self) -> LinkClosed:
        self.is_closed = True
        self._file.close()
        return LinkClosed()

    def _exception(self, description: Any) -> Exception:
        if (
            not isinstance(description, list)
            or len(description) != 3
            or not all(isinstance(text, str) for text in description)
        ):
            raise self._closed()
        name, known_name, text = description
        known = vars(builtins).get(known_name)
        if isinstance(known, type) and issubclass(known, Exception) and known is not Exception:
            with contextlib.suppress(TypeError):  # some want more than a text
                return known(text)
        return RemoteError(f"{name}: {text}")

    def _unpacked(self, packed: Any, *, is_instance: bool = False) -> Any:
        def stand_in(kind: str, given: Any) -> Any:
            return self._stand_in(kind, given, is_instance=is_instance)

        try:
            return unpack(packed, stand_in)
        except (Malformed, RecursionError, MemoryError):
            raise self._closed() from None  # not what `pack` makes: the code wrote to the link itself

    def _stand_in(self, kind: str, given: Any, *, is_instance: bool) -> Any:
        """One stand-in for each object of the contestant, so that `is` works."""
        if kind not in KEPT or not isinstance(given, list) or len(given) < 2:
            raise Malformed
        number, class_name = given[:2]
        if type(number) is not int or type(class_name) is not str:
            raise Malformed
        if number not in self._stand_ins:
            self._stand_ins[number] = self._made(kind, Origin(self, number, class_name[:100]), given[2:], is_instance)
        return self._stand_ins[number]

    def _made(self, kind: str, origin: Origin, rest: list[Any], is_instance: bool) -> Any:
        if kind == "record":
            if len(rest) != 2 or not all(type(part) is list for part in rest):
                raise Malformed
            return Record(origin, rest[0], [self._unpacked(item) for item in rest[1]])
        if kind != "iterator" and (is_instance or self._classes_are_named):
            origin.is_built = is_instance
            return Instance(origin)
        if kind in ("iterator", "own_iterator"):
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
            raise TypeError(said) if self._has_answered and not _is_of_tests(value) else BrokenTest(said)
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
