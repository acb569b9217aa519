"""The verdict on code: right answers in every form, and code that tries to look right."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.errors import UserError
from octetrl.config.sandbox import SandboxConfig
from octetrl.config.schema import EnvironmentConfig
from octetrl.environments.code.scorer import CodeScorer, JudgementFailed, code_environment
from octetrl.environments.sandbox.levels import Level
from octetrl.environments.sandbox.sandbox import find_sandbox
from octetrl.environments.scoring import Explained, RewardWorkers
from octetrl.records import RolloutStatus, Task

QUICK = SandboxConfig(level="limits", wall_seconds=20.0, cpu_seconds=2, memory_mib=128)
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "import math\nassert math.isclose(add(0.5, 0.25), 0.75)"]
CALLS = [{"args": [1, 2], "expected": 3}, {"args": [-1], "kwargs": {"b": 1}, "expected": 0}]
PROGRAMS = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "-1 1\n", "stdout": "0\n"}]
RIGHT = "def add(a, b): return a + b\n"
RIGHT_PROGRAM = "print(sum(map(int, input().split())))\n"


@pytest.fixture(autouse=True, scope="module")
def _needs_a_sandbox() -> None:
    try:
        find_sandbox(Level.LIMITS)
    except UserError as error:
        pytest.skip(str(error))


def fenced(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\n"


def score(code: str, tests: Any, *, partial: bool = False, **metadata: Any) -> Explained:
    task = Task("t", "p", metadata={"tests": tests, **metadata})
    return CodeScorer(QUICK, partial)(task, fenced(code))


def test_right_answers() -> None:
    assert score(RIGHT, ASSERTS) == 1.0
    assert score(RIGHT, CALLS, function="add") == 1.0
    assert score(RIGHT_PROGRAM, PROGRAMS) == 1.0
    assert score(RIGHT, ASSERTS).detail is None


def test_wrong_answers_say_why() -> None:
    half = "def add(a, b): return 3\n"
    assert score(half, ASSERTS) == 0.0
    assert score(half, ASSERTS).detail == "1 of 3 tests pass; test 2: AssertionError"
    assert score(half, CALLS, function="add", partial=True) == 0.5
    assert score("print(3)", PROGRAMS, partial=True).detail == "1 of 2 tests pass; test 2: wrong output"
    assert "NameError: name 'add' is not defined" in str(score("x = 1", ASSERTS).detail)
    assert "the code raises ZeroDivisionError" in str(score("1 / 0", ASSERTS).detail)
    assert "SyntaxError" in str(score("def add(", ASSERTS).detail)
    assert "ZeroDivisionError" in str(score("1 / 0", PROGRAMS).detail)


def test_no_code_is_a_wrong_answer() -> None:
    answer = CodeScorer(QUICK)(Task("t", "p", metadata={"tests": ASSERTS}), "It is `a + b`.")
    assert (answer, answer.detail) == (0.0, "no ```python block")


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(): return (1, [2, {3: {4.5, 'x'}}], None, b'z', 1j)", "assert f() == (1, [2, {3: {4.5, 'x'}}], None, b'z', 1j)"),
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("from fractions import Fraction\ndef f(): return Fraction(1, 3)", "from fractions import Fraction\nassert f() == Fraction(1, 3)"),
        ("def f(x): x.append(9)", "a = [1]\nassert f(a) is None\nassert a == [1, 9]"),
        ("def f():\n    yield 1\n    yield 2", "assert list(f()) == [1, 2]\nassert 2 in f()\ng = f()\nassert next(g) == 1"),
        ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def __len__(self): return len(self.items)",
         "s = Stack()\ns.push(4)\nassert len(s) == 1 and s.items == [4] and s.items[0] == 4"),
        ("class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\ndef total(n): return n.v + total(n.next) if n else 0",
         "n = Node(1, Node(2))\nn.v = 5\nassert total(n) == 7 and n.next.v == 2 and n.next.next is None"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x): return P(x)", "assert f(3) == P(3) and f(3) != P(4)\nassert repr(f(3)) == 'P(x=3)'"),
        ("def f(x):\n    if x < 0: raise ValueError('negative')", "try: f(-1)\nexcept ValueError as error: assert 'negative' in str(error)\nelse: assert False"),
        ("def even(x): return x % 2 == 0", "def check(candidate):\n    for n in range(6): assert candidate(n) == (n % 2 == 0)\ncheck(even)"),
        ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2) ** 2, 2)"),
        ("if __name__ == '__main__': 1 / 0\ndef f(): return input", "assert callable(f())"),
        ("def f(): return float('inf'), float('-inf')", "assert f() == (float('inf'), float('-inf'))"),
    ],
)  # fmt: skip
def test_what_tests_may_say(code: str, tests: str) -> None:
    answer = score(code, [tests])
    assert answer == 1.0, answer.detail


def test_a_function_named_like_a_builtin_is_the_codes_only_when_the_task_says_so() -> None:
    code = "def sum(a, b): return a + b"
    assert score(code, ["assert sum(10, 15) == 25"]) == 0.0
    assert score(code, ["assert sum(10, 15) == 25"], function="sum") == 1.0
    assert score("class Solution:\n    def add(self, a, b): return a + b", [CALLS[0]], function="Solution().add") == 1.0


FAKES = {
    "it says passed": "print('passed'); print('{\"passed\": \"111\", \"why\": null}')",
    "it exits well": "import sys; sys.exit(0)",
    "it exits at once": "import os; os._exit(0)",
    "it exits when called": "import os\ndef add(a, b): os._exit(0)",
    "it equals everything": "class Liar:\n    def __eq__(self, o): return True\n    def __bool__(self): return True\ndef add(a, b): return Liar()",
    "a number that equals everything": "class Liar(int):\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n    def __hash__(self): return 1\ndef add(a, b): return Liar(7)",
    "an object near every number": "class Liar:\n    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\n    def __float__(self): return 0.75\n    def __contains__(self, o): return True\ndef add(a, b): return Liar()",
    "it replaces builtins": "import builtins, math\nbuiltins.abs = lambda x: 0\nmath.isclose = lambda *a, **k: True\nbuiltins.AssertionError = ZeroDivisionError\nabs = lambda x: 0\ndef all(x): return True\ndef add(a, b): return 7",
    "it replaces unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.main = lambda *a: None\ndef add(a, b): return 7",
    "it writes to the link": "import os\nfor _ in range(9): os.write(3, b'{\"value\": true, \"passed\": \"111\"}\\n')\ndef add(a, b): return 7",
    "it takes over the link": "import os, json\nos.write(3, b'{\"names\": {\"dict\": [[\"add\", {\"object\": 0}]]}}\\n')\nwhile line := os.read(3, 9999): os.write(3, b'{\"value\": {\"object\": 1}}\\n')",
    "it sends garbage": "import os\nos.write(3, b'[' * 100000 + b'\\n')\ndef add(a, b): return 7",
    "it sends too much": "def add(a, b): return 'x' * (9 << 20)",
    "it searches memory and stack for the tests": """
