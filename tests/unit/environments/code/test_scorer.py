"""The verdict on code: right answers in every form, and code that tries to look right."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.sandbox import SandboxConfig
from octetrl.config.schema import EnvironmentConfig
from octetrl.environments import code_scorer as scorer
from octetrl.environments.code_scorer import (
    CodeScorer,
    JudgementFailed,
    code_environment,
    lacking_packages,
    packages_line,
)
from octetrl.environments.reward_workers import RewardWorkers
from octetrl.environments.scoring import Explained
from octetrl.process.levels import Level
from octetrl.process.sandbox import Outcome, Program, SandboxStatus, find_sandbox
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError
from tests.required import missing
from tests.unit.environments.code.forgers import FORGED_TESTS, FORGERS, LIARS, SERVE
from tests.unit.environments.code.programs import FAKES, HONEST
from tests.unit.environments.code.return_types import CALLS as RETURNED
from tests.unit.environments.code.return_types import CLASS_TESTS, CLASSES, SOLUTION, TESTS

QUICK = SandboxConfig(wall_seconds=120.0, cpu_seconds=2, memory_mib=128)
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "import math\nassert math.isclose(add(0.5, 0.25), 0.75)"]
CALLS = [{"args": [1, 2], "expected": 3}, {"args": [-1], "kwargs": {"b": 1}, "expected": 0}]
PROGRAMS = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "-1 1\n", "stdout": "0\n"}]
RIGHT = "def add(a, b): return a + b\n"
RIGHT_PROGRAM = "print(sum(map(int, input().split())))\n"


@pytest.fixture(autouse=True, scope="module")
def _needs_a_sandbox() -> None:
    try:
        find_sandbox()
    except UserError as error:
        missing(Level.LANDLOCK, str(error))


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
    arrived = pickle.loads(pickle.dumps(CodeScorer(QUICK)))
    assert arrived(Task("t", "p", metadata={"tests": CALLS, "function": "add"}), fenced(RIGHT)) == 1.0
    program = "import sys\nprint(sum(map(int, open('/dev/stdin').read().split())), file=open('/dev/stdout', 'w'))\n"
    answer = score(program, PROGRAMS)
    assert answer == 1.0, answer.detail


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
    odd = "def add(a, b): raise ValueError('\\ud800\\x1b[2J')"
    assert score(odd, ASSERTS).detail == r"0 of 3 tests pass; test 1: ValueError: \ud800\x1b[2J"
    answer = CodeScorer(QUICK)(Task("t", "p", metadata={"tests": ASSERTS}), "It is `a + b`.")
    assert (answer, answer.detail) == (0.0, "no ```python block")
    # Tests passed before a hang or a crash count for a share; what ended it is said.
    code = "def add(a, b):\n    if a < 0: import os; os.abort()\n    return a + b"
    answer = score(code, ASSERTS, partial=True)
    assert answer == pytest.approx(1 / 3)
    assert answer.detail == "1 of 3 tests pass; crashed"


@pytest.mark.parametrize("name", HONEST)
def test_what_tests_may_say(name: str) -> None:
    code, test = HONEST[name]
    answer = score(code, [test])
    assert answer == 1.0, answer.detail


@pytest.mark.parametrize(("code", "tests"), [(SOLUTION, TESTS), (CLASSES, CLASS_TESTS)], ids=["data", "classes"])
def test_what_code_may_return(code: str, tests: list[str]) -> None:
    answer = score(code, tests, partial=True, solution=code)
    assert answer == 1.0, answer.detail


@pytest.mark.parametrize(("function", "args", "expected"), RETURNED, ids=[name for name, *_ in RETURNED])
def test_what_calls_may_return(function: str, args: list[Any], expected: object) -> None:
    answer = score(SOLUTION, [{"args": args, "expected": expected}], function=function)
    assert answer == 1.0, answer.detail


@pytest.mark.parametrize("name", FORGERS)
def test_code_that_writes_to_the_link(name: str) -> None:
    """It gets a 0, and never a broken judgement: that would spare the rollout."""
    judge = CodeScorer(QUICK.model_copy(update={"wall_seconds": 2.0, "cpu_seconds": 1}), partial=True)
    calls = [*CALLS, {"args": [1, 1], "expected": [2]}, {"args": [], "expected": {"a": 1}}]
    for tests, function in ((FORGED_TESTS, {}), (calls, {"function": "add"})):
        answer = judge(Task("t", "p", metadata={"tests": tests, **function}), fenced(SERVE + FORGERS[name]))
        assert answer == 0.0, answer.detail


@pytest.mark.parametrize("name", LIARS)
def test_objects_that_lie(name: str) -> None:
    code, test = LIARS[name]
    answer = score(code, [test])
    assert answer == 0.0, answer.detail


def test_a_judge_that_the_code_overwhelms_is_a_0() -> None:
    """Its end without a verdict is the code's doing once it has something of the code's."""
    task = Task("t", "p", metadata={"tests": ["import os\nif add(1, 2) != 3: os.abort()"]})
    answer = CodeScorer(QUICK)(task, fenced("def add(a, b): return 4"))
    assert (answer, answer.detail) == (0.0, "0 of 1 tests pass; the tests ended without a verdict: crashed")


@pytest.mark.parametrize("made", ["x.tzinfo", "reversed(x)", "iter(x)", "zip(x)", "memoryview(x)"])
def test_an_answer_of_a_type_that_can_not_be_sent_back_is_a_0(made: str) -> None:
    """Which type it is was the code's choice: it must not save the rollout from its 0."""
    answered = "datetime.now(timezone.utc)" if "tzinfo" in made else "b'12'"
    code = f"from datetime import *\ndef f(): return {answered}\ndef g(x): return 1"
    answer = score(code, [f"x = f()\nassert g({made}) == 2"])
    assert answer == 0.0, answer.detail


