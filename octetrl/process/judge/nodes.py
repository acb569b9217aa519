"""Linked lists and trees of the kind that LeetCode uses: they cross between tests and code as plain structures.

Each side has its own copy of a node, of its own class. A node has a number, so that shared nodes and cycles stay, `is`
works, and a change that the code makes in place is a change of the tests' own node:

    {"nodes": [[[-1, "ListNode", [1, {"node": -2}]], [-2, "ListNode", [2, null]]], {"node": -1}]}

Numbers of the tests' nodes are negative, those of the code's nodes are positive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octetrl.process.judge.wire import Malformed, pack, unpack

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
