"""How a run ended, in its run.json: `"ended": {"how": "failed", "why": "step 3: ..."}`.

    finished   all steps are done, or a callback ended it; `why` says for what
    failed     an error ended it; `why` is its message
    stopped    Ctrl-C, SIGTERM, SIGUSR1, SIGQUIT or a closed pipe

A run that starts or is resumed writes run.json again, with `"ended": null`. It stays null while the run is live, and
if its process was killed.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from octetrl.system.errors import RunFailed, UserError, error_line
from octetrl.system.files import replaced_file
from octetrl.system.process import ending_signal
from octetrl.system.text import ESCAPE, printable
from octetrl.telemetry.sinks import METRICS_FILE, RUN_FILE, read_objects

FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
MOST = 2_000  # characters of a reason
CALLBACKS = "given_callbacks"  # in run.json: classes of callbacks that no recipe names
MODULES = "module_folders"  # in run.json: where the modules lie that the recipe names
LIVE: Mapping[str, None] = {"ended": None}  # in the run.json of a run that has not ended


class Ending(NamedTuple):
    """`why`: empty for a run that finished all its steps."""

    how: str
    why: str = ""

    @property
    def text(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


def ending_of(error: BaseException | None, stopped_for: str | None = None) -> Ending:
    """The ending of a run that raised `error`. None: it did all its steps, or a callback ended it."""
    if error is None:
        return Ending(FINISHED, "" if stopped_for is None else f"stopped early, {stopped_for}"[:MOST])
    if isinstance(error, KeyboardInterrupt):
        return Ending(STOPPED, "by Ctrl-C")
    if by := ending_signal(error):
        return Ending(STOPPED, f"by {by}")
    if isinstance(error, SystemExit) and _is_of_closed_pipe(error):
        return Ending(STOPPED, "its output was closed, as by `| head`")
    said = str(error)
    if isinstance(error, SystemExit):
        said = f"sys.exit({error.code!r}) was called{_place_of(error)}"
    elif not said.strip():
        said = f"{type(error).__name__} without a message{_place_of(error)}"
    elif not isinstance(error, UserError | RunFailed):
        said = f"{type(error).__name__}: {said}"
    return Ending(FAILED, said if len(said) <= MOST else f"{said[:MOST]} ...")


def _is_of_closed_pipe(error: BaseException) -> bool:
    """Whether it was raised while a BrokenPipeError was handled, as rich does when it prints."""
    before: BaseException | None = error
    seen: set[int] = set()  # a chain may be a circle: of `raise first from second` while `second` is handled
    while before is not None and id(before) not in seen and not isinstance(before, BrokenPipeError):
        seen.add(id(before))
        before = before.__cause__ or before.__context__
    return isinstance(before, BrokenPipeError)


def _place_of(error: BaseException) -> str:
    """Where it was raised; empty if that is not known, as of an error of another process."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def read_where(folder: Path) -> dict[str, Any]:
    """The run.json of a run's folder. Empty if it has none, or a damaged one."""
    return next(read_objects(folder / RUN_FILE), {})


def module_folders(run_folder: Path) -> list[str]:
    """The folders of the modules that a run's recipe names."""
    folders = read_where(run_folder).get(MODULES)
    return [str(folder) for folder in folders] if isinstance(folders, list) else []


def given_callbacks(run_folder: Path) -> list[str]:
    """Classes of the callbacks of a run that were given in Python, not named in its recipe."""
    names = read_where(run_folder).get(CALLBACKS)
    return [str(name) for name in names] if isinstance(names, list) else []


def write_ending(folder: Path, ending: Ending) -> None:
    """Add it to run.json. An ending that is there stays, and so does a folder without a sound run.json."""
    known = read_where(folder)
    if known and not known.get("ended"):
        _write(folder, {**known, "ended": {"how": ending.how, "why": ending.why}})


def reopen(folder: Path) -> None:
    """Remove the ending from run.json, of a run that goes on. A folder without a sound run.json stays as it is."""
    if known := read_where(folder):
        _write(folder, {**known, **LIVE})


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    with replaced_file(folder / RUN_FILE, errors=ESCAPE) as file:
        json.dump(content, file)


def read_ending(where: Mapping[str, Any]) -> Ending | None:
    """From a run.json. None: the run is live, or its process was killed. Metrics of the last step are no proof that it
    has finished: they are written before the checkpoint."""
    ended = where.get("ended")
    return Ending(ended["how"], printable(" ".join(ended["why"].split()))) if ended else None


@contextmanager
def as_written(runs: str) -> Iterator[None]:
    """Within, files of `runs` that are not as a run wrote them are an error of one line, and no traceback."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"'{runs}': {METRICS_FILE}, config.yaml or another file of the run was changed after it was written"
            f" ({error_line(error)}); restore it"
        ) from error
