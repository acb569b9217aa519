"""The forms of tests, what is refused of them, and which block of a completion is the code."""

from __future__ import annotations

from typing import Any

import pytest

from octetrl.environments.code_tests import last_python_block, read_tests, same_output
from octetrl.process.judge.judging import alike
from octetrl.records import Task
from octetrl.system.errors import UserError


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
