"""Exit codes, one line for the user, and no torch before it is needed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

import octetrl
from octetrl.cli.ctrl_c import is_of_ctrl_c
from octetrl.cli.main import run_command
from octetrl.cli.verbs import VERBS, command_line
from octetrl.config.schema import Recipe
from octetrl.system.errors import RunFailed, UserError
from octetrl.workers.status import StatusReport, WorkerStatus, write_status

RECIPE = "model: {path: m}\nenvironment: {dataset: chain_sum}\noutput_dir: run\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A sound recipe in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").touch()  # what is missing is refused before the command runs
    return "r.yaml"


def stand_in(monkeypatch: pytest.MonkeyPatch, behaviour: object) -> None:
    """`octetrl.run.loop` replaced by a module of a few lines."""

    def train(recipe: Recipe, resume: bool, *, allowed: Sequence[str], optimizer_of: str | None) -> None:
        assert not allowed and optimizer_of is None
        if isinstance(behaviour, BaseException):
            raise behaviour
        assert callable(behaviour)
        behaviour(recipe, resume)

    loop = ModuleType("octetrl.run.loop")
    loop.train = train  # type: ignore[attr-defined]
    import octetrl.cli.train  # noqa: F401 (it imports modules of the package that is replaced)

    run = ModuleType("octetrl.run")
    run.loop = loop  # type: ignore[attr-defined]
    for module in (run, loop):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_sys_exit_of_foreign_code_is_no_success(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, SystemExit(0))
    with pytest.raises(RuntimeError, match=r"code that the recipe names called sys\.exit\(0\)"):
        run_command(["train", recipe])


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (UserError("model.path: wrong"), 2, "octetrl: model.path: wrong"),
        (RunFailed("step 3: too far apart"), 1, "octetrl: the run failed: step 3: too far apart"),
        (KeyboardInterrupt(), 130, "octetrl: stopped before the run began; nothing was written"),
        (
            OSError(errno.ENOSPC, "full", "run/x"),
            2,
            "octetrl: no space left to write 'run/x'; free some or choose another",
        ),
        (OSError(errno.EBADF, "Bad file descriptor"), 1, "octetrl: failed: "),
    ],
)
def test_how_a_run_ends(
    raised: BaseException,
    code: int,
    line: str,
    recipe: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in(monkeypatch, raised)
    assert run_command(["train", recipe]) == code
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert error.count("\n") == 1


def test_a_full_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def verb(arguments: Sequence[str]) -> int:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.55 GiB. GPU 0 has 139 GiB.")
        error.add_note("raised on worker 1 (host b, GPU 0)")
        raise error

    monkeypatch.setattr("octetrl.cli.verbs.run_verb", verb)
    assert run_command(["bench", "step"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("octetrl: failed: the GPU's memory is full (CUDA out of memory. Tried to allocate 3.55 GiB")
    assert "raised on worker 1" in error and error.count("\n") == 1


def test_our_own_bugs_keep_their_traceback(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in (RuntimeError("bug"), OSError(errno.EIO, "broken disk"), AssertionError("bug")):
        stand_in(monkeypatch, bug)
        with pytest.raises(type(bug)):
            run_command(["train", recipe])


def test_ctrl_c_says_how_to_go_on(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(resolved: Recipe, resume: bool) -> None:
        Path("run/checkpoints").mkdir(parents=True, exist_ok=True)
        Path("run/config.yaml").write_text("")
        raise KeyboardInterrupt

    stand_in(monkeypatch, stopped)
    assert run_command(["train", recipe, "rollout.stop=[a b]"]) == 130
    how = "continue with: octetrl train r.yaml 'rollout.stop=[a b]' --resume"
    assert f"octetrl: stopped; no step is saved; {how}" in capsys.readouterr().err
    for step in (3, 40):
        Path(f"run/checkpoints/step_{step:06d}").mkdir()
        Path(f"run/checkpoints/step_{step:06d}/manifest.json").touch()
    assert run_command(["train", recipe, "rollout.stop=[a b]", "--resume"]) == 130
    assert f"octetrl: stopped; step 40 is saved; {how}" in capsys.readouterr().err


def test_status_of_a_run_without_workers_is_its_last_step(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("m/config.yaml").write_text("steps: 30\n")
    rows = [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.5, "time/step": 3.0, "loss": None}]
    Path("m/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_command(["status", "m"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step  2/30  reward 0.500  3.0 s"
    assert second.startswith("written ") and second.endswith(" ago; `octetrl report m --terminal` shows all steps")


def test_status_of_a_run_that_starts(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run/logs").mkdir(parents=True)
    Path("run/lock").write_text(str(os.getpid()))
    for name, said in (
        ("", "are being started"),
        ("logs/worker_0.log", "1 worker started"),
        ("config.yaml", "is built"),
    ):
        Path("run", name).touch()
        assert run_command(["status", "run"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("starting for ") and said in out


@pytest.mark.parametrize("written", ["2000000000", "", "9" * 5000])
def test_status_of_a_run_that_ended_while_it_started(
    written: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run/lock").write_text(written)
    assert run_command(["status", "run"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no finished step; ") and line.endswith("start it again with the same command")
    Path("run/config.yaml").touch()
    assert run_command(["status", "run"]) == 0
    assert "`octetrl train run/config.yaml --resume` continues it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "in_force", "said"),
    [
        ("keep_cache", "recompute_cache", "recomputed with the new weights; keep_cache cannot keep a calibrated cache"),
        ("recompute_cache", "recompute_cache", "recomputed with the new weights"),
        ("off", None, None),
        ("keep_cache", "something", None),
    ],
)
@pytest.mark.parametrize("is_live", [True, False], ids=["live", "ended"])
def test_status_says_what_becomes_of_the_cache_of_unfinished_answers(
    is_live: bool, asked: str, in_force: str | None, said: str | None, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("m/config.yaml").write_text(f"steps: 30\ncluster: {{weights_in_flight: '{asked}'}}\n")
    Path("m/run.json").write_text(json.dumps({"run": "1", **({"weights_in_flight": in_force} if in_force else {})}))
    Path("m/metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.1}\n')
    if is_live:
        write_status(Path("m"), [StatusReport(WorkerStatus(0, "here", "", 7, "train", 1.0, True, 0.5), 0.0)])
    assert run_command(["status", "m"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    line = f"weights in flight: the KV cache of unfinished answers is {said}"
    assert last == line if said is not None else "weights in flight" not in last


WITHOUT_IMPORTS = """
import sys
from octetrl.cli.main import run_command
for words, codes, heavy in (
    (["--version", "--help", "recipes", "metrics reward/mean", "status gone"], [0, 0, 0, 0, 2],
     {"octetrl.config.schema", "octetrl.cli.train", "octetrl.cli.bench", "numpy"}),
    (["train --help", "train gone.yaml"], [0, 2], {"torch", "transformers", "numpy", "reasoning_gym"}),
):
    found = [run_command(one.split()) for one in words]
    assert found == codes and not heavy & set(sys.modules), (found, heavy & set(sys.modules))
