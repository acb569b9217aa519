"""Refuses arguments of the study's runner before anything is trained: numbers, and folders that cannot be written."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

from octetrl.config.errors import UserError

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
