"""A worker's state on its way to a checkpoint: copied to host memory at the end of an update, written beside the next.

    prepare   host memory is allocated, before the first step
    copy      the state goes into it; this alone stops the run
    write     the copy goes to the disk, in another thread than the run's; or the live state does, while the run waits

On a GPU the host memory is locked, so that the copy runs at the bus's speed. It is allocated once and used for every
save. Where the host has no room for it, `copy` says so, and the state has to be written before the next update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from octetrl.system.errors import UserError
from octetrl.system.host_memory import USABLE_HOST, available_host_bytes
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.optimizer_states import HostMemory, aligned
from octetrl.trainer.state_files import Content, Files, tensors_of, write_files


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
