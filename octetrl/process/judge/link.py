"""The judge's side of the link to the contestant (the model's code), and stand-ins for the contestant's objects.

Every message of the contestant may be an attack. The judge turns it into plain data of exact types, a node of a linked
list or tree (`wire.py`), a stand-in, or a generator of its own, which is read once. None of these can change what the
judge does; a stand-in only answers questions about its object. A message that is not an answer ends the judgement. So
does an answer that is late: the judge counts the seconds that it waits. The judge's tests use the stand-ins:

    BuiltObject  an object that the tests built themselves by calling a class of the code, or such a class. Its class is
                 under test: it has methods, items, length, order, operators
    Remote       any other object of the code's, above all what a call returned. A test may take it for plain data, so
                 it answers nothing that plain data answers: no such method, no item, no length, no order. Comparing it
                 with plain data raises. Its own methods (`deposit`) can be called, its attributes can be read
    Function     a Remote that can be called. Its result is again plain data or a stand-in
    Record       a tuple with named items

An object that the tests built and a call returned (`return self`) has two stand-ins. They are equal, and `is` holds.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import json
import socket
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy, deepcopy
from typing import Any

from octetrl.process.judge.wire import KEPT, LONGEST_LINE, RUN, Malformed, Nodes, pack_global, unpack

_LONGEST_START = 1 << 16  # of the first message, in bytes: that the code has run, or what it raised
_ITEMS_ONE_BY_ONE, _MOST_ITEMS = 8, 1024  # of an iterator, in one message
TESTS, TEST_FILE = "__main__", "test "
"""The name of the tests' module, and the prefix of its file names."""
ENDED = "the program ended"
CHANGES = frozenset(
    {"append", "appendleft", "extend", "extendleft", "insert", "remove", "discard", "clear", "add", "update"}
    | {"subtract", "reverse", "sort", "rotate"}
)
"""Methods of plain data that return nothing: no test learns from their result."""
_PLAIN = (int, float, complex, str, bytes, list, tuple, dict, set, range, Counter, deque)
PLAIN_NAMES = frozenset(name for kind in _PLAIN for name in dir(kind))
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_ORDERS = ("lt", "le", "gt", "ge")
_OTHER_OPERATIONS = ("neg", "pos", "abs", "invert", "getitem", "setitem", "delitem")
_SPECIAL_DATA = ("__name__", "__qualname__", "__doc__", "__dict__", "__module__", "__annotations__")


class Origin:
    """Which object of the contestant's a stand-in is. A plain class, since each verdict would pay for the import of
    dataclasses."""

    __slots__ = ("class_name", "is_class", "items", "link", "number")

    def __init__(self, link: Link, number: int, class_name: str, *, is_class: bool = False) -> None:
        self.link, self.number, self.class_name = link, number, class_name
        self.is_class = is_class  # what the tests call by a name like `Point`
        self.items: Any = None  # all of them, once they are read: an iterator that is only ever copied


class Record(tuple):
    """A named tuple that the code defined."""

    _of_judge: tuple[Origin, tuple[str, ...]]

    def __new__(cls, origin: Origin, names: list[Any], items: list[Any]) -> Record:
        made = super().__new__(cls, items)
        made._of_judge = (origin, tuple(map(str, names)))
        return made

    def __copy__(self) -> Record:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        origin, names = self._of_judge
        return Record(origin, list(names), [deepcopy(item, memo) for item in self])

    def __getattr__(self, name: str) -> Any:
        names = self._of_judge[1]
        if name in names[: len(self)] and name not in PLAIN_NAMES:
            return self[names.index(name)]
        return _attribute(self, name)


class Remote:
    """An object of the code's. It counts as true, and its items are read once and then repeated from memory."""

    __slots__ = ("_of_judge",)

    def __init__(self, origin: Origin) -> None:
        object.__setattr__(self, "_of_judge", origin)

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __iter__(self) -> Iterator[Any]:
        origin = origin_of(self)
        if origin.items is None:
            (origin.items,) = itertools.tee(_iterator(self), 1)
        return copy(origin.items)

    def __str__(self) -> str:
        return str(_typed(_ask(self, "str"), str))

    def __repr__(self) -> str:
        return str(_typed(_ask(self, "repr"), str))

    def __eq__(self, other: object) -> bool:
        """Whether both are one object, or have the same fields. The code's `__eq__` is called only between two objects
        that the tests built themselves."""
        if not isinstance(other, Remote):
            if other is None or isinstance(self, BuiltObject):
                return False
            raise TypeError(f"the code's {origin_of(self).class_name} object is compared with plain data")
        if same(self, other):
            return True
        if isinstance(self, BuiltObject) and isinstance(other, BuiltObject):
            return _ask(self, "eq", other) is True
        mine, theirs = (json.loads(_typed(_ask(side, "contents"), str)) for side in (self, other))
        return mine is not None and bool(mine == theirs)

    def __hash__(self) -> int:
        return hash((origin_of(self).class_name, "of the code"))  # equal objects must have equal hashes

    def __instancecheck__(self, other: object) -> bool:
        is_object = isinstance(other, Remote | Record)
        return is_object and origin_of(self).link.ask("isinstance", other, self) is True

    def __enter__(self) -> Any:
        return _ask(self, "enter")

    def __exit__(self, kind: type | None, error: BaseException | None, place: object) -> None:
        """The code never suppresses an exception, which may be a test's own."""
        _ask(self, "exit", kind and kind.__name__, str(error))