@dataclass(frozen=True)
class BrokenSandbox:
    """A sandbox whose watching process fails while the code runs."""

    level: Level = Level.BUBBLEWRAP

    def run(self, program: Program) -> Outcome:
        return Outcome(SandboxStatus.BROKE_SANDBOX, detail="it said nothing")

    def run_pair(self, first: Program, second: Program) -> tuple[Outcome, Outcome]:
        return self.run(first), Outcome(SandboxStatus.ERROR)


def test_code_that_breaks_its_sandbox_is_a_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "sandbox_for", lambda config: BrokenSandbox())
    for tests in (ASSERTS, CALLS, PROGRAMS):
        answer = score(RIGHT, tests, function="add")
        assert answer == 0.0 and answer.detail is not None
        assert answer.detail.startswith(f"0 of {len(tests)} tests pass; ")
        assert "broke_sandbox" in answer.detail and "it said nothing" in answer.detail


def test_code_that_never_says_that_it_has_run_is_a_0() -> None:
    judge = CodeScorer(QUICK.model_copy(update={"wall_seconds": 1.0}))
    task = Task("t", "p", metadata={"tests": ASSERTS})
    answer = judge(task, fenced("import time\ntime.sleep(99)"))
    assert (answer, answer.detail) == (0.0, "0 of 3 tests pass; wall_timeout")


def test_a_function_named_like_a_builtin_is_the_codes_only_when_the_task_says_so() -> None:
    code = "def sum(a, b): return a + b"
    for function in ({}, {"function": "total"}):
        with pytest.raises(UserError, match="use no name of the code"):
            score(code, ["assert sum(10, 15) == 25"], **function)
    assert score(code, ["assert sum(10, 15) == 25"], function="sum") == 1.0
    assert score("class Solution:\n    def add(self, a, b): return a + b", [CALLS[0]], function="Solution().add") == 1.0


@pytest.mark.parametrize("name", FAKES)
def test_code_that_tries_to_look_right(name: str) -> None:
    tests = [
        "assert add(1, 2) == 3",
        "assert abs(add(0.5, 0.25) - 0.75) < 1e-9",
        "assert 0 in [add(-1, 1)]",
        "assert 3 in add(1, 2)",
        "assert all([add(2, 2) == 4])",
        "import math\nassert math.isclose(add(1, 0.5), 1.5)",
    ]
    answer = score(FAKES[name], tests, partial=True)
    assert answer == 0.0, answer.detail
    assert score(FAKES[name], CALLS, function="add", partial=True) == 0.0
    assert score(FAKES[name], PROGRAMS[:1]) == 0.0


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
    judge = CodeScorer(QUICK.model_copy(update={"cpu_seconds": 1}))
    answer = judge(Task("t", "p", metadata={"tests": ASSERTS}), fenced(code))
    assert answer == 0.0
    assert reason in str(answer.detail)


def timed(test: str, code: str, test_seconds: float) -> Explained:
    """The score where the code has 2 s and the tests themselves have `test_seconds`."""
    task = Task("t", "p", metadata={"tests": [test]})
    return CodeScorer(QUICK.model_copy(update={"wall_seconds": 2.0}), test_seconds=test_seconds)(task, fenced(code))


def test_the_seconds_of_tests_are_not_the_codes() -> None:
    slow = "import time\ntime.sleep(2.2)\nassert f(1) == 1"
    assert timed(slow, "def f(x): return x", 60.0) == 1.0
    answer = timed(slow, "import time\ntime.sleep(99)\ndef f(x): return x", 60.0)
    assert (answer, answer.detail) == (0.0, "0 of 1 tests pass; wall_timeout")


