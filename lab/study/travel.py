"""Carries a state of the study to another machine: `pack` writes it in pieces, `unpack` reads them.

A piece is `state.tar.gz.NN`; from the hundredth on the number has more digits. What is damaged is refused before
anything of it is in the state.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path

import yaml

from lab.study.job import write_line
from lab.study.refusals import made_folder
from octetrl.system.errors import UserError

PIECE = "state.tar.gz."
PLACE = "place.json"  # the packed state's path, which its runs name


def pack(state: Path, folder: Path, limit_mb: float, piece_mb: float) -> list[str]:
    """Write the state in pieces; returns what was left out. Codes and weights hardly compress: sizes are as on disk."""
    groups = [
        [path for path in (state / "lines", state / "before", state / "seconds.json") if path.exists()],
        *([path] for path in _visible(state / "starts")),
        *([path] for path in _visible(state / "runs")),
    ]
    left_out, used, buffer = list[str](), 0, io.BytesIO()
    write_line(state / PLACE, {"state": str(state)})
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        archive.add(state / PLACE, PLACE)
        for number, group in enumerate(groups):
            size = sum(file.stat().st_size for path in group for file in (path, *path.rglob("*")) if file.is_file())
            if number and used + size > limit_mb * 2**20:
                left_out += [str(path.relative_to(state)) for path in group]
                continue
            used += size
            for path in group:
                archive.add(path, str(path.relative_to(state)))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{PIECE}*"):
        old.unlink()
    data, step = buffer.getvalue(), int(piece_mb * 2**20)
    for number, place in enumerate(range(0, len(data), step)):
        (folder / f"{PIECE}{number:02d}").write_bytes(data[place : place + step])
    return left_out


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if not path.name.startswith(".")) if folder.is_dir() else []


def _read_pieces(folder: Path) -> bytes:
    numbered: dict[int, Path] = {}
    for path in folder.glob(f"{PIECE}*") if folder.is_dir() else ():
        number = path.name.removeprefix(PIECE)
        if number.isascii() and number.isdigit():
            if number != f"{int(number):02d}":  # beside the piece of this number, one of the two would be lost
                raise UserError(f"--unpack: '{path}' is named as no piece that --pack writes; delete or rename it")
            numbered[int(number)] = path
    if not numbered:
        raise UserError(f"--unpack: '{folder}' holds no {PIECE}00; give the folder that --pack wrote")
    missing = next(number for number in count() if number not in numbered)
    if missing < max(numbered):
        raise _damaged(folder, f"{PIECE}{missing:02d} is missing")
    return b"".join(numbered[number].read_bytes() for number in sorted(numbered))


def _damaged(folder: Path, why: object) -> UserError:
    return UserError(f"--unpack: the pieces in '{folder}' are damaged or incomplete ({why}); copy all of them again")


def unpack(folder: Path, state: Path, refuse: Callable[[Path], None] = lambda unpacked: None) -> None:
    """Put packed files into the state. Files that the state has already stay as they are. UserError: the pieces are
    damaged, or `refuse` raises it for the folder that holds what was unpacked; the state is then as before."""
    with made_folder("--state", state):
        aside = state / ".unpacked"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            _extract(folder, aside, state)
            refuse(aside)
            _move(aside, state)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _extract(folder: Path, aside: Path, state: Path) -> None:
    try:
        with tarfile.open(fileobj=io.BytesIO(_read_pieces(folder)), mode="r:gz") as archive:
            archive.extractall(aside, filter="data")
        place = json.loads((aside / PLACE).read_text()) if (aside / PLACE).exists() else {"state": str(state)}
        if not isinstance(place, dict) or not isinstance(place.get("state"), str):
            raise _damaged(folder, f"{PLACE} does not say where the state was")
        for run in _visible(aside / "runs"):
            _name_place(run, place["state"], str(state))
    except UserError:
        raise  # a ValueError too
    except json.JSONDecodeError as error:
        raise _damaged(folder, f"{PLACE} is not JSON: {error.msg}") from error
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _damaged(folder, " ".join(str(error).split())) from error


def _name_place(unpacked: Path, old: str, new: str) -> None:
    """Put the state's new path into the recipes of unpacked runs: a run resumes with the paths that it began with."""
    for recipe in unpacked.rglob("config.yaml") if old != new else ():
        recipe.write_text(_with_place(recipe.read_text(), old, new))


def _with_place(text: str, old: str, new: str) -> str:
    """Replace `old` in the YAML values that are this path or one below it. All other characters stay as they are."""
    values = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    for token in reversed(values):  # from the end: a replacement moves what is behind it
        if token.value == old or token.value.startswith(f"{old}/"):
            said = json.dumps(new + token.value.removeprefix(old), ensure_ascii=False)  # a YAML text too
            text = text[: token.start_mark.index] + said + text[token.end_mark.index :]
    return text


def _move(aside: Path, state: Path) -> None:
    try:
        for name in ("lines", "before", "starts", "runs"):
            for path in _visible(aside / name):
                target = state / name / path.name
                if not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.rename(target)
        if (aside / "seconds.json").exists() and not (state / "seconds.json").exists():
            (aside / "seconds.json").rename(state / "seconds.json")
    except OSError as error:
        raise UserError(f"--state: cannot write in '{state}' ({error.strerror}); give another folder") from error
