"""The messages between the two sides of a judgement: one JSON line each, with one encoding for each kind of value.

Plain data are values of exactly the types that `pack` knows. They are sent as copies, which the receiver builds itself,
so no code of the sender (a subclass of `int`, an `__eq__`) is transferred. JSON's own types are written as they are,
and everything else as an object with one key that names the type:

    {"tuple": [1, 2]}    {"dict": [["a", 1]]}    {"Fraction": [1, 3]}    {"object": [7, "Point"]}

Any other object stays with the sender, who gives it a number: `object`, `function` (whatever can be called),
`iterator`, `record` (a named tuple, with its items). Nodes of lists and trees are copied (`nodes.py`). Both sides run
in a sandbox, so only the standard library is used.
"""

from __future__ import annotations

import datetime
import importlib
import operator
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

LONGEST_LINE = 4 << 20
"""Longest message from the code, in bytes. A longer one ends the judgement, to protect the judge's memory."""
DATA_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)
}
KEPT = ("object", "function", "iterator", "record")
RUN = "run"
"""The judge's first message: run the code, and answer when it has run."""
_LARGEST_DECIMAL = 1 << 1000  # integers beyond travel as hexadecimal: Python refuses to read long decimal ones

Pack = Callable[[Any], Any]
Unpack = Callable[[Any], Any]


class Malformed(ValueError):
    """A message that `pack` does not make."""


