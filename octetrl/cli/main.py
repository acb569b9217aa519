"""The command line: `octetrl VERB ...`, one file a verb.

Exit codes: 0 done; 1 the run failed; 2 the user's input is wrong (one line on stderr, no traceback, nothing written);
130 stopped by Ctrl-C. Nothing here imports torch: a verb imports what it runs when it runs, so `--help`, `check` and
every refusal of a recipe come at once.
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from octetrl.cli.bench import bench
from octetrl.cli.check import check
from octetrl.cli.doctor import doctor
from octetrl.cli.eval import evaluate
from octetrl.cli.export import export
from octetrl.cli.generate import generate
from octetrl.cli.rollouts import rollouts
from octetrl.cli.serve import serve
from octetrl.cli.train import train
from octetrl.config.errors import UserError
from octetrl.config.text import ESCAPE

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
OF_A_PATH = (  # what a path that was given may do, wherever it is looked at first
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EIO),
)
_UsageError: Any = typer.BadParameter.__bases__[0]  # click's, wherever this typer keeps its click

app = typer.Typer(
    help="RL post-training of language models with FP8 end to end.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train)
app.command("eval")(evaluate)
app.command("rollouts")(rollouts)
app.command("generate")(generate)
app.command("serve")(serve)
app.command("check")(check)
app.command("doctor")(doctor)
app.command("export")(export)
app.add_typer(bench, name="bench")


def main() -> NoReturn:
    """The `octetrl` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=ESCAPE)  # as stderr is: no text of a model, task or path ends a run
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. What is not the user's doing is raised: its traceback is for us."""
    try:
        code = app(list(arguments) or ["--help"], prog_name="octetrl", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except UserError as error:
        return _refuse(str(error))
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "octetrl"
        return _refuse(f"{' '.join(error.format_message().split())} (see `{command} --help`)")
    except OSError as error:
        where = f" '{error.filename}'" if error.filename else ""
        if error.errno in NO_SPACE:
            return _refuse(f"no space left{where and f' to write{where}'}; free some or choose another folder")
        if error.errno not in OF_A_PATH or not where:
            raise
        return _refuse(f"{where.strip()} can't be used ({error.strerror}); give another path")
    except SystemExit as error:  # no verb of ours: what an environment calls must not end a run as if it were done
        raise RuntimeError(
            f"code that the recipe names called sys.exit({error.code!r}) in the run's process"
        ) from error
    except (KeyboardInterrupt, typer.Abort):
        print("octetrl: stopped", file=sys.stderr)
        return INTERRUPTED


def _refuse(problem: str) -> int:
    print(f"octetrl: {problem}", file=sys.stderr)
    return WRONG_INPUT


if __name__ == "__main__":
    main()
