"""Checkpoints that are either whole or not there.

    checkpoints/step_000050/    manifest.json, and the files it names with size and checksum (file_digests.py)

Written to `.step_000050.partial` beside it, every file synced, then the folder; renamed; the parent synced. A process
killed at any point leaves the checkpoints before it as they were, and a hidden folder that the next start removes.
Deleting renames to a hidden name first, for the same reason. No pickle: safetensors for tensors, else JSON or bytes.
`stage` does all but the renaming, so that a run can record the step in between.

Reading verifies every file first. What is missing, cut short or altered is named, and the checkpoint before it offered.
The manifest also names the run that wrote it, if the run has an id: `prune` removes no other run's.
Tensors beyond SHARD_BYTES go on in further files (`optimizer.safetensors.1`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from octetrl.config.ranking import best_steps, kept_steps
from octetrl.system.errors import UserError
from octetrl.trainer.file_digests import (
    MANIFEST,
    STEP_NAME,
    WrittenFile,
    altered_files,
    body_sha256,
    digest_file,
    hashing_threads,
    parse_manifest,
)
from octetrl.trainer.state_writer import Content, Files, in_shards, write_files

OPTIMIZER = "optimizer.safetensors"
HIDDEN_SUFFIXES = (".partial", ".replaced", ".removed")
UNKNOWN = "?"  # owner of a checkpoint whose manifest cannot be read

Payload = Mapping[str, bytes | Mapping[str, Any]]  # *.safetensors: tensors; *.json: JSON or bytes; else bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint. Each method reads one file of the payload that `save` was given."""

    folder: Path
    step: int
    metrics: Mapping[str, float]
    files: tuple[str, ...]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All shards of a *.safetensors entry, on the CPU."""
        self._check(name)
        tensors: dict[str, Tensor] = {}
        for file in self.files:
            if file == name or file.startswith(f"{name}."):
                tensors |= load_file(self.folder / file)
        return tensors

    def json(self, name: str) -> Any:
        return json.loads(self.bytes(name))

    def bytes(self, name: str) -> bytes:
        self._check(name)
        return (self.folder / name).read_bytes()

    def _check(self, name: str) -> None:
        if name not in self.files:
            raise UserError(f"checkpoint {self.folder} has no {name}; it was written by another kind of run")


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """A checkpoint that is written and synced under a hidden name. `commit` makes it visible."""

    final: Path
    num_bytes: int

    def commit(self) -> Path:
        """Renames it, replacing one of that step. Returns its folder."""
        partial = _hidden(self.final, ".partial")
        with _explained(self.final):
            if self.final.exists():
                self.final.rename(_hidden(self.final, ".replaced"))
            partial.rename(self.final)
            _sync(self.final.parent)
        remove_leftovers(self.final.parent)
        return self.final

    def discard(self) -> None:
        shutil.rmtree(_hidden(self.final, ".partial"), ignore_errors=True)


def stage(
    folder: Path,
    step: int,
    payload: Payload,
    *,
    write_more: Callable[[Path], Iterable[WrittenFile] | None] | None = None,
    metrics: Mapping[str, float] | None = None,
    run_id: str | None = None,
) -> StagedCheckpoint:
    """Writes the checkpoint of `step` under a hidden name in `folder`.

    `write_more(folder)` may add files. It returns those that it synced and hashed; the others are synced and hashed
    here. `metrics` and `run_id` are kept for `prune`. A disk that is full, or fails, is a UserError, and leaves nothing
    half-written.
    """
    final = folder / f"step_{step:06d}"
    partial = _hidden(final, ".partial")
    with _explained(final):
        folder.mkdir(exist_ok=True)  # in a run's folder, which is there unless somebody moved it
    remove_leftovers(folder)
    try:
        with _explained(final):
            partial.mkdir()
            written = list(write_files(partial, _files_of(payload)))
            if write_more is not None:
                written += write_more(partial) or ()
                written += _synced_and_hashed(partial, {file.name for file in written})
            body = _manifest(written, step, metrics or {}, run_id)
            write_files(partial, {MANIFEST: json.dumps(body, indent=1).encode()})
            _sync(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return StagedCheckpoint(final, sum(file.size for file in written))


@contextmanager
def _explained(final: Path) -> Iterator[None]:
    """Makes one line of an error of the disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        kept = latest(final.parent)
        before = f"the last whole checkpoint is {kept.name}" if kept else "there is no checkpoint before it"
        if _is_disk_full(error):
            raise UserError(
                f"no space left for checkpoint {final} ({before}); free some, or lower checkpoint.keep_last, then"
                f" --resume"
            ) from error
        raise UserError(
            f"checkpoint {final} can't be written: {error} ({before}); repair the disk or choose another, then --resume"
        ) from error