import gc, sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, (list, str, dict)) and 'ass' 'ert add' in str(value): return 3
        frame = frame.f_back
    for found in gc.get_objects():
        if isinstance(found, list) and any(isinstance(x, str) and x.startswith('ass' 'ert add') for x in found): return 3
    return 7
""",
    "it looks for files": "import os\ndef add(a, b):\n    for folder, _, names in os.walk('/tmp'):\n        for name in names:\n            try: text = open(os.path.join(folder, name)).read()\n            except (OSError, ValueError): continue\n            if 'assert add(1' in text: return 3\n    return 7",
    "it raises what a test may expect": "def add(a, b): raise AssertionError",
    "it raises a SystemExit": "def add(a, b): raise SystemExit(0)",
}  # fmt: skip


@pytest.mark.parametrize("name", FAKES)
def test_code_that_tries_to_look_right(name: str) -> None:
    tests = [
        "assert add(1, 2) == 3",
        "assert abs(add(0.5, 0.25) - 0.75) < 1e-9",
        "assert 0 in [add(-1, 1)]",
        "assert all([add(2, 2) == 4])",
        "import math\nassert math.isclose(add(1, 0.5), 1.5)",
    ]
    answer = score(FAKES[name], tests, partial=True)
    assert answer == 0.0, answer.detail
    assert score(FAKES[name], CALLS, function="add", partial=True) == 0.0
    assert score(FAKES[name], PROGRAMS, partial=True) == 0.0


def test_a_verdict_survives_the_end_of_the_code() -> None:
    """Tests passed before a hang or a crash count for a share; what ended it is said."""
    code = "def add(a, b):\n    if a < 0: import os; os.abort()\n    return a + b"
    answer = score(code, ASSERTS, partial=True)
    assert answer == pytest.approx(1 / 3)
    assert answer.detail == "1 of 3 tests pass; crashed"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def add(a, b):\n    while True: pass", "cpu_limit"),
        ("x = []\ndef add(a, b):\n    while True: x.append(bytearray(1 << 24))", "MemoryError"),
        ("def add(a, b):\n    while True: print('x' * 999)", "output_limit"),
        ("import os\ndef add(a, b): os.kill(os.getpid(), 9)", "killed"),
    ],
)
def test_a_limit_is_a_wrong_answer_with_its_reason(code: str, reason: str) -> None:
    answer = score(code, ASSERTS)
    assert answer == 0.0
    assert reason in str(answer.detail)


def test_wall_time_is_of_all_programs_together() -> None:
    config = SandboxConfig(level="limits", wall_seconds=0.6)
    tests = [{"stdin": "", "stdout": ""}] * 9
    task = Task("t", "p", metadata={"tests": tests})
    answer = CodeScorer(config, partial=True)(task, fenced("import time; time.sleep(0.25)"))
    assert 0.0 < answer < 0.5
    assert "wall_timeout" in str(answer.detail)


def test_a_test_that_can_not_be_run_is_no_verdict() -> None:
    with pytest.raises(JudgementFailed, match="a function can't be sent"):
        score("def apply(f): return f(1)", ["assert apply(lambda x: x) == 1"])
    with pytest.raises(JudgementFailed, match="without a verdict"):
        score(RIGHT, ["import os\nos._exit(3)"])


def test_a_broken_sandbox_is_a_reward_error() -> None:
    """Its interpreter goes away after the worker has tried it."""
    folder = Path(tempfile.mkdtemp())  # not below pytest's own, which nobody else may enter
    folder.chmod(0o755)
    (folder / "python").symlink_to(find_sandbox(Level.LIMITS).interpreter.executable)
    task = Task("t", "p", metadata={"tests": PROGRAMS})
    config = QUICK.model_copy(update={"python": str(folder / "python")})
    with RewardWorkers(CodeScorer(config), timeout_seconds=60.0) as workers:
        right, wrong = workers.score([(task, fenced(RIGHT_PROGRAM)), (task, fenced("print(4)"))])
        assert (right.status, right.reward, right.detail) == (RolloutStatus.SCORED, 1.0, None)
        assert (wrong.status, wrong.reward) == (RolloutStatus.SCORED, 0.0)
        assert wrong.detail == "0 of 2 tests pass; test 1: wrong output"
        shutil.rmtree(folder)
        (failed,) = workers.score([(task, fenced(RIGHT_PROGRAM))])
    assert (failed.status, failed.reward) == (RolloutStatus.REWARD_ERROR, None)
    assert "JudgementFailed: the sandbox" in str(failed.detail)


def test_a_scorer_travels_and_finds_its_sandbox_there() -> None:
    scorer = pickle.loads(pickle.dumps(CodeScorer(QUICK)))
    assert scorer(Task("t", "p", metadata={"tests": CALLS, "function": "add"}), fenced(RIGHT)) == 1.0


def test_programs_of_a_task_need_their_time() -> None:
    task = Task("t", "p", metadata={"tests": PROGRAMS * 50})
    with pytest.raises(UserError, match=r"reward_timeout_seconds: 10 is too short for 100 programs a task.*raise it to"):
        code_environment([task], EnvironmentConfig(kind="code", sandbox=QUICK.model_copy(update={"wall_seconds": 5.0})))
