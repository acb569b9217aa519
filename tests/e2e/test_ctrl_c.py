"""Ctrl-C, once and twice, as early as the imports: every verb ends with 130 and a word, and leaves no traceback and no
bars on a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.e2e.terminal import run_on_terminal, screen
from tests.e2e.tiny_run import recipe_tree

REPOSITORY = Path(__file__).parents[2]
RECIPE, MODEL = "r.yaml", "model"
VERBS = {
    "train": ["train", RECIPE],
    "eval": ["eval", MODEL, "--recipe", RECIPE],
    "generate": ["generate", MODEL, "-p", "1 + 2 =", "--max-new-tokens", "100"],
    "serve": ["serve", MODEL, "--port", "0"],
    "check": ["check", RECIPE],
    "bench": ["bench", "train", "--model", "tiny", "precision=bf16"],
    "doctor": ["doctor", RECIPE],
    "rollouts": ["rollouts", "run"],
    "export": ["export", "run", "--to", "out"],
    "demo": ["demo"],
}
LONG = ("train", "generate", "serve", "demo")  # with an end of their own after Ctrl-C, or processes to end
# Stands in for a slow machine: an interpreter whose every import of this project takes a moment, and that says so.
SLOW = """
import sys, time, importlib.abc
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("octetrl.cli.verbs"):
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
sys.argv = ["octetrl", *sys.argv[1:]]
from octetrl.cli.main import main
main()
"""

LIBRARY = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    raise ImportError("cannot load module more than once per process") from None
"""


@pytest.mark.parametrize(("verb", "times"), [("serve", 2), ("check", 2), ("train", 1)])
def test_while_a_verb_is_imported(verb: str, times: int, tmp_path: Path) -> None:
    process = _start([sys.executable, "-c", SLOW, *VERBS[verb]], tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    _press(process, times)
    _assert_stopped(process)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("verb", "number"), [("train", signal.SIGTERM), ("eval", signal.SIGUSR1)])
def test_sigterm_while_a_verb_is_imported(verb: str, number: signal.Signals, tmp_path: Path) -> None:
    process = _start([sys.executable, "-c", SLOW, *VERBS[verb]], tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=240)
    said = f"octetrl: stopped by {number.name}\n"
    assert (process.returncode, err) == (143, said) and list(tmp_path.iterdir()) == []


def test_while_a_verb_imports_a_library(tmp_path: Path) -> None:
    """A library that turns the KeyboardInterrupt into an error of its own, as numpy does, makes no traceback."""
    (tmp_path / "slow_library.py").write_text(LIBRARY)
    code = "from octetrl.cli.ctrl_c import CtrlC; c = CtrlC(); c.install(); import slow_library"
    process = _start([sys.executable, "-c", code], tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    _press(process, 1)
    _assert_stopped(process)


# An interpreter that says when the handler is there: before, Ctrl-C is Python's own.
INSTALLED = """
import sys
from octetrl.cli import ctrl_c
install = ctrl_c.CtrlC.install
def install_and_say(handler):
    install(handler)
    print("installed", flush=True)
ctrl_c.CtrlC.install = install_and_say
sys.argv = ["octetrl", *sys.argv[1:]]
from octetrl.cli.main import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_in_the_first_seconds(verb: str, model: Path, tmp_path: Path) -> None:
    """Once and twice, at moments from the set-up on. A verb that was quicker has ended by itself."""
    (tmp_path / MODEL).symlink_to(model)
    (tmp_path / RECIPE).write_text(yaml.safe_dump(recipe_tree(Path(MODEL), Path("run"), {"steps": 400})))
    later = ((2.2, 2),) if verb in LONG else ()
    for moment, times in ((0.2, 1), *later):
        process = _start([sys.executable, "-c", INSTALLED, *VERBS[verb]], tmp_path)
        assert process.stdout is not None and process.stdout.readline() == "installed\n"
        time.sleep(moment)
        _press(process, times)
        _assert_stopped(process, may_be_done=True)
        if verb == "train" and times == 1:  # a second Ctrl-C ends it at once, also while it cleans up
            assert not (tmp_path / "run" / "lock").exists() or (tmp_path / "run/config.yaml").exists()


def _start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def _press(process: subprocess.Popen[str], times: int) -> None:
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)


def _assert_stopped(process: subprocess.Popen[str], *, may_be_done: bool = False) -> None:
    _, err = process.communicate(timeout=240)
    assert "Traceback" not in err and "Exception ignored" not in err, err
    if may_be_done and process.returncode in (0, 1, 2):
        return
    assert process.returncode == 130, err
    assert "octetrl: stopped" in err


@pytest.mark.parametrize(
    ("left", "name"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), name='refresher').start()", "refresher"),
        ("executor.submit(time.sleep, 600)", "tokenizer_0"),  # such as a chat template without end
        ("executor.submit(int).result()", ""),
    ],
)
def test_a_thread_that_was_left_running_does_not_keep_the_command(tmp_path: Path, left: str, name: str) -> None:
    """`finish` at the end of `main`: the interpreter would wait for the thread, and ignore Ctrl-C."""
    code = f"""
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from octetrl.cli import ctrl_c
ctrl_c.TO_END = 0.1
executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
{left}
print("no problems")
ctrl_c.CtrlC().finish(3, was_stopped=False)
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (3, "no problems\n")
    assert done.stderr == (f"octetrl: ended with threads that still ran: {name}\n" if name else "")


def test_the_small_terminal() -> None:
    assert screen(b"one\r\ntwo\x1b[2K\rthree\x1b[1A\r\x1b[2Kfour\n", 80) == ["four", "three"]
    assert screen(b"abcdef\r\n\x1b[31mred\x1b[0m", 4) == ["abcd", "ef", "red"]


def test_a_run_that_is_stopped_twice(model: Path, tmp_path: Path) -> None:
    changes = {"steps": 400, "logging.console": "auto", "rollout.max_new_tokens": 24}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_tree(model, Path("run"), changes)))
    bottoms, pressed = set[str](), 0

    def on_screen(lines: list[str], press: Callable[[], None]) -> None:
        nonlocal pressed
        bottoms.update(re.findall(r"^  (\w+)[ \d/]+[━─]{8}", "\n".join(lines[-4:]), re.MULTILINE))
        steps = any(line.startswith("step ") for line in lines) and {"rollout", "train", "step"} <= bottoms
        stops = any("stopping after this step" in line for line in lines)
        if (steps and pressed == 0) or (stops and pressed == 1):
            pressed += 1
            press()

    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "octetrl", "train", "r.yaml"]
    ended = run_on_terminal(command, tmp_path, environment, on_screen)
    text = "\n".join(ended.screen)
    assert ended.code == 130, text
    assert ended.received.startswith(b"  loading PyTorch\r") and "PyTorch" not in text, text
    assert {"rollout", "train", "step"} <= bottoms
    assert ended.shows_cursor and not re.search("[━─]", text), text
    *_, last, empty = ended.screen
    assert empty == "" and "Traceback" not in text
    assert re.match(r"octetrl: stopped", last) or "is saved; continue with" in text.replace("\n", ""), text
    assert pressed == 2
