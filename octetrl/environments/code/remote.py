"""Stand-ins for objects that stay with the contestant (the model's code). The judge creates them; its tests use them.

    Function     can be called. Its result is again plain data or a stand-in
    Record       a tuple with named items
    Remote       an object of a class of the code's. It never equals plain data, and another object only where all
                 their fields are equal; its `__eq__` is asked only between two that the tests built themselves
    Instance     the same where the tests name a class of the code (a name like `Point`): with items, length, order

Only plain data has the operations of texts, numbers, lists and dicts, unless the tests name a class. Otherwise an
object whose `startswith` returns True, or whose items change between two reads, would pass without a right answer.
"""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Generator, Iterator
from typing import Any, Protocol

_NAMES_OF_DATA = frozenset(
    name for kind in (int, float, str, bytes, list, tuple, dict, set, range, Counter, deque) for name in dir(kind)
)
_OPERATORS = frozenset(name for name in _NAMES_OF_DATA if name.startswith("__")) | {"__call__", "__next__"}
_SPECIAL_DATA = ("__name__", "__qualname__", "__doc__", "__dict__", "__module__", "__annotations__")
_NO_STAND_IN_HAS = ("__deepcopy__", "__copy__", "__reduce__", "__getstate__", "__setstate__", "__index__")


class Asks(Protocol):
    """The part of `link.Link` that stand-ins use."""

    def ask(self, operation: str, *given: Any) -> Any: ...

    def fields(self, remote: Any) -> Any: ...

    def next_items(self, origin: Any, count: int) -> tuple[list[Any], Exception | None]: ...


class Origin:
    """Of a stand-in: which object of the contestant's it is, and what may be asked of it. A plain class, since each
    verdict would pay for the import of dataclasses."""

    __slots__ = ("class_name", "is_bare", "is_built", "is_class", "items", "link", "number", "reader")

    def __init__(self, link: Asks, number: int, class_name: str) -> None:
        self.link, self.number, self.class_name = link, number, class_name
        self.is_class = False  # what the tests call by a name like `Point`
        self.is_built = False  # by a call of the tests to such a class
        self.is_bare = False  # a function that is named like a module, and must not be taken for it
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
        if name in names[: len(self)] and name not in _NAMES_OF_DATA:
            return self[names.index(name)]
        return _attribute(self, name)


class Remote:
    """An object of a class that the code defined."""

    __slots__ = ("_of_judge",)

    def __init__(self, origin: Origin) -> None:
        object.__setattr__(self, "_of_judge", origin)

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __iter__(self) -> Iterator[Any]:
        """An iterable whose items are read once and then repeated from memory."""
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

    def __bool__(self) -> bool:
        return _ask(self, "bool") is True

    def __str__(self) -> str:
        return str(_typed(_ask(self, "str"), str))

    def __repr__(self) -> str:
        return str(_typed(_ask(self, "repr"), str))

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Remote):
            return self is other
        link = origin_of(self).link
        if origin_of(self).is_built and origin_of(other).is_built:  # a test of the class itself
            return link.ask("equal", self, other) is True
        mine = link.fields(self)
        return _has_fields(mine) and bool(mine == link.fields(other))

    def __hash__(self) -> int:
        return hash((origin_of(self).class_name, "of the code"))  # equal objects must have equal hashes


class Function(Remote):
    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, "call", list(args), kwargs)


class Instance(Function):
    """An object of a class that the tests name, or such a class."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return _iterator(self)

    def __next__(self) -> Any:
        origin = origin_of(self)
        items, ended = origin.link.next_items(origin, 1)
        if ended is not None:
            raise ended
        return items[0]

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "put", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "remove", key)

    def __contains__(self, item: Any) -> bool:
        return any(one == item for one in self)  # here: what is looked for is nothing that the code need know

    def __len__(self) -> int:
        return int(_typed(_ask(self, "len"), int))

    def __lt__(self, other: Any) -> bool:
        return isinstance(other, Remote) and _ask(self, "less", other) is True


def origin_of(stand_in: Remote | Record) -> Origin:
    kept = object.__getattribute__(stand_in, "_of_judge")
    return kept[0] if isinstance(stand_in, Record) else kept


def _ask(remote: Remote, operation: str, *given: Any) -> Any:
    return origin_of(remote).link.ask(operation, remote, *given)


def _attribute(owner: Remote | Record, name: str) -> Any:
    origin, is_free = origin_of(owner), isinstance(owner, Instance)
    is_special = name.startswith("__") and name not in _SPECIAL_DATA
    is_protocol = is_special and not (is_free and name in _OPERATORS)  # such as numpy's, which takes addresses
    if origin.is_bare or name in _NO_STAND_IN_HAS or is_protocol:
        raise AttributeError(f"'{origin.class_name}' object has no attribute '{name}'")
    value = origin.link.ask("get", owner, name)
    if not is_free and name in _NAMES_OF_DATA and isinstance(value, Remote | types.GeneratorType):
        raise AttributeError(f"'{origin.class_name}' object is no plain data, which alone may have '{name}' here")
    return value


def _iterator(owner: Remote) -> Any:
    """An iterator over an object, which usually is not an iterator itself."""
    found = _ask(owner, "iter")
    if not isinstance(found, types.GeneratorType | Instance):
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
