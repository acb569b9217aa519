"""Writes files of tensors and bytes, hashed on the way to the disk: each byte is read from memory once.

    model.safetensors, optimizer.safetensors, optimizer.safetensors.1 ...    a mapping of tensors
    config.json, cursor.json, tokenizer.json ...                             bytes

Files are cut in chunks (file_digests.py). Several threads take one chunk each, hash it and write it. A tensor on a GPU
comes to the host chunk by chunk, so no second copy of the state is needed. A file is synced when its last chunk is
written.

The form is that of the safetensors library, byte for byte (tests/unit/trainer/test_state_files.py). The library
writes a file from one thread and gives no bytes to hash, hence the header is written here.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from octetrl.trainer.file_digests import (
    CHUNK_BYTES,
    WrittenFile,
    chunks,
    fastest_algorithm,
    hashing_threads,
    new_hasher,
    root_digest,
)

SHARD_BYTES = 4 << 30
SMALL_BYTES = 1 << 20
FORMATS = {  # safetensors' names, in the order in which a file has them: the most strictly aligned first
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}

Content = bytes | Mapping[str, Tensor]
Files = Mapping[str, Content]


class Cancelled(Exception):
    """Writing was given up, because another file's failed."""


def in_shards(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Mapping[str, Tensor]]:
    """`tensors` as files of at most SHARD_BYTES: `name`, then `name.1` and so on."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    return {f"{name}.{index}" if index else name: shard for index, shard in enumerate(shards)}


def tensors_of(content: Content) -> list[Tensor]:
    return [] if isinstance(content, bytes) else list(content.values())


def write_files(folder: Path, files: Files) -> list[WrittenFile]:
    """Writes and syncs `files` in `folder`. Raises OSError; some files may then be there in part."""
    cancelled = threading.Event()
    algorithm = fastest_algorithm()
    with hashing_threads() as pool:
        started: list[_Writing] = []
        try:
            for name, content in files.items():
                started.append(_Writing(folder / name, _parts(content), algorithm, cancelled, pool))
            return [writing.finish() for writing in started]
        except BaseException:
            cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            for writing in started:
                writing.close()


def _parts(content: Content) -> list[bytes | Tensor]:
    """What a file consists of, in order: a safetensors header and flat tensors, or bytes."""
    if isinstance(content, bytes):
        return [content]
    order = list(FORMATS)
    names = sorted(content, key=lambda name: (order.index(content[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = content[name]
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": FORMATS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    flat = [content[name].detach().contiguous().view(-1).view(torch.uint8) for name in names]
    return [len(text).to_bytes(8, "little") + text, *flat]


class _Writing:
    """One file that threads write chunk by chunk. `finish` waits until it is on the disk."""

    def __init__(
        self,
        path: Path,
        parts: Sequence[bytes | Tensor],
        algorithm: str,
        cancelled: threading.Event,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._path, self._parts, self._algorithm, self._cancelled = path, parts, algorithm, cancelled
        self._starts = [0, *accumulate(len(part) for part in parts)]
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._waiting: list[Future[bytes]] = [
            pool.submit(self._write_chunk, first, end) for first, end in chunks(self._starts[-1], CHUNK_BYTES)
        ]
        self._synced = pool.submit(self._sync)  # queued behind its chunks, which are therefore running or done

    def finish(self) -> WrittenFile:
        self._synced.result()
        digest = root_digest(self._algorithm, (future.result() for future in self._waiting))
        return WrittenFile(self._path.name, self._starts[-1], self._algorithm, CHUNK_BYTES, digest)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _sync(self) -> None:
        for future in self._waiting:
            future.result()
        os.fsync(self._open())

    def _open(self) -> int:
        assert self._descriptor is not None, f"{self._path} is closed"
        return self._descriptor

    def _write_chunk(self, first: int, end: int) -> bytes:
        hasher = new_hasher(self._algorithm)
        for part in self._slices(first, end):
            if self._cancelled.is_set():
                raise Cancelled(str(self._path))
            hasher.update(part)
            data = memoryview(part)
            while data:
                count = os.pwrite(self._open(), data, first)
                data, first = data[count:], first + count
        return hasher.digest()

    def _slices(self, first: int, end: int) -> Iterator[bytes | memoryview]:
        """The file's bytes from `first` to `end`, in host memory: what lies in one tensor at once, small ones joined.
        Each slice costs two turns at the interpreter's lock, for which a busy step may let it wait."""
        index = bisect_right(self._starts, first) - 1
        small: list[memoryview] = []
        while first < end:
            start, stop = self._starts[index], min(self._starts[index + 1], end)
            data = _on_host(self._parts[index][first - start : stop - start])
            if len(data) < SMALL_BYTES:
                small.append(data)
            if len(data) >= SMALL_BYTES or sum(map(len, small)) >= SMALL_BYTES:
                yield b"".join(small)
                small.clear()
            if len(data) >= SMALL_BYTES:
                yield data
            first, index = stop, index + 1
        yield b"".join(small)


def _on_host(data: bytes | Tensor) -> memoryview:
    return memoryview(data) if isinstance(data, bytes) else data.cpu().numpy().data
