"""Both ends of a judgement, each in a sandbox of its own: the contestant has the model's code, the judge the tests.

    judge                                              contestant
    runs the tests, in which each name that the        runs the model's code, answers calls
    model's code defines is a stand-in            <->  one JSON line a call, one an answer, over descriptor 3

What the model's code sees of a test is the arguments of the calls. Expected values, asserts and the verdict are in
another process, which takes nothing from it but plain data (None, numbers, texts, lists, tuples, sets, dicts, bytes,
fractions, decimals). So it can't pass by printing, exiting, replacing builtins or unittest, comparing equal to
everything, or reading the tests from memory. An object of a class of its own stays with the contestant and is called
from afar (`Remote`): it never equals plain data, whatever its `__eq__` says.

Arguments are sent as copies; where a call changed a list, set or dict, the change is sent back. What can't be sent (a
lambda as an argument) is a fault of the test, not of the code. An exception is raised again by its name if it is a
builtin one.

This file is the main program of both sandboxes, so it imports the standard library alone. stdin says which end it is.
"""

from __future__ import annotations

import builtins
import contextlib
import decimal
import fractions
import importlib
import json
import math
import operator
import os
import socket
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_LINK = 3
_LONGEST_ANSWER = 4 << 20  # of one line, in bytes: more is no answer, and would fill the judge's memory
_AS_PLAIN = ("builtins", "collections")  # classes of these are sent as what they extend
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "put": operator.setitem,
    "remove": operator.delitem,
    "len": len,
    "list": list,
    "next": next,
    "str": str,
    "repr": repr,
    "bool": bool,
    "equal": operator.eq,
    "less": operator.lt,
}


class BrokenTest(Exception):
    """The test itself can't be run."""


class LinkClosed(BaseException):
    """The contestant has ended; no `except Exception` of a test may take it for an answer."""


class RemoteError(Exception):
    """An exception of a class that the judge does not know."""


def pack(value: Any, keep: Callable[[Any], int]) -> Any:
    """`value` as JSON; keep: gives a number to what is no plain data and stays here."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [pack(item, keep) for item in value]
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (fractions.Fraction, decimal.Decimal):
        return {kind.__name__: str(value)}
    if kind.__module__ in _AS_PLAIN:
        if isinstance(value, dict):
            return {"dict": [[pack(key, keep), pack(item, keep)] for key, item in value.items()]}
        for name, base in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
            if isinstance(value, base):
                return {name: [pack(item, keep) for item in value]}
        if isinstance(value, bytes | bytearray):
            return {"bytes": value.hex()}
    return {"object": keep(value)}


def unpack(packed: Any, find: Callable[[int], Any]) -> Any:
    """find: what has that number."""
    if isinstance(packed, list):
        return [unpack(item, find) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((name, inner),) = packed.items()
    if name == "object":
        return find(int(inner))
    if name == "dict":
        return {unpack(key, find): unpack(item, find) for key, item in inner}
    if name == "bytes":
        return bytes.fromhex(inner)
    if name == "complex":
        return complex(*inner)
    if name == "module":  # the judge has its own of the same name, if it is of the standard library
        return importlib.import_module(inner) if inner in sys.stdlib_module_names else find(-1)
    if name in ("Fraction", "Decimal"):
        return fractions.Fraction(inner) if name == "Fraction" else decimal.Decimal(inner)
    items = [unpack(item, find) for item in inner]
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[name](items)


# --- the contestant ---------------------------------------------------------------------------------------------------


def contest(source: str) -> None:
    """Run the model's code, then answer calls until the judge hangs up."""
    link = socket.socket(fileno=_LINK).makefile("rwb")
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def say(answer: dict[str, Any]) -> None:
        link.write(json.dumps(answer).encode() + b"\n")
        link.flush()

    solution = types.ModuleType("solution")  # not the main program: what only that runs is left out
    sys.modules["solution"] = solution  # where dataclasses look
    names = vars(solution)
    try:
        exec(compile(source, "solution.py", "exec"), names)
        answer = {"names": pack({name: names[name] for name in list(names) if not name.startswith("__")}, keep)}
    except BaseException as error:  # its sys.exit too
        answer = _raised(error)
    say(answer)
    for line in link:
        try:
            operation, packed = json.loads(line)
            given = unpack(packed, objects.__getitem__)
            value = _OPERATIONS[operation](*given)
            answer = {"value": pack(value, keep)}
            if operation == "call":
                answer["args"] = pack(given[1], keep)
        except BaseException as error:
            answer = _raised(error)
        say(answer)


def _raised(error: BaseException) -> dict[str, Any]:
    text = "no text"
    with contextlib.suppress(BaseException):
        text = str(error)[:500]
    return {"raised": [type(error).__name__, text]}


# --- the judge --------------------------------------------------------------------------------------------------------


