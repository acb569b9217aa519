"""The code's side of a judgement: runs the model's code (the contestant) when the judge asks, then answers its calls.

It is the main program of a sandbox of its own. The model's code runs in the same process, so nothing
here is a protection: the code may change this program or write to the socket itself. The judge's side must therefore
treat every message as an attack (`link.py`).
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import json
import operator
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from octetrl.process.judge.wire import CLASSES, Nodes, pack, unpack_global

_LINK = 3
_LONGEST_FIELDS = 1 << 12  # of an exception
_LATE_SECONDS = 0.5  # that the code may still run after the judge stopped waiting
_BASES = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset)
_UNORDERED = ("set", "frozenset", "dict", "Counter", "defaultdict")


def contest(source: str, seconds: float) -> None:
    """Wait for the first message, run the code, report whether it ran, then answer calls until the judge closes the
    socket. seconds: how long the judge waits for all answers together; the process ends when it waits no longer."""
    link = socket.socket(fileno=_LINK).makefile("rwb")
    solution = types.ModuleType("solution")  # not "__main__": code for the main program alone does not run
    sys.modules["solution"] = solution  # dataclasses look up the module here
    vars(solution).update(CLASSES)  # which the code need not define
    desk = _Desk(vars(solution))
    for number, line in enumerate(link):
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(0.0, seconds) + _LATE_SECONDS)
        if number == 0:
            answer = _answered(lambda: exec(compile(source, "solution.py", "exec"), vars(solution)))
        else:
            answer = desk.answer(line)
        signal.setitimer(signal.ITIMER_REAL, 0)
        seconds -= time.monotonic() - began
        link.write(json.dumps(answer).encode() + b"\n")
        link.flush()


def _answered(action: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": action()}
    except BaseException as error:  # its sys.exit too
        return {"raised": _described(error), "fields": _plain_fields(error)}


def _described(error: BaseException) -> list[str]:
    """The exception's class, its nearest builtin base class, its text, and the classes above it."""
    text = "no text"
    with contextlib.suppress(BaseException):
        text = str(error)[:500]
    known = next(kind.__name__ for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind)
    return [type(error).__name__, known, text, *(kind.__name__ for kind in type(error).__mro__[1:])]


def _plain_fields(error: BaseException) -> list[Any]:
    """The exception's arguments and attributes, as far as they are plain data."""

    def refuse(value: Any) -> Any:
        raise TypeError(type(value).__name__)

    fields: list[Any] = [None, {}]
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        fields[0] = pack(error.args, refuse)
    for name, value in getattr(error, "__dict__", {}).items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            fields[1][name] = pack(value, refuse)
    return fields if len(json.dumps(fields)) < _LONGEST_FIELDS else [None, {}]


class _Desk:
    """Answers calls, and keeps the objects that are not sent as plain data."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._nodes = Nodes(1, names.get)
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}  # by id, which stays unique while the object is kept
        self._operations: dict[str, Callable[..., Any]] = {
            "get": getattr,
            "set": setattr,
            "len": len,
            "iter": iter,
            "str": str,
            "repr": repr,
            "bool": bool,
            "isinstance": isinstance,
            "contents": _contents,
            "enter": lambda target: type(target).__enter__(target),
            "exit": _leave,
            "and": operator.and_,
            "or": operator.or_,
        }

    def answer(self, line: bytes) -> dict[str, Any]:
        answer = _answered(lambda: self._done(*json.loads(line)))
        return answer.get("value", answer)

    def _done(self, operation: str, packed: Any) -> dict[str, Any]:
        given = self._nodes.unpack(packed, self._find)
        if operation == "name":
            value = self._names.get(given[0], types)  # a module that the code imports is no name of its own
            return {"missing": True} if isinstance(value, types.ModuleType) else {"value": self._packed(value)}
        if operation == "next":
            return self._next(*given)
        if operation != "call":
            operate = self._operations.get(operation) or getattr(operator, operation)
            return {"value": self._packed(operate(*given))}
        args = [*given[1], *given[2].values()]
        was = self._packed(args)
        value = given[0](*given[1], **given[2])
        changed = self._packed(args)
        return {"value": self._packed(value)} | ({} if changed == was else {"changed": changed})

    def _packed(self, value: Any) -> Any:
        return self._nodes.pack(value, self._keep)

    def _next(self, iterator: Any, count: int, sent: Any) -> dict[str, Any]:
        """As many as `count` items, and how it ended if it did. sent: what the generator gets for its `yield`."""
        items: list[Any] = []

        def take() -> None:
            while len(items) < count:
                items.append(next(iterator) if sent is None else iterator.send(sent))

        ended = _answered(take)
        return {"value": self._packed(items), "end": ended.get("raised"), "fields": ended.get("fields")}

    def _find(self, kind: str, given: Any) -> Any:
        return unpack_global(given) if kind == "global" else self._kept[given]

    def _keep(self, value: Any) -> dict[str, Any]:
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return pack(value.item(), self._keep)  # a number, which a test may calculate with
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number == len(self._kept):
            self._kept.append(value)
        name = type(value).__name__
        fields = getattr(type(value), "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple):
            return {"record": [number, name, list(fields), [self._packed(item) for item in value]]}
        if hasattr(type(value), "__next__"):
            return {"iterator": [number, name]}
        return {"function" if callable(value) else "object": [number, name]}


def _leave(target: Any, name: str | None, text: str) -> None:
    """Leave a `with` block, which ended by an exception of that name or by none."""
    error = None if name is None else getattr(builtins, name, Exception)(text)
    type(target).__exit__(target, error and type(error), error, None)


def _contents(value: Any) -> str:
    """What an object holds, as JSON for a comparison; null: nothing, so it is equal only to itself."""
    fields = _ordered(_fields(value, []))
    return json.dumps(fields if fields.get("fields") or "holds" in fields or "member" in fields else None)


def _fields(value: Any, above: list[Any]) -> Any:
    """`value` as plain data: its class, its attributes, and what it holds as a list, number or text. A reference to an
    object around itself is written as the distance to that object."""
    depth = next((len(above) - at for at, outer in enumerate(above) if outer is value), 0)
    if depth:
        return {"above": depth}
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType):
        return {"named": getattr(value, "__qualname__", None) or value.__name__}
    if isinstance(value, enum.Enum):
        return {"member": [type(value).__name__, value.name]}

    def inner(kept: Any) -> Any:
        return _fields(kept, [*above, value])

    description: dict[str, Any] = {"class": type(value).__name__, "fields": []}
    names = {*getattr(value, "__dict__", {}), *_slots(type(value))}
    if compared := getattr(type(value), "__dataclass_fields__", None):
        names = {name for name, field in compared.items() if field.compare}
    for name in sorted(name for name in names if not name.startswith("__")):
        with contextlib.suppress(AttributeError):  # a slot that is not filled
            description["fields"].append([name, pack(object.__getattribute__(value, name), inner)])
    base = next((base for base in _BASES if isinstance(value, base)), None)
    return description if base is None else description | {"holds": pack(base(value), inner)}


def _slots(kind: type) -> set[str]:
    declared = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return {name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)}


def _ordered(packed: Any) -> Any:
    """Sets and dicts in an order of their own."""
    if isinstance(packed, list):
        return [_ordered(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    inner = {name: _ordered(item) for name, item in packed.items()}
    return {name: sorted(item, key=repr) if name in _UNORDERED else item for name, item in inner.items()}


def main() -> None:
    contest(**json.loads(sys.stdin.read()))
    os._exit(0)  # whatever threads it has left
