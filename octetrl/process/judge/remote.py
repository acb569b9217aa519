"""Stand-ins for objects that stay with the contestant (the model's code). The judge creates them; its tests use them.

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

import types
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

CHANGES = frozenset(
    {"append", "appendleft", "extend", "extendleft", "insert", "remove", "discard", "clear", "add", "update"}
    | {"subtract", "reverse", "sort", "rotate"}
)
"""Methods of plain data that return nothing: no test learns from their result."""
_PLAIN = (int, float, complex, str, bytes, list, tuple, dict, set, range, Counter, deque)
PLAIN_NAMES = frozenset(name for kind in _PLAIN for name in dir(kind))
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_ORDERS = ("lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert")
_SPECIAL_DATA = ("__name__", "__qualname__", "__doc__", "__dict__", "__module__", "__annotations__")


class Asks(Protocol):
    """The part of `link.Link` that stand-ins use."""

    def ask(self, operation: str, *given: Any) -> Any: ...

    def fields(self, remote: Any) -> Any: ...

    def next_items(self, origin: Any, count: int) -> tuple[list[Any], Exception | None]: ...


class Origin:
    """Of a stand-in: which object of the contestant's it is. A plain class, since each verdict would pay for the import
    of dataclasses."""

    __slots__ = ("class_name", "is_class", "items", "link", "number", "reader")

    def __init__(self, link: Asks, number: int, class_name: str, *, is_class: bool = False) -> None:
        self.link, self.number, self.class_name = link, number, class_name
        self.is_class = is_class  # what the tests call by a name like `Point`
        self.items: list[Any] = []  # those read so far
        self.reader: Generator[Any, Any, Any] | None = None


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
        from copy import deepcopy  # which the test has imported

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
        if origin.reader is None:
            origin.reader = _iterator(self)
        at = 0
        while True:
            if at == len(origin.items):
                for item in origin.reader:
                    origin.items.append(item)
                    break
                else:
                    return
            yield origin.items[at]
            at += 1

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
        link = origin_of(self).link
        if isinstance(self, BuiltObject) and isinstance(other, BuiltObject):
            return link.ask("eq", self, other) is True
        mine = link.fields(self)
        return _has_fields(mine) and bool(mine == link.fields(other))

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

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "delitem", key)

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
for _name in _UNARY:
    setattr(BuiltObject, f"__{_name}__", lambda self, _name=_name: _ask(self, _name))


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
    found = _ask(owner, "iter")
    if not isinstance(found, types.GeneratorType):
        raise TypeError(f"'{origin_of(owner).class_name}' object is not iterable")
    return found


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the code gave a {type(value).__name__}, not {kind.__name__}")
    return value


def _has_fields(description: Any) -> bool:
    """Objects without fields are equal only to themselves."""
    return isinstance(description, dict) and bool(
        description.get("fields") or "holds" in description or "member" in description
    )