"""


def test_a_cheap_command_imports_no_other_and_help_and_refusals_no_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_IMPORTS], check=True, capture_output=True, timeout=240)


def test_each_verb_has_the_summary_of_its_docstring() -> None:
    whole = command_line()
    for command in whole.registered_commands:
        assert command.callback is not None and command.callback.__doc__ == VERBS[str(command.name)]
    [bench] = whole.registered_groups
    assert bench.typer_instance is not None and bench.typer_instance.registered_callback is not None
    assert bench.typer_instance.registered_callback.callback is not None
    assert bench.typer_instance.registered_callback.callback.__doc__ == VERBS["bench"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"octetrl {octetrl.__version__}\n"


@pytest.mark.parametrize("arguments", [["recipes"], ["train", "--help"]])
def test_a_closed_pipe_is_no_error_message(arguments: list[str]) -> None:
    """As `octetrl | head` closes it."""
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run([sys.executable, "-m", "octetrl", *arguments], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (run.returncode, run.stderr) == (1, "")


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}], ids=str)
def test_threads_of_torch_wait_for_a_short_time_unless_told_otherwise(given: dict[str, str]) -> None:
    code = "import octetrl, os, sys; print(os.environ.get('GOMP_SPINCOUNT', '-'), 'torch' in sys.modules)"
    usual = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    run = subprocess.run([sys.executable, "-c", code], env=usual | given, capture_output=True, text=True, check=True)
    expected = given.get("GOMP_SPINCOUNT", "-") if given else "10000"
    assert run.stdout == f"{expected} False\n"


def test_a_circle_of_causes_is_no_ctrl_c_and_ends() -> None:
    first, second = OSError(5, "EIO"), ValueError("of the first")
    first.__cause__, second.__cause__ = second, first
    assert not is_of_ctrl_c(first)
    second.__cause__ = KeyboardInterrupt()
    assert is_of_ctrl_c(first)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_the_other_one(closed: str) -> None:
    """A refusal arrives, and no file gets the number of a standard stream."""
    look = "import os, sys, octetrl.cli.main as main; main._open_closed_streams(); assert os.dup(0) > 2;"
    look += "print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)"
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, look], capture_output=True)
    said = [] if closed.startswith("<&- ") else [b"err", b"out"]
    assert sorted((done.stdout + done.stderr).split()) == said and done.returncode == 3


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["bench", "step", "--help"], "--workload "),
        (["bench", "train", "--help"], "--lengths "),
        (["bench", "rollout", "--help"], "--rounds "),
        (["generate", "--help"], "--api-key-variable "),
        (["metrics", "token_mult"], "mismatch/decile_{n}/token_mult_prob_error "),
    ],
)
def test_no_name_is_cut(
    words: list[str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(words) == 0
    out = capsys.readouterr().out
    assert name in out and "…" not in out and max(map(len, out.splitlines())) <= 80
    assert "<str>" not in out and "int range" not in out
