"""Programs as tool calls: what they print, how they ended, and nothing of the machine they ran on."""

from __future__ import annotations

import asyncio

import pytest

from octetrl.config.sandbox import SandboxConfig
from octetrl.environments.tools.ready import python_tool, with_last_value_printed
from octetrl.process.levels import Level
from octetrl.process.sandbox import Outcome, Sandbox, SandboxStatus, find_sandbox
from octetrl.system.errors import UserError
from tests.required import missing


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> None:
    try:
        find_sandbox()
    except UserError as error:
        missing(Level.LANDLOCK, str(error))


def ran(code: str, **options: object) -> str:
    return asyncio.run(python_tool(SandboxConfig(wall_seconds=20.0, cpu_seconds=2), **options).call({"code": code}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(6 * 7)", "42"),
        ("x = 3\nx * 2  # twice", "6"),
        ("'é'; x = 5; x + 1", "6"),
        ("sorted(\n  [3, 1]\n)", "[1, 3]"),
        ("print('a')", "a"),
        ("x = 1", "The program printed nothing."),
        ("import sys; sys.exit(3)", "The program failed."),
    ],
)
def test_what_a_program_prints_is_shown(code: str, shown: str) -> None:
    assert ran(code) == shown


def test_errors_and_limits_are_told_without_the_places_of_this_machine() -> None:
    text = ran("x = 0\n1 / x")
    assert text.startswith('The program failed.\nFile "program.py", line 2')
    assert text.endswith("ZeroDivisionError: division by zero") and "tmp" not in text
    assert "SyntaxError" in ran("def f(:")
    assert ran("while True: pass").startswith("The program computed for too long")
    text = ran("print('a' * 500 + 'b' * 500)", max_letters=100)
    assert text.startswith("a" * 50 + "\n") and text.endswith("b" * 50) and "900 characters left out" in text
    for code in ("def f(:", "", "\x00", "(" * 1000):
        assert with_last_value_printed(code) == code


def test_a_sandbox_that_failed_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Outcome(SandboxStatus.FAILED_SANDBOX, detail="no room")
    monkeypatch.setattr(Sandbox, "run", lambda sandbox, program: failed)
    with pytest.raises(RuntimeError, match="the sandbox failed: no room"):
        ran("1")