class Link:
    """To the contestant."""

    def __init__(self) -> None:
        self._file = socket.socket(fileno=_LINK).makefile("rwb")

    def ask(self, operation: str, *given: Any) -> Any:
        def no_number(value: Any) -> int:
            if isinstance(value, Remote):
                return object.__getattribute__(value, "_number")
            raise BrokenTest(f"a {type(value).__name__} can't be sent to the code; tests may pass plain data alone")

        packed = pack(list(given), no_number)
        line = json.dumps([operation, packed]).encode()
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError:
            raise LinkClosed from None
        answer = self.receive()
        changed = answer.get("args", [])
        if operation == "call" and changed != packed[1]:
            for mine, theirs in zip(given[1], self.unpacked(changed), strict=False):
                _take_changes(mine, theirs)
        return self.unpacked(answer.get("value"))

    def receive(self) -> dict[str, Any]:
        """The next answer, raised where it is an exception. Whatever is no answer ends the contest."""
        try:
            line = self._file.readline(_LONGEST_ANSWER)
            answer = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise LinkClosed
        if "raised" in answer:
            raise _exception(*map(str, answer["raised"]))
        return answer

    def unpacked(self, packed: Any) -> Any:
        try:
            return unpack(packed, lambda number: Remote(self, number))
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, ImportError):
            raise LinkClosed from None  # not what `pack` makes: the code wrote to the link itself


def _exception(name: str = "", text: str = "", *_: str) -> Exception:
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):  # some want more than a text
            return known(text)
    return RemoteError(f"{name}: {text}")


class Remote:
    """What stays with the contestant, called from afar."""

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def _ask(self, operation: str, *given: Any) -> Any:
        return object.__getattribute__(self, "_link").ask(operation, self, *given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("put", key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("remove", key)

    def __contains__(self, item: Any) -> bool:
        return any(one == item for one in self)  # here: what is looked for is nothing that the code need know

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._ask("list")))

    def __next__(self) -> Any:
        return self._ask("next")

    def __bool__(self) -> bool:
        return self._ask("bool") is True

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __lt__(self, other: Any) -> bool:
        return isinstance(other, Remote) and self._ask("less", other) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._ask("equal", other) is True

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))


def _take_changes(mine: Any, theirs: Any) -> None:
    """What the call did to an argument."""
    if type(mine) is type(theirs) and isinstance(mine, list):
        mine[:] = theirs
    elif type(mine) is type(theirs) and isinstance(mine, set | dict):
        mine.clear()
        mine.update(theirs)


def judge(form: str, cases: list[Any], function: str | None) -> dict[str, Any]:
    """Which cases pass, as a text of 0 and 1, and why the first that fails does; or which test is `broken`, and how."""
    link = Link()
    passed, why = "", None
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        theirs = link.unpacked(link.receive().get("names"))
        # a builtin is never the code's, unless the task says that it is what is tested
        names |= {name: value for name, value in theirs.items() if name == function or not hasattr(builtins, name)}
    except LinkClosed:
        return {"passed": "0" * len(cases), "why": "the program ended"}
    except Exception as error:
        return {"passed": "0" * len(cases), "why": f"the code raises {_told(error)}"}
    for number, case in enumerate(cases, 1):
        reason = None
        try:
            if form == "asserts":
                exec(compile(case, f"test {number}", "exec"), names)
            else:
                given = eval(str(function), names)(*case["args"], **case.get("kwargs", {}))
                reason = None if alike(given, case["expected"]) else "wrong"
        except LinkClosed:
            why = why or f"test {number}: the program ended"
            break
        except BrokenTest as error:
            return {"broken": f"test {number}: {error}"}
        except BaseException as error:
            reason = _told(error)
        passed += "1" if reason is None else "0"
        why = why if reason is None else why or f"test {number}: {reason}"
    return {"passed": passed.ljust(len(cases), "0"), "why": why}


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return type(error).__name__ + (f": {text}" if text else "")


def alike(given: Any, expected: Any) -> bool:
    """`expected` is JSON: a tuple counts as a list, a float is equal to nine digits, a key of a dict is a text."""
    if isinstance(given, Remote):
        return False
    if isinstance(given, bool) or isinstance(expected, bool) or given is None or expected is None:
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        if isinstance(given, int) and isinstance(expected, int):
            return given == expected
        return given == expected or math.isclose(given, expected, rel_tol=1e-9)
    if isinstance(expected, list):
        if not isinstance(given, list | tuple) or len(given) != len(expected):
            return False
        return all(alike(one, other) for one, other in zip(given, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(given, dict) or len(given) != len(expected):
            return False
        texts = {str(key): value for key, value in given.items()}
        return texts.keys() == expected.keys() and all(alike(texts[key], expected[key]) for key in expected)
    return type(given) is type(expected) and bool(given == expected)


def main() -> None:
    order = json.loads(sys.stdin.read())
    if "source" in order:
        contest(order["source"])
        os._exit(0)  # whatever threads it has left
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # tests may print
        verdict = judge(order["form"], order["cases"], order["function"])
    print(json.dumps(verdict))


if __name__ == "__main__":
    main()
