"""Nodes of lists and trees between tests and code: their structure arrives, and no message does harm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octetrl.process.judge.wire import ListNode, Malformed, Nodes, TreeNode


def refuse(*_: Any) -> Any:
    raise Malformed


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


def test_a_class_with_other_fields_is_none_of_these_nodes() -> None:
    own = type("ListNode", (), {})()
    own.value = 3
    with pytest.raises(Malformed):
        sides()[0].pack(own, refuse)


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
