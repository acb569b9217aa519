"""The encoding between code and judge: every value arrives equal and of its own type, and no message does harm."""

from __future__ import annotations

import datetime
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.process.judge.wire import KEPT, ListNode, Malformed, Nodes, TreeNode, pack, pack_global, unpack
from octetrl.process.plain_data import from_text, to_text

VALUES: list[Any] = [
    None, True, 0, -(10**400), 10**5000, 0.1, math.inf, "", "\ud800\x00é", b"\xff", bytearray(b"a"), 1j,
    [1, [2]], (1, (2,)), {1, "a"}, frozenset({2}), {(1, 2): {3: None}}, OrderedDict(b=1, a=2), Counter("aab"),
    defaultdict(list, {1: [2]}), defaultdict(None), deque([1, 2], 3), deque(), range(1, 9, 2), Fraction(1, 3),
    Fraction(1, 3**900), Decimal("1.50"), Decimal("-Infinity"), datetime.date(2024, 2, 29), datetime.time(1, 2, 3),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.timedelta(-1, 5, 6), int, dict,
]  # fmt: skip


class Odd(Exception):
    pass


def refuse(*_: Any) -> Any:
    raise Odd


def travelled(value: Any) -> Any:
    return unpack(json.loads(json.dumps(pack(value, refuse))), refuse)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    arrived = travelled(value)
    assert arrived == value
    assert type(arrived) is type(value)
    assert list(arrived) == list(value) if isinstance(value, OrderedDict) else True
    assert getattr(arrived, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(arrived, "default_factory", None) is getattr(value, "default_factory", None)


def test_views_of_a_dict_arrive() -> None:
    given = {"a": 1, "b": 2}
    assert travelled(given.keys()) == given.keys()
    assert travelled(given.items()) == given.items()
    assert list(travelled(given.values())) == [1, 2]
    assert math.isnan(travelled(math.nan))


def test_an_extended_type_is_no_plain_data_and_only_the_standard_library_goes_by_name() -> None:
    """Its `__eq__` would judge."""
    for kind in (int, float, str, list, dict, set, tuple, Fraction, Decimal, deque):
        with pytest.raises(Odd):
            pack(type("Mine", (kind,), {})(), refuse)
    assert pack_global(math.sqrt) == {"global": ["math", "sqrt"]}
    assert pack_global(len) == {"global": ["builtins", "len"]}
    for value in (travelled, Odd, lambda: 0, "len", pytest.raises):
        assert pack_global(value) is None
    own = type("ListNode", (), {})()
    own.value = 3
    with pytest.raises(Odd):
        sides()[0].pack(own, refuse)


WRONG: list[Any] = [
    None, -1, 1e308, "x", "1e999999999", [], [[]], {}, {"a": 1, "b": 2}, {"global": ["os", "system"]}, {"set": [[1]]},
    {"object": [0, "P"]}, {"Decimal": "sNaN"}, {"Fraction": [1, 0]}, {"deque": [-1, []]}, {"dict": [[[], 1]]},
    {"range": [0, 1, 0]}, {"complex": ["x", 2]}, {"date": "2024-99-01"}, {"type": "type"}, {"record": [0]},
    {"timedelta": [10**99, 0, 0]}, {"defaultdict": ["exec", []]},
]  # fmt: skip
KINDS = [*KEPT, "tuple", "set", "Counter", "int", "bytes"]


def mutated(packed: Any, rng: random.Random) -> Any:
    """`packed` with some of its parts replaced by others, of a wrong kind more often than not."""
    if rng.random() < 0.15:
        return rng.choice(WRONG)
    if isinstance(packed, list):
        return [mutated(item, rng) for item in packed]
    if isinstance(packed, dict):
        return {rng.choice([name] * 4 + [rng.choice(KINDS)]): mutated(inner, rng) for name, inner in packed.items()}
    return packed


def test_any_message_is_a_value_or_malformed() -> None:
    """And what it becomes can be sent back, so that no answer turns a test into one that can't be run."""
    rng = random.Random(0)
    packed = [pack(value, refuse) for value in VALUES]
    made = 0
    for _ in range(4000):
        message = json.loads(json.dumps(mutated(rng.choice(packed), rng)))
        try:
            value = unpack(message, lambda kind, given: ("stand-in", kind))
        except Malformed:
            continue
        made += 1
        pack(value, refuse)
    assert 500 < made < 3900


def sides() -> tuple[Nodes, Nodes]:
    return Nodes(-1, lambda name: None), Nodes(1, lambda name: None)


def sent(sender: Nodes, receiver: Nodes, value: Any) -> Any:
    return receiver.unpack(json.loads(json.dumps(sender.pack(value, refuse))), refuse)


def test_a_ring_arrives_and_comes_back_as_the_same_nodes() -> None:
    tests, code = sides()
    last = ListNode(2)
    ring = last.next = ListNode(1, last)
    copy, number = sent(tests, code, (ring, 7))
    assert (copy.val, copy.next.val, number) == (1, 2, 7)
    assert copy.next.next is copy and copy is not ring
    copy.next.val, copy.next.next = 3, TreeNode(5, None, TreeNode(6))
    assert sent(code, tests, copy) is ring
    assert last.val == 3 and last.next == TreeNode(5, None, TreeNode(6))


def test_equality_is_of_structure() -> None:
    assert ListNode(1, ListNode(2)) == ListNode(1, ListNode(2))
    assert ListNode(1, ListNode(2)) != ListNode(1, ListNode(3))
    assert ListNode(1) != TreeNode(1) and ListNode(1) != 1 and TreeNode(1) != None  # noqa: E711
    one, two = ListNode(1), ListNode(1, ListNode(1))
    one.next = one
    two.next.next = two
    assert one == two


@pytest.mark.parametrize(
    "message",
    [
        {"node": -1},
        {"node": "x"},
        {"nodes": []},
        {"nodes": [[[-5, "ListNode", [1, None]]], {"node": -5}]},
        {"nodes": [[[True, "ListNode", [1, None]]], 1]},
        {"nodes": [[[1, "Names", [1, None]]], {"node": 1}]},
        {"nodes": [[[1, ["x"], [1, None]]], {"node": 1}]},
        {"nodes": [[[1, "ListNode", [1]]], {"node": 1}]},
        {"nodes": [[[1, "ListNode", [1, {"node": 2}]]], {"node": 1}]},
        {"nodes": [7, {"node": 1}]},
    ],
)
def test_a_message_that_is_none(message: Any) -> None:
    """Above all a node of the tests that they never sent."""
    tests, _ = sides()
    with pytest.raises(Malformed):
        tests.unpack(message, refuse)


KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["~tuple", "~dict", "~", "call"])
LEAVES = KEYS | st.floats(allow_nan=False) | st.binary()
PLAIN = st.recursive(
    LEAVES | st.tuples(KEYS, KEYS) | st.sets(KEYS) | st.frozensets(KEYS),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS | st.tuples(KEYS), inner),
    max_leaves=12,
)


