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
from octetrl.system.errors import TERMINATED, Terminated
from octetrl.system.process import end_at_once
from octetrl.system.text import ESCAPE

DONE, FAILED, WRONG_INPUT = 0, 1, 2
_STDIN, _STDOUT, _STDERR = 0, 1, 2
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
        import octetrl.cli.verbs  # noqa: F401

        ctrl_c.clean_up_first()
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
    """Make a standard stream that was closed (`2>&-`) the other one, so that nothing is said to nobody, and no file of
    a run gets its number."""
    for descriptor, other in ((_STDIN, None), (_STDOUT, _STDERR), (_STDERR, _STDOUT)):
        if _is_open(descriptor):
            continue
        if other is not None and _is_open(other):
            os.dup2(other, descriptor)
        else:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number, which is this one
        if descriptor != _STDIN:
            stream = os.fdopen(descriptor, "w", buffering=1, errors=ESCAPE, closefd=False)
            setattr(sys, "stdout" if descriptor == _STDOUT else "stderr", stream)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. An error that is not the user's is raised with its traceback."""
    try:
        return _run_verb(arguments)
    except KeyboardInterrupt:
        return _stopped()
    except Terminated as error:
        print(f"octetrl: stopped by {error.by}", file=sys.stderr)
        return TERMINATED
    except Stopped as stopped:
        return _stopped(str(stopped))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        said = " ".join(str(error).split()).split(". GPU")[0] + where
        print(
            f"octetrl: failed: the GPU's memory is full ({said}); `octetrl check RECIPE` says what needs how much, and"
            " which settings need less",
            file=sys.stderr,
        )
        return FAILED


def _run_verb(arguments: Sequence[str]) -> int:
    import typer

    from octetrl.cli.usage import usage_text
    from octetrl.cli.verbs import command_line, named_verb
    from octetrl.system.errors import RunFailed, UserError

    usage_error: type[typer.BadParameter] = typer.BadParameter.__bases__[0]  # click's, wherever typer keeps its click
    try:
        app = command_line(named_verb(arguments))
        code = app(list(arguments) or ["--help"], prog_name="octetrl", standalone_mode=False)
        if code == INTERRUPTED:  # typer's answer to a KeyboardInterrupt
            return _stopped()
        return code if isinstance(code, int) else DONE
    except UserError as error:
        return _refuse(str(error))
    except RunFailed as error:
        print(f"octetrl: failed: {error}", file=sys.stderr)
        return FAILED
    except usage_error as error:
        command = error.ctx.command_path if error.ctx is not None else "octetrl"
        return _refuse(f"{usage_text(error.format_message(), arguments)} (see `{command} --help`)")
    except OSError as error:
        where = f" '{error.filename}'" if error.filename else ""
        if error.errno in NO_SPACE:
            return _refuse(f"no space left{where and f' to write{where}'}; free some or choose another folder")
        if error.errno == errno.EBADF:
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(
                "octetrl: failed: code of the environment or reward seems to have closed file descriptors of the run's"
                f" process, as os.closerange does ({error.strerror}, {Path(place.filename).name}:{place.lineno})",
                file=sys.stderr,
            )
            return FAILED
        if error.errno not in OF_A_PATH or not where:
            raise
        return _refuse(str(UserError(f"{where.strip()} can't be used ({error.strerror}); give another path")))
    except Terminated:
        raise
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError) and (_has_no_reader(_STDOUT) or _leads_nowhere(_STDOUT)):
            return _end_of_pipe()  # a closed stdout is a SystemExit of typer's, or of rich's, which replaces it too
        # no verb of ours: what an environment calls must not end a run as if it were done
        raise RuntimeError(
            f"code that the recipe names called sys.exit({error.code!r}) in the run's process"
        ) from error
    except typer.Abort:
        return _stopped()


def _has_no_reader(descriptor: int) -> bool:
    """Whether the error is a pipe closed by its reader, as in `octetrl ... | head`."""
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


def _refuse(problem: str) -> int:
    print(f"octetrl: {problem}", file=sys.stderr)
    return WRONG_INPUT


def _stopped(word: str = "stopped") -> int:
    clear_screen()
    print(f"octetrl: {word}", file=sys.stderr)
    return INTERRUPTED


if __name__ == "__main__":
    main()