def load(path: Path) -> Checkpoint:
    """Verifies every file of `.../step_NNNNNN`. UserError names what is wrong and what to resume from."""
    manifest = check_complete(path)
    for name in altered_files(path, manifest["files"]):
        raise _damaged(path, name, f"was altered (its checksum is not that of {MANIFEST})")
    return Checkpoint(path, manifest["step"], manifest["metrics"], tuple(manifest["files"]))


def check_complete(path: Path) -> dict[str, Any]:
    """The manifest of `.../step_NNNNNN`. UserError for a file that is missing or has another size. Reads no other
    file."""
    if not path.is_dir() or STEP_NAME.fullmatch(path.name) is None:
        raise UserError(f"{path} is not a checkpoint folder; one is called step_NNNNNN and holds {MANIFEST}")
    manifest = _read_manifest(path)
    if manifest is None:
        raise _damaged(path, MANIFEST, "is missing or altered")
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise _damaged(path, name, "is missing")
        if file.stat().st_size != entry["size"]:
            raise _damaged(path, name, f"has {file.stat().st_size} bytes where {entry['size']} were written")
    return manifest


def latest(folder: Path) -> Path | None:
    """The checkpoint of the highest step, not verified; None when there is none."""
    steps = _steps(folder)
    return steps[max(steps)] if steps else None


def latest_of(folder: Path, run_id: str | None, until: int | None = None) -> Path | None:
    """`latest` of one run, up to step `until`. One whose manifest cannot be read counts too: it is refused by its name,
    not passed over."""
    steps = {step: path for step, path in _steps(folder).items() if until is None or step <= until}
    own = {step: path for step, path in steps.items() if _owner(path) in (run_id, UNKNOWN)}
    return own[max(own)] if own else None


def best_of(folder: Path, run_id: str | None, metric: str) -> Path | None:
    """The checkpoint of one run with the highest `metric`, by the rule of `prune`. None if none has it."""
    steps = _steps(folder)
    manifests = {step: manifest for step, path in steps.items() if (manifest := _read_manifest(path))}
    ranked = _ranked({step: one for step, one in manifests.items() if one.get("run") == run_id}, metric)
    return steps[ranked[0]] if ranked else None


def _ranked(manifests: Mapping[int, Mapping[str, Any]], metric: str) -> list[int]:
    return best_steps(((step, manifest["metrics"].get(metric)) for step, manifest in manifests.items()), metric)


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder, step_NNNNNN."""
    return int(path.name.removeprefix("step_"))


def owners(folder: Path) -> dict[str, str | None]:
    """Run id by the checkpoint's name; None for one of no run, UNKNOWN without a readable manifest."""
    return {path.name: _owner(path) for path in _steps(folder).values()}


