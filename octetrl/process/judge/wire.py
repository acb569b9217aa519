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


NODE_FIELDS: dict[str, tuple[str, ...]] = {"ListNode": ("val", "next"), "TreeNode": ("val", "left", "right")}


class _Node:
    """Equal to a node of the same structure."""

    def __eq__(self, other: object) -> bool:
        pairs: list[tuple[Any, Any]] = [(self, other)]
        seen: set[tuple[int, int]] = set()
        while pairs:
            one, two = pairs.pop()
            if (id(one), id(two)) in seen or one is two:
                continue
            seen.add((id(one), id(two)))
            if not isinstance(one, _Node) and not isinstance(two, _Node) and one == two:
                continue
            if type(one) is not type(two) or not isinstance(one, _Node):
                return False
            pairs += zip(_fields(one), _fields(two), strict=True)
        return True

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__.get('val')!r})"


class ListNode(_Node):
    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val, self.next = val, next


class TreeNode(_Node):
    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val, self.left, self.right = val, left, right


CLASSES: dict[str, type] = {"ListNode": ListNode, "TreeNode": TreeNode}
"""The classes where tests or code define none of their own."""


class Nodes:
    """One side's nodes. first: the number of its own first node, 1 or -1; own: the names of its program, which may have
    classes of its own for the nodes."""

    def __init__(self, first: int, own: Callable[[str], Any]) -> None:
        self._next, self._step, self._own = first, first, own
        self._nodes: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # by id, which stays unique while the node is kept

    def pack(self, value: Any, keep: Callable[[Any], Any]) -> Any:
        """`value` as `wire.pack` encodes it, with all nodes that it leads to."""
        found: list[Any] = []
        numbers: set[int] = set()

        def kept(item: Any) -> Any:
            names = NODE_FIELDS.get(type(item).__name__, ())
            if not names or not all(hasattr(item, name) for name in names):  # or a class with fields of its own
                return keep(item)
            number = self._number(item)
            if number not in numbers:
                numbers.add(number)
                found.append(item)
            return {"node": number}

        packed = pack(value, kept)
        table: list[Any] = []
        for node in found:  # which grows
            table.append([self._number(node), type(node).__name__, [pack(field, kept) for field in _fields(node)]])
        return {"nodes": [table, packed]} if table else packed

    def unpack(self, packed: Any, find: Callable[[str, Any], Any]) -> Any:
        """The value of an encoding. Raises Malformed."""

        def found(kind: str, given: Any) -> Any:
            if kind != "node":
                return find(kind, given)
            if type(given) is not int or given not in self._nodes:
                raise Malformed
            return self._nodes[given]

        if not isinstance(packed, dict) or "nodes" not in packed:
            return unpack(packed, found)
        try:
            table, value = packed["nodes"]
            rows = [(self._node(number, name), NODE_FIELDS[name], fields) for number, name, fields in table]
            for node, names, fields in rows:
                for name, field in zip(names, fields, strict=True):
                    setattr(node, name, unpack(field, found))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise Malformed(str(error)) from None
        return unpack(value, found)

    def _number(self, node: Any) -> int:
        number = self._numbers.get(id(node))
        if number is None:
            number, self._next = self._next, self._next + self._step
            self._nodes[number], self._numbers[id(node)] = node, number
        return number

    def _node(self, number: Any, name: str) -> Any:
        if type(number) is not int or (number * self._step > 0 and number not in self._nodes):
            raise Malformed  # a node of this side that never left it
        if number not in self._nodes:
            own = self._own(name)
            kind: Any = own if isinstance(own, type) else CLASSES[name]
            node = self._nodes[number] = kind.__new__(kind)
            self._numbers[id(node)] = number
        return self._nodes[number]


def _fields(node: Any) -> list[Any]:
    return [getattr(node, name) for name in NODE_FIELDS[type(node).__name__]]
