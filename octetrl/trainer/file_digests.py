"""Checksums of a checkpoint's files: fast, and computed in parallel over chunks of a file.

    {"size": 4294967296, "algorithm": "xxh3-128", "chunk_bytes": 67108864, "digest": "..."}

A file is cut in chunks. `digest` is the hash of the chunks' hashes, one after another, so that several threads can
compute it and a writer needs no second read. The hash is xxh3-128 of the package xxhash; a machine without that package
writes SHA-256 instead. Both release the interpreter's lock. These checksums show damage, not forgery.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from octetrl.system.errors import UserError
from octetrl.system.host import num_cores

xxhash: Any
try:
    import xxhash
except ImportError:  # a machine may lack it, or have one that it can't load
    xxhash = None

MANIFEST = "manifest.json"  # of a checkpoint: {"step", "metrics", "files", "run", "sha256": of the rest}
STEP_NAME = re.compile(r"step_(\d{6,})")  # of its folder
CHUNK_BYTES = 64 << 20
SLICE_BYTES = 4 << 20  # read and hashed at one time: it stays in a core's cache
XXH3, SHA256 = "xxh3-128", "sha256"
MOST_THREADS = 8


class Hasher(Protocol):
    """Part of the interface of hashlib's objects and of xxhash's."""

    def update(self, data: Any, /) -> None: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that is on the disk, with its checksum."""

    name: str
    size: int
    algorithm: str
    chunk_bytes: int
    digest: str

    def entry(self) -> dict[str, Any]:
        """What the manifest says of it."""
        fields = ("size", "algorithm", "chunk_bytes", "digest")
        return {field: getattr(self, field) for field in fields}


def parse_manifest(content: bytes) -> dict[str, Any] | None:
    """None when it is not what was written."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):  # the latter: of thousands of brackets
        return None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != body_sha256(manifest):
        return None
    return manifest


def body_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def fastest_algorithm() -> str:
    """xxh3-128 if the package xxhash is installed, else SHA-256."""
    return SHA256 if xxhash is None else XXH3


def new_hasher(algorithm: str) -> Hasher:
    """UserError for a hash that this machine, or this version, cannot compute."""
    if algorithm == SHA256:
        return hashlib.sha256()
    if algorithm != XXH3:
        raise UserError(f"checksums of kind '{algorithm}' are not known to this version of OctetRL; use a newer one")
    if xxhash is None:
        raise UserError(
            "the checkpoint has xxh3-128 checksums, and the package xxhash is not installed; pip install xxhash"
        )
    hasher: Hasher = xxhash.xxh3_128()
    return hasher


def root_digest(algorithm: str, chunk_digests: Iterable[bytes]) -> str:
    hasher = new_hasher(algorithm)
    for digest in chunk_digests:
        hasher.update(digest)
    return hasher.digest().hex()


def chunks(size: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """(first byte, end) of each chunk; an empty file has one."""
    return [(first, min(first + chunk_bytes, size)) for first in range(0, max(size, 1), chunk_bytes)]


def hashing_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, num_cores()), thread_name_prefix="checkpoint")


def digest_file(path: Path, pool: ThreadPoolExecutor) -> WrittenFile:
    """The checksum of a file that something else wrote: it is read once."""
    algorithm, size = fastest_algorithm(), path.stat().st_size
    digest = _chunked(path, size, algorithm, CHUNK_BYTES, pool)()
    return WrittenFile(path.name, size, algorithm, CHUNK_BYTES, digest)


def altered_files(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the files whose content is not that of their manifest entries. All are read, in parallel."""
    if other := [name for name, entry in entries.items() if (folder / name).stat().st_size != entry["size"]]:
        return other  # a longer file may begin with all that was written
    with hashing_threads() as pool:
        found = {
            name: _chunked(folder / name, entry["size"], entry["algorithm"], entry["chunk_bytes"], pool)
            for name, entry in entries.items()
        }
        return [name for name, digest in found.items() if digest() != entries[name]["digest"]]


def _chunked(path: Path, size: int, algorithm: str, chunk_bytes: int, pool: ThreadPoolExecutor) -> Callable[[], str]:
    """Starts to read and hash a file; returns what waits for its digest."""
    new_hasher(algorithm)  # refused before anything is read
    waiting: list[Future[bytes]] = [
        pool.submit(_digest_part, path, first, end, algorithm) for first, end in chunks(size, chunk_bytes)
    ]
    return lambda: root_digest(algorithm, (future.result() for future in waiting))


def _digest_part(path: Path, first: int, end: int, algorithm: str) -> bytes:
    hasher = new_hasher(algorithm)
    buffer = memoryview(bytearray(min(SLICE_BYTES, end - first)))
    with path.open("rb", buffering=0) as file:
        file.seek(first)
        while first < end:
            count = file.readinto(buffer[: end - first])
            if not count:
                break  # cut short meanwhile: the digest differs
            hasher.update(buffer[:count])
            first += count
    return hasher.digest()
