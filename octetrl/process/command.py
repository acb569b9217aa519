"""Runs a command below a supervisor of its own: nothing that it starts outlives it, its deadline or the run.

result = run_command(["my-agent", "--task", text], env={...}, seconds=600.0)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from octetrl.process.supervised import Supervised
from octetrl.process.supervisor import Supervisor, receive_order, send

OUTPUT_BYTES = 10 << 20  # of both streams together; a command that writes more is ended. A report has six for each
_ORDER_SECONDS = 30.0
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from octetrl.process.command import main; main(int(sys.argv[2]))"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """code: the exit code, or minus the signal; None: it was ended, or did not start (`stopped`)."""

    code: int | None
    stdout: str = ""
    stderr: str = ""
    stopped: str | None = None  # why it was ended, or could not start


def run_command(
    command: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str],
    stdin: str = "",
    seconds: float,
    cancelled: Event | None = None,
) -> CommandResult:
    """Run the command to its end. cwd: None: an empty folder of its own, which is removed after its end. env: besides
    this process's variables. cancelled: ends it when it is set."""
    order = {"command": list(command), "cwd": cwd, "env": {**os.environ, **env}, "stdin": stdin, "seconds": seconds}
    package = str(Path(__file__).parents[2])
    supervised = Supervised(
        [sys.executable, "-I", "-S", "-c", _BOOT, package], (), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    ended = Event()

    def end_if_cancelled() -> None:
        assert cancelled is not None
        while not ended.wait(0.05):
            if cancelled.is_set():
                supervised.end()
                return

    watcher = None if cancelled is None else Thread(target=end_if_cancelled, daemon=True)
    try:
        supervised.order(order, _ORDER_SECONDS)
        if watcher is not None:
            watcher.start()
        report = supervised.message(_ORDER_SECONDS)
        if report is not None and "started" in report:
            supervised.group = report["started"]
            report = supervised.message(seconds + _ORDER_SECONDS)
    finally:
        ended.set()
        said = "" if cancelled is not None and cancelled.is_set() else supervised.end()
    if report is None:
        return CommandResult(None, stopped=f"its supervisor ended without a report: {said.strip()[-300:]}")
    if "error" in report:
        return CommandResult(None, stopped=f"it did not start: {report['error']}")
    return CommandResult(report["exit"], report["stdout"], report["stderr"], report["stopped"])


def main(lifeline: int) -> None:
    """The supervisor's side."""
    order = receive_order(lifeline)
    if order is None:
        return
    own = tempfile.mkdtemp(prefix="octetrl-agent-") if order["cwd"] is None else None
    supervisor = Supervisor(lifeline, {"wall_seconds": order["seconds"], "output_bytes": OUTPUT_BYTES})
    if supervisor.start(lambda: _enter(order, own or order["cwd"]), stdin=order["stdin"]):
        os._exit(127)  # not reached: the child has become the command
    try:
        report = supervisor.watch()
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
    send(lifeline, report)


def _enter(order: Mapping[str, Any], folder: str) -> None:
    os.chdir(folder)
    os.execvpe(order["command"][0], order["command"], order["env"])
