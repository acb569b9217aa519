"""A worker's state on its way to a checkpoint: copied to host memory at the end of an update, written beside the next.

    prepare   host memory is allocated, before the first step
    copy      the state goes into it; this alone stops the run
    write     the copy goes to the disk, in another thread than the run's; or the live state does, while the run waits

On a GPU the host memory is locked, so that the copy runs at the bus's speed. It is allocated once and used for every
save. Where the host has no room for it, `copy` says so, and the state has to be written before the next update.

**State files.** Writes files of tensors and bytes, hashed on the way to the disk: each byte is read from memory once.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from octetrl.system.errors import UserError
from octetrl.system.host import USABLE_HOST, available_host_bytes
from octetrl.trainer.file_digests import (
    CHUNK_BYTES,
    WrittenFile,
    chunks,
    fastest_algorithm,
    hashing_threads,
    new_hasher,
    root_digest,
)
from octetrl.trainer.optimizer_states import HostMemory, aligned


class StateWriter:
    """`files` returns the state, by the names of a checkpoint's files: live tensors on `device` or on the host."""

    def __init__(self, files: Callable[[], Files], device: torch.device) -> None:
        self._files, self._device = files, device
        self._room: _HostRoom | None = None
        self._allocating: threading.Thread | None = None
        self._refusal: str | None = None
        self._copied: Files | None = None

    def prepare(self) -> None:
        """Allocates the memory for copies, if there is enough; on a CPU beside what follows. On a GPU it is pinned when
        this returns: pinning beside a step could delay its launches and disturb the capture of a graph."""
        num_bytes = _room_for(self._files())
        if self._device.type == "cuda":
            self._allocate(num_bytes)
            return
        self._allocating = threading.Thread(target=self._allocate, args=(num_bytes,), name="checkpoint memory")
        self._allocating.start()

    def copy(self) -> str | None:
        """Copies the state, for `write`. Returns None; or, if nothing was copied, why not."""
        files = self._files()
        if self._allocating is not None:
            self._allocating.join()
            self._allocating = None
        needed = _room_for(files)
        if self._room is None or self._room.num_bytes < needed:
            self._room = None  # freed first: two of them may not fit
            self._allocate(needed)
        if self._room is None:
            return self._refusal
        self._copied = self._room.copy_of(files)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return None

    def write(self, folder: Path, *, copied: bool) -> list[WrittenFile]:
        """Writes the copy that was taken last, in any thread; or the live state, which must not change meanwhile."""
        files = self._copied if copied else self._files()
        assert files is not None, "nothing was copied"
        return write_files(folder, files)

    def _allocate(self, num_bytes: int) -> None:
        available = available_host_bytes()
        if available is not None and num_bytes > USABLE_HOST * available:
            self._refusal = f"a copy takes {num_bytes / 2**30:.2f} GiB of host memory, {available / 2**30:.2f} are free"
            return
        try:
            self._room = _HostRoom(num_bytes, self._device)
        except UserError as error:
            self._refusal = str(error)


class _HostRoom:
    """One block of host memory that every copy goes into."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._memory = HostMemory(num_bytes, device, setting="checkpoint", remedy="saving does without")
        self._bytes = self._memory.take(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
        self._used = 0

    def copy_of(self, files: Files) -> dict[str, Content]:
        """On a GPU the copies are only begun."""
        self._used = 0
        return {
            name: content if isinstance(content, bytes) else {key: self._put(one) for key, one in content.items()}
            for name, content in files.items()
        }

    def _put(self, tensor: Tensor) -> Tensor:
        place = self._bytes[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._used += aligned(tensor.nbytes)
        return place.copy_(tensor.detach(), non_blocking=True)


def _room_for(files: Files) -> int:
    return sum(aligned(tensor.nbytes) for content in files.values() for tensor in tensors_of(content))


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