class Function(Remote):
    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, "call", list(args), kwargs)


class BuiltObject(Function):
    """An object that the tests built, or the class that they call for it."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(_iterator(self))

    def __next__(self) -> Any:
        origin = origin_of(self)
        items, ended = origin.link.next_items(origin, 1)
        if ended is not None:
            raise ended
        return items[0]

    def __bool__(self) -> bool:
        return _ask(self, "bool") is True

    def __contains__(self, item: Any) -> bool:
        return _ask(self, "contains", item) is True

    def __len__(self) -> int:
        return int(_typed(_ask(self, "len"), int))


def _operator(name: str, *, is_reflected: bool) -> Callable[[Any, Any], Any]:
    """Between an object and plain data the result must be an object: `Area(3) - 28.3` would be near any number."""

    def applied(self: BuiltObject, other: Any) -> Any:
        left, right = (other, self) if is_reflected else (self, other)
        result = origin_of(self).link.ask(name, left, right)
        if not isinstance(other, Remote) and not isinstance(result, Remote):
            raise TypeError(f"'{name}' of the code's object and plain data gave plain data")
        return result

    return applied


def _order(name: str) -> Callable[[Any, Any], Any]:
    def applied(self: BuiltObject, other: Any) -> Any:
        return _ask(self, name, other) is True if isinstance(other, Remote) else NotImplemented

    return applied


for _name in _BINARY:
    setattr(BuiltObject, f"__{_name}__", _operator(_name, is_reflected=False))
    setattr(BuiltObject, f"__r{_name}__", _operator(_name, is_reflected=True))
for _name in _ORDERS:
    setattr(BuiltObject, f"__{_name}__", _order(_name))
for _name in _OTHER_OPERATIONS:
    setattr(BuiltObject, f"__{_name}__", lambda self, *given, _name=_name: _ask(self, _name, *given))


def same(one: object, other: object) -> bool:
    """`one is other`, for tests: the object counts, and not its stand-in."""
    if isinstance(one, Remote | Record) and isinstance(other, Remote | Record):
        return origin_of(one).number == origin_of(other).number
    return one is other


def origin_of(stand_in: Remote | Record) -> Origin:
    kept = object.__getattribute__(stand_in, "_of_judge")
    return kept[0] if isinstance(stand_in, Record) else kept


def _ask(remote: Remote, operation: str, *given: Any) -> Any:
    return origin_of(remote).link.ask(operation, remote, *given)


def _attribute(owner: Remote | Record, name: str) -> Any:
    origin = origin_of(owner)
    if name.startswith("__") and name not in _SPECIAL_DATA:  # such as numpy's, which takes addresses
        raise AttributeError(f"'{origin.class_name}' object has no attribute '{name}'")
    value = origin.link.ask("get", owner, name)
    is_of_data = name in PLAIN_NAMES - CHANGES and not isinstance(owner, BuiltObject)
    if is_of_data and isinstance(value, Remote | types.GeneratorType):
        raise AttributeError(f"'{origin.class_name}' object is no plain data, which alone may have '{name}' here")
    return value


def _iterator(owner: Remote) -> Any:
    """An iterator over an object, which usually is not an iterator itself."""
    iterator = _ask(owner, "iter")
    if not isinstance(iterator, types.GeneratorType):
        raise TypeError(f"'{origin_of(owner).class_name}' object is not iterable")
    return iterator


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the code gave a {type(value).__name__}, not {kind.__name__}")
    return value


class BrokenTest(Exception):
    """The test can't be run with any code."""


class LinkClosed(BaseException):
    """The contestant has ended. A test's `except Exception` must not catch this, so it is a BaseException."""


class RemoteError(Exception):
    """An exception of a class that the judge does not know."""


