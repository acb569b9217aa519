"""The supervisor of a sandbox: makes a folder and a user for one program, starts it restricted, and removes the folder.

Started as `python -I -S -B -c ...`; in bubblewrap it is the init of the namespace. The order has the program (`source`,
`stdin`, `command`, `environment`, `limits`, `link`) and its place (`level`, `number`, `folder`, `folders`, `devices`).
From the message `started` on, a failure of this process, by an error or by a signal, is the program's doing.
"""

from __future__ import annotations

import os
import signal
import sys

from octetrl.process import usage
from octetrl.process.kernel import hide_from_other_processes
from octetrl.process.restraints import private_user, process_limit, restrain
from octetrl.process.supervisor import Supervisor, receive_order, send


def main() -> None:
    """Serve one order and exit."""
    lifeline = int(sys.argv[-1])
    os.umask(0o022)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)  # the lifeline ends this process, and nothing else does
    order = receive_order(lifeline)
    if order is None:
        return
    try:
        report = _serve(lifeline, order)
    except OSError as error:
        report = {"error": str(error)}
    send(lifeline, report)


def _serve(lifeline: int, order: dict) -> dict:
    """One sandbox, from an empty folder to a report."""
    user, limits, folder = private_user(order["number"]), order["limits"], order["folder"]
    in_bubblewrap = order["level"] == "bubblewrap"
    work, program = os.path.join(folder, "work"), os.path.join(folder, "program")
    # in bubblewrap deleted files have no more room than the others
    supervisor = Supervisor(lifeline, limits, folder=work, counts_deleted=not in_bubblewrap)
    hide_from_other_processes()
    limits["user_processes"] = process_limit(limits["processes"], alone=in_bubblewrap)
    os.mkdir(folder, 0o711)
    try:
        os.mkdir(program, 0o755)
        with open(os.path.join(program, "main.py"), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(order["source"])
        os.mkdir(work, 0o700)
        os.chown(work, user, user if os.geteuid() == 0 else -1)

        def enter() -> None:
            restrain(order, user, work, ([*order["folders"], program], [work, *order["devices"]]))
            command = [word.replace("{program}", program) for word in order["command"]]
            environment = {name: text.replace("{work}", work) for name, text in order["environment"].items()}
            os.execve(command[0], command, environment)

        owner = user if os.geteuid() == 0 else None  # who may open /dev/stdin, which is a pipe
        supervisor.start(enter, stdin=order["stdin"], owner=owner, link=order["link"])
        return supervisor.watch()
    finally:
        # in bubblewrap the folder is in memory that ends with this process; what still lives could lead us astray
        if not in_bubblewrap and not usage.processes():
            _empty_and_remove(folder)


def _empty_and_remove(folder: str) -> None:
    """Remove `folder` whatever is in it: modes that forbid it, trees too deep for a path or for recursion.

    Folders inside folders are moved up beside them until there is one level only. Called when no process of the sandbox
    lives: one that did could lead this astray by a link. That the program has removed the folder itself is no failure.
    """
    frontier = [folder] if os.path.lexists(folder) else []
    while frontier:
        place = frontier.pop()
        os.chmod(place, 0o700)
        with os.scandir(place) as entries:
            listed = list(entries)
        for entry in listed:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif place == folder:
                frontier.append(entry.path)
            else:
                os.chmod(entry.path, 0o700)
                moved = os.path.join(folder, os.urandom(12).hex())  # a name that the program could not take before
                os.rename(entry.path, moved)
                frontier.append(moved)
        if place != folder:
            os.rmdir(place)
    if os.path.lexists(folder):
        os.rmdir(folder)
