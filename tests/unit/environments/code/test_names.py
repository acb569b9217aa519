"""Which names of tests are the code's, and which tests are refused before a run."""

from __future__ import annotations

from typing import Any

import pytest

from octetrl.environments.code_tests import CodeNames, read_tests
from octetrl.records import Task
from octetrl.system.errors import UserError


def names(tests: list[Any], prompt: str = "p", **row: Any) -> CodeNames:
    return read_tests(Task("t", prompt, metadata={"tests": tests, **row})).names


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("assert gcd(4, 6) == 2", "gcd"),
        ("assert bisect([1], 2) == 1", "bisect"),
        ("assert math.isclose(f(3), 2)", "f"),
        ("from math import *\nassert isclose(f(3), 2)", "f"),
        ("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)", "f"),
        ("def check(f):\n    assert f(1) == 2\ncheck(f)", "f"),
        ("assert list(map(double, [1])) == [2]", "double"),
        ("assert decode(encode('x')) == 'x'", "decode encode"),
        ("from solution import add as plus, Stack\nassert plus(1, 2) == 3", "Stack add"),
        ("import solution\nassert solution.add(1, 2) == 3", "add"),
        ("try: f(-1)\nexcept ValueError: raised = True\nassert raised", "f"),
        ("from functools import lru_cache\nfib = lru_cache(fib)\nassert fib(3) == 2", "fib"),
        ("assert to_list(merge(ListNode(1))) == [1]\ndef to_list(node): return []", "merge"),
    ],
)
def test_the_codes_names(test: str, found: str) -> None:
    assert sorted(names([test]).names) == found.split()


@pytest.mark.parametrize(
    ("test", "row", "unbound"),
    [
        ("assert isclose(f(1), 2.0)", {}, "isclose"),
        ("assert f(1) == approx(2.0)", {}, "approx"),
        ("assert f('a') == Counter('a')", {}, "Counter"),
        ("assert f(3) == expected", {}, "expected"),
        ("assert_same(f(3), expected)", {}, "expected"),
        ("x: List[int] = f(3)\nassert x == [1]", {}, "List"),
        ("with pytest.raises(Negative): f(3)", {}, "pytest"),
        ("assert decode(encode('x')) == 'x'", {"function": "encode"}, "decode"),
        ("assert decode(encode('x')) == 'x'", {"entry_point": "encode"}, "decode"),
    ],
)
def test_a_name_that_nothing_binds_is_the_tasks_fault(test: str, row: dict[str, Any], unbound: str) -> None:
    with pytest.raises(UserError, match=f"task 't'.*{unbound}"):
        names([test], **row)


def test_a_prompt_may_call_a_class_by_its_name() -> None:
    for prompt in ("Write a class named `Vec` with +.", "Write a class called Vec.", "class Vec:"):
        assert names(["assert Vec(1) + Vec(2) == Vec(3)"], prompt).classes == {"Vec"}


def test_the_row_may_say_which_names_are_the_codes() -> None:
    test = "assert decode(encode(LIMIT)) == LIMIT"
    row = {"function": "encode", "solution": "LIMIT = 3\ndef encode(x): return x\ndef decode(x): return x"}
    assert names([test], **row).names == {"encode", "decode", "LIMIT"}
    assert names(["assert isclose(f(1), 2)"], "def isclose(a, b):\n  ...\ndef f(x):\n").names == {"isclose", "f"}


@pytest.mark.parametrize("test", ["assert sum([1, 2]) == 3", "def check(candidate): assert candidate(1)", "x = 1"])
def test_tests_that_any_code_passes_are_refused(test: str) -> None:
    with pytest.raises(UserError, match="use no name of the code"):
        names([test])


@pytest.mark.parametrize(
    ("test", "prompt", "classes"),
    [
        ("s = Stack()\ns.append(3)\nassert s.pop() == 3", "p", "Stack"),
        ("assert Point(3).x == 3 and Color['RED']", "p", "Color Point"),
        ("assert Extract([1])[0] == 1\nassert Extract('ab').startswith('a')", "p", ""),
        ("assert Vector(1, 2) + Vector(1, 2) == Vector(2, 4)", "Write a class `Vector`", "Vector"),
        ("assert Vector(1).x == 2", "def Vector(x): ...", ""),
        ("assert isinstance(f(3), Point)", "p", "Point"),
    ],
)
def test_classes_are_those_that_tests_use_as_such(test: str, prompt: str, classes: str) -> None:
    """A function may be capitalised too. Its result may be taken for plain data."""
    assert sorted(names([test], prompt).classes) == classes.split()


def test_exceptions_and_packages() -> None:
    test = "import numpy as np, math\nwith T().assertRaises(Overdrawn): draw(5)\ntry: import torch\nexcept Lost: pass"
    found = names([test])
    assert found.exceptions == {"Overdrawn", "Lost"}
    assert found.imports == {"numpy"}