class Link:
    """The connection to the contestant, which runs the code at the first question.

    before_code: called just before that; its result, if any, is what is wrong with the test. seconds: how long the
    judge waits for the contestant, all questions together. own: finds the tests' own class for nodes, by its name.
    exceptions: names of the code's classes of exceptions, for which the judge has its own."""

    def __init__(
        self,
        end: socket.socket,
        seconds: float,
        before_code: Callable[[], str | None],
        own: Callable[[str], Any],
        exceptions: Sequence[str],
    ) -> None:
        self._end, self._file = end, end.makefile("rwb")
        self._seconds_left = seconds
        self._before_code = before_code
        self._nodes = Nodes(-1, own)
        self._stand_ins: dict[int, Any] = {}
        self._built: dict[int, BuiltObject] = {}
        self._generators: dict[Generator[Any, Any, Any], Origin] = {}
        self.exceptions = {name: type(name, (RemoteError,), {"__module__": "solution"}) for name in exceptions}
        self._has_answered = False  # with more than names of functions and classes
        self.has_run = self.is_closed = False
        self.broken: str | None = None  # what is wrong with the test, whatever the code does
        self.ended = ENDED  # why, if the link is closed
        self.code_error: Exception | None = None  # what the code raised before any test called it

    def name(self, name: str, *, is_class: bool) -> Any:
        """The code's object with this name. Raises KeyError if there is none."""
        answer = self._exchange("name", [name])
        if "missing" in answer:
            raise KeyError(name)
        value = self._unpacked(answer.get("value"))
        if is_class and isinstance(value, Remote):
            value = BuiltObject(Origin(self, origin_of(value).number, name, is_class=True))
        self._has_answered |= not isinstance(value, Remote)
        return value

    def ask(self, operation: str, *given: Any) -> Any:
        """Let the contestant do an action with `given`, and return the result."""
        answer = self._exchange(operation, self._nodes.pack(list(given), self._packed_stand_in))
        if operation == "call" and "changed" in answer:
            args, kwargs, changed = given[1], given[2], self._unpacked(answer["changed"])
            _take_changes((*args, *kwargs.values()), tuple(changed) if isinstance(changed, list) else ())
        value = self._unpacked(answer.get("value"))
        origin = self._origin(value)
        if origin is None or isinstance(value, Record) or operation not in ("call", "get"):
            return value
        if not origin_of(given[0]).is_class:
            return value
        # without `is_class`: calling a class may return the class itself, whose methods build nothing
        return self._built.setdefault(origin.number, BuiltObject(Origin(self, origin.number, origin.class_name)))

    def next_items(self, origin: Origin, count: int, sent: Any = None) -> tuple[list[Any], Exception | None]:
        """The next `count` items of an iterator at most, and the exception with which it ended, if it has."""
        given = [Remote(origin), count, sent]
        answer = self._exchange("next", self._nodes.pack(given, self._packed_stand_in))
        items = self._unpacked(answer.get("value"))
        ended = None if answer.get("end") is None else self._exception(answer["end"], answer.get("fields"))
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
        caught = dict.fromkeys(self.exceptions[kind] for kind in (name, *above) if kind in self.exceptions)
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
            plain = {name: unpack(value, refuse) for name, value in attributes.items() if not name.startswith("__")}
            given = unpack(args, refuse)
        except (ValueError, TypeError, AttributeError, RecursionError, MemoryError):
            return (), {}
        return (given if type(given) is tuple else ()), plain

    def _unpacked(self, packed: Any) -> Any:
        try:
            return self._nodes.unpack(packed, self._stand_in)
        except (Malformed, RecursionError, MemoryError):
            raise self._closed() from None  # not what `pack` makes: the code wrote to the link itself

    def _stand_in(self, kind: str, given: Any) -> Any:
        """One stand-in for each object of the contestant, and one more in `_built` if the tests built it."""
        match given:
            case [int(number), str(class_name), *rest] if kind in KEPT and type(number) is int:
                if number not in self._stand_ins:
                    self._stand_ins[number] = self._new_stand_in(kind, Origin(self, number, class_name[:100]), rest)
                return self._stand_ins[number]
        raise Malformed

    def _new_stand_in(self, kind: str, origin: Origin, rest: list[Any]) -> Any:
        if kind == "record":
            if len(rest) != 2 or not all(type(part) is list for part in rest):
                raise Malformed
            return Record(origin, rest[0], [self._unpacked(item) for item in rest[1]])
        if kind == "iterator":
            reader = self.read(origin)
            self._generators[reader] = origin
            return reader
        return Function(origin) if kind == "function" else Remote(origin)

    def _origin(self, value: Any) -> Origin | None:
        """The contestant's object that `value` stands for; None: it is plain data, or the tests' own."""
        if isinstance(value, Remote | Record):
            return origin_of(value)
        return self._generators.get(value) if isinstance(value, types.GeneratorType) else None

    def _packed_stand_in(self, value: Any) -> Any:
        if origin := self._origin(value):
            return {"object": origin.number}
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
