"""What can't be tested on a machine is said in one line, and fails where it was asked for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import REPO
from tests.required import NEEDS, VARIABLE, check_names, missing, not_run

FEW = "tests/unit/process/test_sandbox.py::test_what_it_prints_and_how_it_ends[bubblewrap]"
INSTALLS_AFTER_UPDATE = """
if [ "$1" = update ]; then : > "$0.updated"; exit 0; fi
[ -e "$0.updated" ] || exit 100
echo "#!$BASH" > "${0%/*}/bwrap"; chmod +x "${0%/*}/bwrap"
"""
SCRIPT = REPO / "setup/bubblewrap.sh"


def run_pytest(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    without = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST", VARIABLE))}
    return subprocess.run(command, cwd=REPO, env={**without, **environment}, capture_output=True, text=True)


def test_gpu_tests_fail_where_they_were_asked_for() -> None:
    asked = run_pytest("-m", "gpu", "tests/gpu/test_instructions.py", CUDA_VISIBLE_DEVICES="", OCTETRL_REQUIRE="gpu")
    assert asked.returncode == pytest.ExitCode.USAGE_ERROR
    assert asked.stderr.strip().count("\n") == 0 and "no Hopper GPU: nothing was tested" in asked.stderr
    assert re.search(r"^test-gpu:.*\n\tOCTETRL_REQUIRE=gpu ", (REPO / "Makefile").read_text(), re.MULTILINE)


def test_a_level_that_is_missing_is_one_line() -> None:
    plain = run_pytest(FEW, PATH="/nowhere")
    lines = [line for line in plain.stdout.splitlines() if line.startswith("not run: bubblewrap: ")]
    assert plain.returncode == 0, plain.stdout
    assert len(lines) == 1 and "bwrap is not installed" in lines[0] and lines[0].endswith("(1 test)")


def test_a_need_is_a_failure_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "landlock,bubblewrap")
    with pytest.raises(pytest.fail.Exception, match="asks for bubblewrap, which this machine does not give: no bwrap"):
        missing("bubblewrap", "no bwrap")
    with pytest.raises(pytest.skip.Exception, match="not run: serve: no client"):
        missing("serve", "no client")


def test_a_need_that_is_misspelt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "gpu, bubblewarp")
    with pytest.raises(pytest.UsageError, match="'bubblewarp' is not one of gpu, landlock, bubblewrap,"):
        check_names()


def skipped_report(reason: str) -> pytest.TestReport:
    return pytest.TestReport("t", ("t", 1, "t"), {}, "skipped", ("t", 1, f"Skipped: {reason}"), "call")


def test_lines_are_counted_by_need_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    reports = []
    for need, why in (("gpu", "no GPU"), ("gpu", "no GPU"), ("serve", "no uvicorn")):
        with pytest.raises(pytest.skip.Exception) as skipped:
            missing(need, why)
        reports.append(
            pytest.TestReport("t", ("t", 1, "t"), {}, "skipped", ("t", 1, f"Skipped: {skipped.value}"), "call")
        )
    reports.append(pytest.TestReport("t", ("t", 1, "t"), {}, "skipped", ("t", 1, "Skipped: another reason"), "call"))
    assert not_run(reports) == ["not run: gpu: no GPU (2 tests)", "not run: serve: no uvicorn (1 test)"]


def test_every_need_is_asked_for_somewhere() -> None:
    """By CI, by a verb, or by the groups of `make test-outside`: `group NAME IN-FRONT NEEDS`."""
    outside = (REPO / "setup/outside_packages.sh").read_text()
    texts = outside + (REPO / ".ci/run").read_text() + (REPO / "Makefile").read_text()
    asked = re.findall(r"OCTETRL_REQUIRE\+?=([\w,-]+)", texts)
    asked += re.findall(r"^group \S+ \w+ (\S+)", outside, re.MULTILINE)
    of_gpus = {"two-gpus", "real-model"}
    assert {name for names in asked for name in names.strip(",").split(",")} == NEEDS.keys() - of_gpus


@pytest.mark.parametrize(
    ("user", "apt_get", "bwrap", "code", "said"),
    [
        (0, "exit 100", None, 1, "bubblewrap: apt-get could not install it (E: no network); "),
        (0, None, None, 1, "bubblewrap: not installed; install the package 'bubblewrap'; "),
        (
            1000,
            "exit 0",
            None,
            1,
            "bubblewrap: not installed, and this is not root; run 'sudo apt-get install ",
        ),
        (0, "exit 0", "exit 0", 0, ""),
        (0, INSTALLS_AFTER_UPDATE, None, 0, ""),
        (1000, None, "echo no namespaces >&2; exit 1", 1, "bubblewrap: it is installed and does not run here (no name"),
    ],
    ids=[
        "no network",
        "another package manager",
        "not root",
        "there already",
        "installed after an update",
        "no namespaces",
    ],
)
def test_the_set_up_of_bubblewrap(
    tmp_path: Path, user: int, apt_get: str | None, bwrap: str | None, code: int, said: str
) -> None:
    """With doubles of the programs it calls, since a test must install nothing."""
    doubles = {"id": f"echo {user}", "timeout": 'shift; exec "$@"', "bwrap": bwrap}
    doubles["apt-get"] = None if apt_get is None else f"echo 'W: old list' >&2; echo 'E: no network' >&2; {apt_get}"
    for name, text in doubles.items():
        if text is not None:
            (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
            (tmp_path / name).chmod(0o755)
    for name in ("uname", "grep", "tail", "bash", "chmod"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    run = subprocess.run(["bash", SCRIPT], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == code, run.stderr
    assert run.stderr.startswith(said) and run.stderr.count("\n") == bool(said)
