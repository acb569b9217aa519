"""Removes what a run's own Ray leaves behind, also when the run was killed. A script of its own, without packages.

    python -I -S ray_watcher.py TEMPORARY_FOLDER [RUN_FOLDER] < a pipe whose other end the run holds

It sleeps until the pipe closes: at the run's end, or when its process has died, however. Then it kills the processes of
this Ray, copies Ray's logs into the run folder if the run began (it has a config.yaml), and removes Ray's folder. Of a
killed run that had not begun it removes the files. The processes are found by that folder's name, which is unique: in
their environment, or among the open files of an actor.

At its end the run sends a byte, and another one where the user ended it at once. Without one the process was killed, or
ended by Ray, which has lost a process of its own. Nobody else can say so then: one line on stderr does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

STATUS_FILE = "workers.json"  # workers/status.py
LOGS = "logs/worker_[0-9]*.log"
LOCK_FILE = "lock"  # run/folder/layout.py
MARK = "OCTETRL_RAY_FOLDER"  # in the environment of Ray's processes
BYE = b"."  # from a run that ends by itself
STOPPED = b"!"  # from one that the user ended at once, and that said so
SECONDS = 5.0  # until what does not die is left alone
KILLED = "the run's process was killed, or ended by Ray, which lost its raylet or gcs_server; nothing of it still runs"


def main(folder: Path, run_folder: Path | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run, said = os.getppid(), b""
    before = set() if run_folder is None else set(run_folder.glob(LOGS))  # no worker has begun yet
    while os.getppid() == run:  # a process that inherited the pipe may keep it open
        if select.select([0], [], [], 1.0)[0]:
            said = os.read(0, 1)
            break
    until = time.monotonic() + SECONDS
    while (found := processes_of(folder, exempt={os.getpid(), run})) and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    has_begun = run_folder is not None and run_folder.joinpath("config.yaml").exists()
    if run_folder is not None and has_begun:
        with contextlib.suppress(OSError):
            keep_logs(folder, run_folder / "logs" / "ray")
            run_folder.joinpath(STATUS_FILE).unlink(missing_ok=True)
    elif run_folder is not None and said != BYE:
        with contextlib.suppress(OSError):
            remove_files(run_folder, before)
    shutil.rmtree(folder, ignore_errors=True)
    if said not in (BYE, STOPPED):
        how = "continue with --resume" if has_begun else "nothing was written"
        with contextlib.suppress(OSError):
            os.write(2, f"octetrl: {KILLED}; {how}\n".encode())


def remove_files(run_folder: Path, before: set[Path]) -> None:
    """What a run writes before it begins; `before`: logs that were there. Another run may have started there: then it
    holds the lock."""
    lock = run_folder / LOCK_FILE
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if run_folder.joinpath("config.yaml").exists():
            return
        for name in (STATUS_FILE, f".{STATUS_FILE}"):
            run_folder.joinpath(name).unlink(missing_ok=True)
        remove_logs(run_folder, before)
        lock.unlink()


def remove_logs(run_folder: Path, before: set[Path]) -> None:
    """The workers' logs but those that were there before, and their folder if it is empty then."""
    with contextlib.suppress(OSError):
        for log in set(run_folder.glob(LOGS)) - before:
            log.unlink()
        run_folder.joinpath("logs").rmdir()


def processes_of(folder: Path, exempt: set[int]) -> list[int]:
    """Ids of the processes of the Ray that lives in `folder`. Another user's can't be read, and are not ours."""
    marked = f"{MARK}={folder}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in exempt:
            continue
        process = Path("/proc", name)
        with contextlib.suppress(OSError):
            if process.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z":
                continue
            is_marked = marked in process.joinpath("environ").read_bytes().split(b"\0")
            is_actor = process.joinpath("cmdline").read_bytes().startswith(b"ray::")
            if is_marked or (is_actor and _has_open(process, folder)):
                found.append(int(name))
    return found


def _has_open(process: Path, folder: Path) -> bool:
    """Ray's processes may have overwritten their environment with their title."""
    inside = f"{folder}/"
    return any(os.readlink(link).startswith(inside) for link in process.joinpath("fd").iterdir())


def keep_logs(folder: Path, target: Path) -> None:
    for session in folder.glob("session_2*"):
        target.mkdir(parents=True, exist_ok=True)
        for file in session.joinpath("logs").glob("*.*"):
            if file.is_file() and file.stat().st_size:
                shutil.copy(file, target / file.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