def test_code_that_hangs_ends_when_the_judge_waits_no_longer() -> None:
    scorer = CodeScorer(QUICK.model_copy(update={"wall_seconds": 1.0}), test_seconds=500.0)
    began = time.monotonic()
    answer = scorer(Task("t", "p", metadata={"tests": ASSERTS}), fenced("import time\ndef add(a, b): time.sleep(400)"))
    assert (answer, answer.detail) == (0.0, "0 of 3 tests pass; wall_timeout")
    assert time.monotonic() - began < 120.0


@pytest.mark.parametrize("code", ["def f(x): return x", "import time\ntime.sleep(99)"])
def test_tests_that_take_too_long_are_the_tasks_fault(code: str) -> None:
    with pytest.raises(JudgementFailed, match="take more than 1 s before they use the code"):
        timed("import time\ntime.sleep(1.1)\nassert f(1) == 1", code, 1.0)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tests": [{"stdin": "", "stdout": "x" * 65_537}]}, "test 1: 'stdout' has 65 KiB; raise"),
        ({"tests": [{"args": [], "expected": "x" * (5 << 20)}], "function": "f"}, "'expected' has 5 MiB"),
        ({"tests": ["import nowhere_at_all\nassert f(1) == 1"]}, "import nowhere_at_all, which the sandbox's Python"),
        ({"tests": ["assert isclose(f(1), 1)"]}, "isclose"),
    ],
)
def test_a_row_that_no_code_can_pass_is_refused(row: dict[str, Any], said: str) -> None:
    right = Task("r", "p", metadata={"tests": [{"stdin": "", "stdout": "x" * 65_536 + "\n"}]})
    wrong = Task("wrong", "p", metadata=row)
    config = EnvironmentConfig(kind="code", sandbox=QUICK, reward_timeout_seconds=200.0)
    with pytest.raises(UserError, match=f"task 'wrong'.*{said}.*1 other"):
        code_environment([right, wrong, wrong], config)
    assert len(code_environment([right], config).tasks) == 1


def test_packages_that_the_sandbox_lacks() -> None:
    assert lacking_packages(QUICK, ("json", "nowhere_at_all", "math")) == ("nowhere_at_all",)
    lacking = lacking_packages(QUICK)
    assert (packages_line(QUICK) is None) == (not lacking)
    assert all(name in str(packages_line(QUICK)) for name in lacking)


def test_wall_time_is_of_all_programs_together() -> None:
    config = SandboxConfig(wall_seconds=2.5)
    tests = [{"stdin": "", "stdout": ""}] * 9
    task = Task("t", "p", metadata={"tests": tests})
    answer = CodeScorer(config, partial=True)(task, fenced("import time; time.sleep(0.6)"))
    assert 0.0 < answer < 0.5
    assert "wall_timeout" in str(answer.detail)


def test_a_test_that_can_not_be_run_is_no_verdict() -> None:
    with pytest.raises(JudgementFailed, match="a function can't be sent"):
        score("def apply(f): return f(1)", ["assert apply(lambda x: x) == 1"])
    with pytest.raises(JudgementFailed, match="a type can't be sent"):
        score("def make(kind): return kind()", ["class Own: pass\nassert make(Own)"])
    with pytest.raises(JudgementFailed, match="a generator can't be sent"):
        score("def f(x): return 1", ["assert f(3) == 1", "assert f(x for x in [f(3)])"])
    with pytest.raises(JudgementFailed, match="a list_iterator can't be sent"):
        score("def f(x): return 1", ["assert f(iter([3])) == 1"])
    with pytest.raises(JudgementFailed, match="without a verdict"):
        score(RIGHT, ["import os\nos._exit(3)\nadd(1, 2)"])


def test_a_broken_sandbox_is_a_reward_error() -> None:
    """Its interpreter goes away after the worker has tried it."""
    folder = Path(tempfile.mkdtemp())  # not below pytest's own, which nobody else may enter
    folder.chmod(0o755)
    (folder / "python").symlink_to(find_sandbox().interpreter.executable)
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


def test_programs_of_a_task_need_their_time() -> None:
    task = Task("t", "p", metadata={"tests": PROGRAMS * 50})
    with pytest.raises(
        UserError, match=r"reward_timeout_seconds: 10 is too short for 100 programs a task.*raise it to"
    ):
        code_environment([task], EnvironmentConfig(kind="code", sandbox=QUICK.model_copy(update={"wall_seconds": 5.0})))
