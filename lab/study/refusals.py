"""Refuses arguments of the study's programs before anything is trained or written: numbers, and folders."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from octetrl.system.errors import UserError
from octetrl.system.json_file import read_json
from octetrl.telemetry.report_data import is_number

LEAST_PIECE_MB = 0.001


def refuse_numbers(arguments: argparse.Namespace, *, least_seconds: float) -> None:
    """UserError: a number is too small, or is none. `--seconds` must be above `least_seconds`."""
    for name, least in (("seeds", 1), ("first_seed", 0), ("jobs", 1)):
        given = getattr(arguments, name)
        if given < least:
            raise UserError(f"--{name.replace('_', '-')}: {given} is too small; give {least} or more")
    if not least_seconds < arguments.seconds < math.inf:
        raise UserError(f"--seconds: {arguments.seconds:g} can't be used; give a number above {least_seconds:g}")
    if arguments.job_seconds is not None and not 0 < arguments.job_seconds < math.inf:
        raise UserError(f"--job-seconds: {arguments.job_seconds:g} can't be used; give a number above 0")
    if not 0 <= arguments.pack_mb < math.inf:
        raise UserError(f"--pack-mb: {arguments.pack_mb:g} can't be used; give 0 or more")
    if not LEAST_PIECE_MB <= arguments.piece_mb < math.inf:
        raise UserError(f"--piece-mb: {arguments.piece_mb:g} can't be used; give {LEAST_PIECE_MB:g} or more")


def make_folder(option: str, folder: Path) -> None:
    """Create a folder. UserError: no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{option}: cannot write in '{folder}' ({error.strerror}); give another folder") from None


@contextmanager
def made_folder(option: str, folder: Path) -> Iterator[None]:
    """Create a folder; a refusal in the block removes it again if it is new and empty. UserError: as `make_folder`."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        make_folder(option, folder)
        yield
    except UserError:
        for one in missing:
            with suppress(OSError):  # it holds something, or was never created
                one.rmdir()
        raise


def read_seconds(state: Path, option: str = "--state") -> dict[str, float]:
    """How long the jobs of a state took, by kind; empty before one has ended. UserError: the file is damaged."""
    path = state / "seconds.json"
    if not path.exists():
        return {}
    try:
        known = dict(read_json(path, "delete it"))
    except UserError:
        known = {"": None}
    if not all(is_number(seconds) and seconds >= 0 for seconds in known.values()):
        raise UserError(f"{option}: '{path.name}' does not hold the seconds of jobs; delete it, or copy it again")
    return known