def pack(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode `value` for JSON. keep: encodes objects that are not plain data."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -_LARGEST_DECIMAL < value < _LARGEST_DECIMAL else {"int": hex(value)}

    def inner(item: Any) -> Any:
        return pack(item, keep)

    if kind is list:
        return [pack(item, keep) for item in value]
    if kind in _ENCODERS:
        return {kind.__name__: _ENCODERS[kind](value, inner)}
    if isinstance(value, type) and DATA_TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    return keep(value)


def unpack(packed: Any, find: Callable[[str, Any], Any]) -> Any:
    """The value of an encoding. find: what stands for a value of the KEPT kinds. Raises Malformed."""
    kind = type(packed)
    if packed is None or kind in (bool, int, float, str):
        return packed
    if kind is list:
        return [unpack(item, find) for item in packed]
    if kind is not dict or len(packed) != 1:
        raise Malformed

    def inner(item: Any) -> Any:
        return unpack(item, find)

    ((name, given),) = packed.items()
    if name not in _DECODERS:
        return find(name, given)
    try:
        return _DECODERS[name](given, inner)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        raise Malformed(str(error)) from None


def pack_global(value: Any) -> Any:
    """A function or class of the standard library, by its name; None: `value` is none."""
    if (
        isinstance(value, types.MethodDescriptorType)
        and DATA_TYPES.get(value.__objclass__.__name__) is value.__objclass__
    ):
        return {"global": ["builtins", value.__qualname__]}  # such as str.lower
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(value, type | types.BuiltinFunctionType | types.FunctionType) or not isinstance(module, str):
        return None
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    try:
        is_found = getattr(importlib.import_module(module), str(name), None) is value
    except ImportError:
        return None
    return {"global": [module, name]} if is_found else None


def unpack_global(given: Any) -> Any:
    """For the code alone: the judge accepts no function by name."""
    module, name = given
    return operator.attrgetter(name)(importlib.import_module(module))


def _items(value: Any, inner: Pack) -> list[Any]:
    return [inner(item) for item in value]


def _pairs(value: Any, inner: Pack) -> list[Any]:
    return [[inner(key), inner(item)] for key, item in value.items()]


def _to_dict(given: Any, inner: Unpack) -> dict[Any, Any]:
    return {inner(key): inner(item) for key, item in given}


def _to_list(given: Any, inner: Unpack) -> list[Any]:
    return [inner(item) for item in given]


def _to_counter(given: Any, inner: Unpack) -> Counter[Any]:
    return Counter(_to_dict(given, inner))


def _to_defaultdict(given: Any, inner: Unpack) -> defaultdict[Any, Any]:
    factory, pairs = given
    return defaultdict(None if factory is None else DATA_TYPES[factory], _to_dict(pairs, inner))


def _factory(value: defaultdict[Any, Any]) -> str | None:
    return next((name for name, kind in DATA_TYPES.items() if kind is value.default_factory), None)


def _to_decimal(given: Any, inner: Unpack) -> Decimal:
    if type(given) is not str:
        raise Malformed
    return Decimal(given)


def _to_fraction(given: Any, inner: Unpack) -> Fraction:
    numerator, denominator = map(inner, given)
    if type(numerator) is not int or type(denominator) is not int:
        raise Malformed  # a text such as 1e999999999 would be worked out
    return Fraction(numerator, denominator)


def _moment(value: datetime.datetime | datetime.date | datetime.time, inner: Pack) -> str:
    return value.isoformat()


_ENCODERS: dict[type, Callable[[Any, Pack], Any]] = {
    tuple: _items,
    set: _items,
    frozenset: _items,
    dict: _pairs,
    OrderedDict: _pairs,
    Counter: _pairs,
    defaultdict: lambda value, inner: [_factory(value), _pairs(value, inner)],
    deque: lambda value, inner: [value.maxlen, _items(value, inner)],
    type({}.keys()): _items,
    type({}.values()): _items,
    type({}.items()): _items,
    type(OrderedDict().keys()): _items,
    type(OrderedDict().values()): _items,
    type(OrderedDict().items()): _items,
    bytes: lambda value, inner: value.hex(),
    bytearray: lambda value, inner: value.hex(),
    complex: lambda value, inner: [value.real, value.imag],
    Fraction: lambda value, inner: [inner(value.numerator), inner(value.denominator)],
    Decimal: lambda value, inner: str(value),
    range: lambda value, inner: [inner(value.start), inner(value.stop), inner(value.step)],
    datetime.date: _moment,
    datetime.datetime: _moment,
    datetime.time: _moment,
    datetime.timedelta: lambda value, inner: [value.days, value.seconds, value.microseconds],
}
_DECODERS: dict[str, Callable[[Any, Unpack], Any]] = {
    "int": lambda given, inner: int(given, 16),
    "tuple": lambda given, inner: tuple(_to_list(given, inner)),
    "set": lambda given, inner: set(_to_list(given, inner)),
    "frozenset": lambda given, inner: frozenset(_to_list(given, inner)),
    "dict": _to_dict,
    "OrderedDict": lambda given, inner: OrderedDict(_to_dict(given, inner)),
    "Counter": _to_counter,
    "defaultdict": _to_defaultdict,
    "deque": lambda given, inner: deque(_to_list(given[1], inner), given[0]),
    "dict_keys": lambda given, inner: dict.fromkeys(_to_list(given, inner)).keys(),
    "dict_values": lambda given, inner: dict(enumerate(_to_list(given, inner))).values(),
    "dict_items": lambda given, inner: dict(_to_list(given, inner)).items(),
    "odict_keys": lambda given, inner: OrderedDict.fromkeys(_to_list(given, inner)).keys(),
    "odict_values": lambda given, inner: OrderedDict(enumerate(_to_list(given, inner))).values(),
    "odict_items": lambda given, inner: OrderedDict(_to_list(given, inner)).items(),
    "bytes": lambda given, inner: bytes.fromhex(given),
    "bytearray": lambda given, inner: bytearray.fromhex(given),
    "complex": lambda given, inner: complex(*map(float, given)),
    "Fraction": _to_fraction,
    "Decimal": _to_decimal,
    "range": lambda given, inner: range(*map(inner, given)),
    "date": lambda given, inner: datetime.date.fromisoformat(given),
    "datetime": lambda given, inner: datetime.datetime.fromisoformat(given),
    "time": lambda given, inner: datetime.time.fromisoformat(given),
    "timedelta": lambda given, inner: datetime.timedelta(*map(int, given)),
    "type": lambda given, inner: DATA_TYPES[given],
}
