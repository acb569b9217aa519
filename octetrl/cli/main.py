"""The command line: `octetrl VERB ...`, one file per command.

Exit codes: 0 done; 1 the run failed; 2 the user's input is wrong (one line on stderr, no traceback, nothing written);
130 stopped by Ctrl-C; 143 stopped by SIGTERM. Nothing here imports torch: a verb imports what it runs when it runs,
so `--help`, `check` and every error in a recipe appear at once. Only the command that is asked for is
imported, after Ctrl-C has its handler.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from octetrl.cli.ctrl_c import INTERRUPTED, CtrlC, Stopped, clear_screen, is_of_ctrl_c
from octetrl.system.errors import TERMINATED, RunFailed, Terminated, UserError
from octetrl.system.process import end_at_once
from octetrl.system.text import ESCAPE

FAILED, WRONG_INPUT = 1, 2
_STDOUT, _STDERR = 1, 2
STREAMS = {_STDOUT: "stdout", _STDERR: "stderr"}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
OF_A_PATH = (  # what a path that was given may do, wherever it is looked at first
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EIO),
)


def main() -> NoReturn:
    """The `octetrl` command."""
    ctrl_c = CtrlC()
    try:
        _open_closed_streams()
        ctrl_c.install()
        end_at_once()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors=ESCAPE)  # as stderr is: no text of a model, task or path ends a run
        code = run_command(sys.argv[1:])
    except BaseException as error:  # a library may have made another error of a KeyboardInterrupt
        ctrl_c.end_at_next()
        if not is_of_ctrl_c(error):
            raise
        code = _stopped()
    if _has_no_reader(_STDOUT):
        code = _end_of_pipe()
    ctrl_c.finish(code, was_stopped=code in (INTERRUPTED, TERMINATED))
    sys.exit(code)


def _open_closed_streams() -> None:
    """Make a standard stream that was closed (`2>&-`) the other one, so that a refusal arrives, or /dev/null if both
    are closed. So no file of a run gets its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    closed = {number: name for number, name in STREAMS.items() if getattr(sys, name) is None}
    for number, name in closed.items():
        if len(closed) == 1:
            os.dup2(_STDOUT + _STDERR - number, number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, errors=ESCAPE, closefd=False))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. An error that is not the user's is raised with its traceback."""
    try:
        from octetrl.cli.verbs import run_verb  # while it is imported, Ctrl-C ends the process

        code = run_verb(arguments)
        return _stopped() if code == INTERRUPTED else code
    except KeyboardInterrupt:
        return _stopped()
    except Stopped as stopped:
        return _stopped(str(stopped))
    except Terminated as error:
        return _end(TERMINATED, f"stopped by {error.by}")
    except UserError as error:
        return _end(WRONG_INPUT, str(error))
    except RunFailed as error:
        return _end(FAILED, f"failed: {error}")
    except OSError as error:
        return _end_of_file_error(error)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        said = " ".join(str(error).split()).split(". GPU")[0] + where
        advice = "`octetrl check RECIPE` says what needs how much, and which settings need less"
        return _end(FAILED, f"failed: the GPU's memory is full ({said}); {advice}")
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError) and (_has_no_reader(_STDOUT) or _leads_nowhere(_STDOUT)):
            return _end_of_pipe()  # a closed stdout is a SystemExit of typer's, or of rich's, which replaces it too
        # no verb of ours: what an environment calls must not end a run as if it were done
        raise RuntimeError(
            f"code that the recipe names called sys.exit({error.code!r}) in the run's process"
        ) from error


def _end_of_file_error(error: OSError) -> int:
    """One line where the disk is full, a path can't be used, or foreign code closed a file. Raises any other error."""
    where = f"'{error.filename}'" if error.filename else ""
    if error.errno in NO_SPACE:
        return _end(WRONG_INPUT, f"no space left{where and f' to write {where}'}; free some or choose another folder")
    if error.errno == errno.EBADF:
        place = traceback.extract_tb(error.__traceback__)[-1]
        seen = f"{error.strerror}, {Path(place.filename).name}:{place.lineno}"
        what = "code of the environment or reward seems to have closed file descriptors of the run's process"
        return _end(FAILED, f"failed: {what}, as os.closerange does ({seen})")
    if error.errno not in OF_A_PATH or not where:
        raise error
    return _end(WRONG_INPUT, str(UserError(f"{where} can't be used ({error.strerror}); give another path")))


def _has_no_reader(descriptor: int) -> bool:
    """Whether it is a pipe closed by its reader, as in `octetrl ... | head`."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _leads_nowhere(descriptor: int) -> bool:
    return os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))


def _end_of_pipe() -> int:
    """Discard unwritten output, so that the interpreter does not fail on it at exit. Its reader has had enough."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in filter(_has_no_reader, (_STDOUT, _STDERR)):
        os.dup2(nowhere, descriptor)
    return FAILED


def _end(code: int, line: str) -> int:
    print(f"octetrl: {line}", file=sys.stderr)
    return code


def _stopped(word: str = "stopped") -> int:
    clear_screen()
    return _end(INTERRUPTED, word)


if __name__ == "__main__":
    main()