def prune(
    folder: Path,
    *,
    keep_last: int,
    keep_best: int = 0,
    keep_every: int = 0,
    best_metric: str = "",
    run_id: str | None = None,
    exempt: Collection[int] = (),
) -> list[Path]:
    """Hide the checkpoints of run `run_id`, all but the last `keep_last`, the `keep_best` of the best `best_metric`,
    multiples of `keep_every` (config/ranking.py) and those of the `exempt` steps. A folder in which somebody has put a
    file of their own stays too. Returns the hidden folders, for `remove_hidden`."""
    steps = _steps(folder)
    manifests = {step: _read_manifest(path) for step, path in steps.items()}
    own = {step: manifest for step, manifest in manifests.items() if manifest and manifest.get("run") == run_id}
    values = {step: manifest["metrics"].get(best_metric) for step, manifest in own.items()}
    kept = kept_steps(values, keep_last=keep_last, keep_best=keep_best, keep_every=keep_every, metric=best_metric)
    kept |= set(exempt)
    kept |= {step for step, manifest in own.items() if _has_others(steps[step], manifest)}
    hidden = [_hidden(steps[step], ".removed") for step in sorted(own.keys() - kept)]
    for step, path in zip(sorted(own.keys() - kept), hidden, strict=True):
        steps[step].rename(path)
    return hidden


def _has_others(path: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is a link, or has files that it was not saved with. Hidden ones are a file system's."""
    known = {*manifest["files"], MANIFEST}
    return path.is_symlink() or any(one.name not in known for one in path.iterdir() if not one.name.startswith("."))


def remove_hidden(folders: Iterable[Path]) -> None:
    """Deletes what `prune` has hidden. That may take seconds: call it where no step waits."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed process left, and what `prune` hid. No other thread may be writing a checkpoint here."""
    if folder.is_dir():
        for path in folder.glob(".step_*"):
            if path.suffix in HIDDEN_SUFFIXES:
                shutil.rmtree(path, ignore_errors=True)  # another thread may be at it


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _steps(folder: Path) -> dict[int, Path]:
    matches = [(STEP_NAME.fullmatch(path.name), path) for path in folder.glob("step_*")]
    return {int(match[1]): path for match, path in matches if match}


def _owner(path: Path) -> str | None:
    manifest = _read_manifest(path)
    return UNKNOWN if manifest is None else manifest.get("run")


def _files_of(payload: Payload) -> Files:
    """The payload as the files to write."""
    files: dict[str, Content] = {}
    for name, content in payload.items():
        assert "/" not in name, f"a checkpoint is flat, '{name}' is not a plain file name"
        if name.endswith(".safetensors"):
            assert isinstance(content, Mapping), f"{name} takes a mapping of tensors"
            files |= in_shards(name, content)
            continue
        if name.endswith(".json") and not isinstance(content, bytes):
            content = json.dumps(content, indent=1).encode()
        assert isinstance(content, bytes), f"{name} takes bytes"
        files[name] = content
    return files


def _synced_and_hashed(folder: Path, known: Container[str]) -> list[WrittenFile]:
    """The files that something else wrote."""
    files = [file for file in sorted(folder.iterdir()) if file.name not in known]
    for file in files:
        _sync(file)
    with hashing_threads() as pool:
        return [digest_file(file, pool) for file in files]


def _manifest(
    written: Iterable[WrittenFile], step: int, metrics: Mapping[str, float], run_id: str | None
) -> dict[str, Any]:
    files = {file.name: file.entry() for file in sorted(written, key=lambda file: file.name)}
    body: dict[str, Any] = {"step": step, "metrics": dict(metrics), "files": files}
    if run_id is not None:
        body["run"] = run_id
    return body | {"sha256": body_sha256(body)}


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """None when it is missing or is not what was written."""
    try:
        return parse_manifest((path / MANIFEST).read_bytes())
    except OSError:
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_disk_full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error)


def _damaged(path: Path, name: str, what: str) -> UserError:
    earlier = [step for step in _steps(path.parent) if step < int(path.name.removeprefix("step_"))]
    remedy = "there is none before it, so the run can only start again, with another output_dir"
    if earlier:
        remedy = f"delete that folder and --resume: the run goes on from step_{max(earlier):06d}"
    return UserError(f"checkpoint {path}: {name} {what}; {remedy}")
