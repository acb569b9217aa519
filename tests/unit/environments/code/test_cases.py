"""The forms of tests, what is refused of them, and which block of a completion is the code."""

from __future__ import annotations

from typing import Any

import pytest

from octetrl.config.sandbox import SandboxConfig
from octetrl.data.tasks import read_tasks
from octetrl.environments.code_scorer import CodeScorer
from octetrl.environments.code_tests import CodeNames, last_python_block, read_tests, same_output
from octetrl.process.judge.judging import alike
from octetrl.process.levels import Level
from octetrl.process.sandbox import find_sandbox
from octetrl.records import Task
from octetrl.system.errors import UserError
from tests.required import missing


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nor\n```python\nb\n```", "b\n"),
        ("```python\na\n```\nthen run\n```bash\nls\n```", "a\n"),
        ("  ```py\n  a\n  ```", "a\n"),
        ("```python\nnot closed", "not closed"),
        ("```\nno language\n```", None),
        ("a", None),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("```Python title=x\na\n```", "a\n"),
        ("```python\na\n```\n```" + " " * 1_000_000, "a\n"),
        ("```" + "a" * 1_000_000, None),
        ("```python\na\n```" + "\n```x" * 100_000, "a\n"),
        ("- " * 500_000, None),
        ("1. Code:\n   ```python\n   def f():\n       return 1\n   ```\n2. x", "def f():\n    return 1\n"),
        ("- ```python\n  a\n  ```", "a\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\n```\n````", "```\n"),
        ("```python\na\n```\n```python\nnot closed", "a\n"),
        ("```python\nleft open\n\n```python\nb\n```", "b\n"),
        ("<think>\n```python\nx\n</think>\n```python\na\n```", "a\n"),
        ("opened by the prompt\n```python\nx\n</think>\n\n```python\na\n```", "a\n"),
        ("<think>```python\na\n```</think>none", None),
        ("<think>```python\nthe thought has no end\n```", None),
        ("```python\ns.split('</think>')\n```", "s.split('</think>')\n"),
    ],
)
def test_the_last_python_block(text: str, code: str | None) -> None:
    assert last_python_block(text) == code


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "'tests' is missing or empty"),
        ({"tests": []}, "'tests' is missing or empty"),
        ({"tests": ["assert f(", "x"]}, r"test 1: 'assert f\(' is not valid Python"),
        ({"tests": ["assert 1", {"stdin": "", "stdout": ""}]}, "asserts and programs; they must be of one form"),
        ({"tests": [{"args": [1], "expected": 2}]}, "'function' is None"),
        ({"tests": [{"args": 1, "expected": 2}], "function": "f"}, "'args' must be a list"),
        ({"tests": [{"args": [1], "kwargs": [1], "expected": 2}], "function": "f"}, "'kwargs' must be a mapping"),
        ({"tests": ["-" * 100_000 + "1"]}, "nested too deeply"),
        ({"tests": ["1" + "+1" * 100_000]}, "nested too deeply"),
        ({"tests": ["not " * 5_000 + "1"]}, "nested too deeply"),
        ({"tests": ["return 1"]}, "is not valid Python"),
        ({"tests": [{"args": [], "expected": 1}], "function": "f" * 9_999 + "("}, r"'function' is 'f{59}\.\.\.;"),
        ({"tests": [{"stdin": 1, "stdout": ""}]}, "must be texts"),
        ({"tests": [{"input": 1}]}, "is not a test"),
        ({"tests": [3]}, "is not a test"),
    ],
)
def test_tests_in_no_form_are_refused(metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"task 'seven'.*{said}") as refused:
        read_tests(Task("seven", "p", metadata=metadata))
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    "text",
    [
        "def test_f(capsys): assert f(3) == 9",
        "async def test_f(): assert f(3) == 9",
        "def check(candidate): assert candidate(3) == 9",
        "if True:\n    def run_all(): assert f(3) == 9",
        "class TestF:\n    def test_g(self): assert f(3) == 9\n    def test_f(self, tmp_path): assert f(3) == 9",
    ],
)
def test_tests_that_nothing_runs_are_refused(text: str) -> None:
    named = {"tests": ["assert f(1) == 1", text]}
    with pytest.raises(UserError, match="nothing in its tests runs"):
        read_tests(Task("t", "p", metadata=named))
    unused = "def is_near(a, b): assert abs(a - b) < 1\nassert f(1) == 1"
    called = "def test_f(x): assert f(x) == 1\n\nfor x in (1, 1):\n    test_f(x)"
    for right in ([unused], [called], ["def check(g): assert g(1) == 1", "check(f)"]):
        read_tests(Task("t", "p", metadata={"tests": right}))


def test_one_text_is_one_test() -> None:
    assert read_tests(Task("t", "p", metadata={"tests": "assert f()"})).cases == ("assert f()",)


def test_output_is_compared_without_white_space_at_ends() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output(" 1", "1")


def test_alike() -> None:
    assert alike((1, (2.0, "x")), [1, [2, "x"]])
    assert alike(0.1 + 0.2, 0.3)
    assert alike({1: [None]}, {"1": [None]})
    assert not alike(True, 1)
    assert not alike(10**18 + 1, 10**18)
    assert not alike([1, 2], [1])
    assert not alike("1", 1)
    assert not alike(None, 0)


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


TASKS = {task.id: task for task in read_tasks("examples/code_tasks.jsonl")}
SOLUTIONS = {
    "add": "def add(a, b): return a + b",
    "vowels": "def vowels(text): return sum(letter in 'aeiou' for letter in text.lower())",
    "runs": "from itertools import groupby\ndef runs(items): return [(x, len(list(run))) for x, run in groupby(items)]",
    "stack": "class Stack(list):\n    push = list.append",
    "total": "import sys\nprint(sum(map(int, sys.stdin)))",
    "fizz": "for n in range(1, int(input()) + 1): print('Fizz' if n % 3 == 0 else n)",
    "reversed": "def turn(items): items.reverse()",
    "primes": "def primes(n):\n    for p in range(2, n):\n        if all(p % q for q in range(2, p)): yield p",
}


def test_all_have_a_solution() -> None:
    assert SOLUTIONS.keys() == TASKS.keys()


@pytest.mark.parametrize("name", TASKS)
def test_it_passes(name: str) -> None:
    try:
        find_sandbox()
    except UserError as error:
        missing(Level.LANDLOCK, str(error))
    scorer = CodeScorer(SandboxConfig(wall_seconds=30.0))
    answer = scorer(TASKS[name], f"```python\n{SOLUTIONS[name]}\n```")
    assert answer == 1.0, answer.detail