def types_of(value: Any) -> Any:
    """1, 1.0 and True are equal; what they are is compared as well."""
    if isinstance(value, dict):
        return [(types_of(key), types_of(each)) for key, each in value.items()]
    return type(value), [types_of(each) for each in value] if isinstance(value, list | tuple) else None


@settings(max_examples=50, deadline=None)
@given(PLAIN)
def test_it_comes_back_as_it_was(value: object) -> None:
    found = from_text(to_text(value))
    assert found == value and types_of(found) == types_of(value)


def test_odd_numbers_and_numpys() -> None:
    assert math.isnan(from_text(to_text(math.nan))) and from_text(to_text(-math.inf)) == -math.inf
    found = from_text(to_text([numpy.int64(3), numpy.float32(0.5), numpy.str_("x")]))
    assert found == [3, 0.5, "x"] and types_of(found) == types_of([3, 0.5, "x"])


@pytest.mark.parametrize("value", [object(), print, {"a": [1j]}, ValueError("x")])
def test_what_is_no_plain_data_is_named(value: object) -> None:
    with pytest.raises(TypeError, match="is not plain data; give text"):
        to_text(value)


@pytest.mark.parametrize(
    "text",
    [b"\x80\x04.", b"\xff", "", "{", '{"~tuple":5}', '{"~dict":[[[],1]]}', '{"~bytes":"?"}', "[" * 10**5, "9" * 5000],
)
def test_anything_else_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        from_text(text)
