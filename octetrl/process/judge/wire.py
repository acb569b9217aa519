"""The messages between the two sides of a judgement: one JSON line each, with one encoding for each kind of value.

Plain data are values of exactly the types that `pack` knows. They are sent as copies, which the receiver builds itself,
so no code of the sender (a subclass of `int`, an `__eq__`) is transferred. JSON's own types are written as they are,
and everything else as an object with one key that names the type:

    {"tuple": [1, 2]}    {"dict": [["a", 1]]}    {"Fraction": [1, 3]}    {"object": [7, "Point"]}

Any other object stays with the sender, who gives it a number: `object`, `function` (whatever can be called),
`iterator`, `record` (a named tuple, with its items). Both sides run in a sandbox, so only the standard library is
used.

Linked lists and trees of the kind that LeetCode uses are copied, each side with nodes of its own class. A node has a
number, so that shared nodes and cycles stay, `is` works, and a change that the code makes in place is a change of the
tests' own node. Numbers of the tests' nodes are negative, those of the code's nodes are positive:

    {"nodes": [[[-1, "ListNode", [1, {"node": -2}]], [-2, "ListNode", [2, null]]], {"node": -1}]}
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

Code = Callable[[Any], Any]  # encodes or decodes an item
Coding = tuple[Callable[[Any, Code], Any], Callable[[Any, Code], Any]]


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
    if kind in _CODINGS:
        return {kind.__name__: _CODINGS[kind][0](value, inner)}
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


def _sequence(build: Callable[[list[Any]], Any]) -> Coding:
    return (
        lambda value, inner: [inner(item) for item in value],
        lambda given, inner: build([inner(item) for item in given]),
    )


def _mapping(build: Callable[[dict[Any, Any]], Any]) -> Coding:
    return (
        lambda value, inner: [[inner(key), inner(item)] for key, item in value.items()],
        lambda given, inner: build({inner(key): inner(item) for key, item in given}),
    )


def _moment(read: Callable[[str], Any]) -> Coding:
    return lambda value, inner: value.isoformat(), lambda given, inner: read(given)


def _of_default_dict(value: defaultdict[Any, Any], inner: Code) -> Any:
    factory = next((name for name, kind in DATA_TYPES.items() if kind is value.default_factory), None)
    return [factory, [[inner(key), inner(item)] for key, item in value.items()]]


def _to_default_dict(given: Any, inner: Code) -> defaultdict[Any, Any]:
    factory, pairs = given
    items = {inner(key): inner(item) for key, item in pairs}
    return defaultdict(None if factory is None else DATA_TYPES[factory], items)


def _to_decimal(given: Any, inner: Code) -> Decimal:
    if type(given) is not str:
        raise Malformed
    return Decimal(given)


def _to_fraction(given: Any, inner: Code) -> Fraction:
    numerator, denominator = map(inner, given)
    if type(numerator) is not int or type(denominator) is not int:
        raise Malformed  # a text such as 1e999999999 would be worked out
    return Fraction(numerator, denominator)


_CODINGS: dict[type, Coding] = {
    tuple: _sequence(tuple),
    set: _sequence(set),
    frozenset: _sequence(frozenset),
    dict: _mapping(dict),
    OrderedDict: _mapping(OrderedDict),
    Counter: _mapping(Counter),
    defaultdict: (_of_default_dict, _to_default_dict),
    deque: (
        lambda value, inner: [value.maxlen, [inner(item) for item in value]],
        lambda given, inner: deque([inner(item) for item in given[1]], given[0]),
    ),
    type({}.keys()): _sequence(lambda items: dict.fromkeys(items).keys()),
    type({}.values()): _sequence(lambda items: dict(enumerate(items)).values()),
    type({}.items()): _sequence(lambda items: dict(items).items()),
    type(OrderedDict().keys()): _sequence(lambda items: OrderedDict.fromkeys(items).keys()),
    type(OrderedDict().values()): _sequence(lambda items: OrderedDict(enumerate(items)).values()),
    type(OrderedDict().items()): _sequence(lambda items: OrderedDict(items).items()),
    bytes: (lambda value, inner: value.hex(), lambda given, inner: bytes.fromhex(given)),
    bytearray: (lambda value, inner: value.hex(), lambda given, inner: bytearray.fromhex(given)),
    complex: (lambda value, inner: [value.real, value.imag], lambda given, inner: complex(*map(float, given))),
    Fraction: (lambda value, inner: [inner(value.numerator), inner(value.denominator)], _to_fraction),
    Decimal: (lambda value, inner: str(value), _to_decimal),
    range: (
        lambda value, inner: [inner(value.start), inner(value.stop), inner(value.step)],
        lambda given, inner: range(*map(inner, given)),
    ),
    datetime.date: _moment(datetime.date.fromisoformat),
    datetime.datetime: _moment(datetime.datetime.fromisoformat),
    datetime.time: _moment(datetime.time.fromisoformat),
    datetime.timedelta: (
        lambda value, inner: [value.days, value.seconds, value.microseconds],
        lambda given, inner: datetime.timedelta(*map(int, given)),
    ),
}
"""How a value of each type becomes JSON and back, beside JSON's own types."""
_DECODERS: dict[str, Callable[[Any, Code], Any]] = {kind.__name__: decode for kind, (_, decode) in _CODINGS.items()} | {
    "int": lambda given, inner: int(given, 16),
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
        nodes: list[Any] = []
        numbers: set[int] = set()

        def kept(item: Any) -> Any:
            names = NODE_FIELDS.get(type(item).__name__, ())
            if not names or not all(hasattr(item, name) for name in names):  # or a class with fields of its own
                return keep(item)
            number = self._number(item)
            if number not in numbers:
                numbers.add(number)
                nodes.append(item)
            return {"node": number}

        packed = pack(value, kept)
        table: list[Any] = []
        for node in nodes:  # which grows
            table.append([self._number(node), type(node).__name__, [pack(field, kept) for field in _fields(node)]])
        return {"nodes": [table, packed]} if table else packed

    def unpack(self, packed: Any, find: Callable[[str, Any], Any]) -> Any:
        """The value of an encoding. Raises Malformed."""

        def find_node(kind: str, given: Any) -> Any:
            if kind != "node":
                return find(kind, given)
            if type(given) is not int or given not in self._nodes:
                raise Malformed
            return self._nodes[given]

        if not isinstance(packed, dict) or "nodes" not in packed:
            return unpack(packed, find_node)
        try:
            table, value = packed["nodes"]
            rows = [(self._node(number, name), NODE_FIELDS[name], fields) for number, name, fields in table]
            for node, names, fields in rows:
                for name, field in zip(names, fields, strict=True):
                    setattr(node, name, unpack(field, find_node))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise Malformed(str(error)) from None
        return unpack(value, find_node)

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
