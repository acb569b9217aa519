"""What a sandbox may have left behind, and a way to run tests as a user without rights."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path

NOBODY = 65534
NO_REACH = "the interpreter is in a private folder and can't be put within another user's reach here"
NOT_READABLE = "another user can't read this working tree"
_WARDEN = "octetrl.process.warden"
_NEW_MOUNTS, _BIND_ALL, _PRIVATE_ALL = 0x20000, (1 << 12) | (1 << 14), (1 << 14) | (1 << 18)


def sandbox_processes() -> set[int]:
    """Living processes of sandboxes that this process made: programs, by their folder's name, and its own wardens."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace")
                state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            except OSError:
                continue
            is_ours = f"octetrl-sandbox-{os.getpid()}-" in words or (parent == str(os.getpid()) and _WARDEN in words)
            if state != "Z" and is_ours:
                found.add(int(folder.name))
    return found


def that_stay(pids: set[int], seconds: float = 30.0) -> set[int]:
    """Those of `pids` that still live after a while."""
    end = time.monotonic() + seconds
    while pids and time.monotonic() < end:
        pids = pids & sandbox_processes()
        time.sleep(0.02)
    return pids


def sandbox_folders(pid: int | None = None) -> list[str]:
    """Temporary folders that sandboxes of a process, by default this one, have left."""
    return [path.name for path in Path(tempfile.gettempdir()).glob(f"octetrl-sandbox-{pid or os.getpid()}-*")]


def become_nobody() -> None:
    """For a child of root: user and group NOBODY, and the interpreter within reach though it is in a private folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    prefix = sys.base_prefix
    top = "/" + prefix.split("/")[1]
    if not os.stat(top).st_mode & 0o001:
        steps = [libc.unshare(_NEW_MOUNTS), libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE_ALL), None)]
        hidden = os.open(prefix, os.O_PATH)  # only now: a mount of another namespace can't be bound here
        steps.append(libc.mount(b"tmpfs", top.encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=0755"))
        os.makedirs(prefix)
        source = f"/proc/self/fd/{hidden}".encode()
        if any((*steps, libc.mount(source, prefix.encode(), None, ctypes.c_ulong(_BIND_ALL), None))):
            sys.exit(f"{NO_REACH}: {os.strerror(ctypes.get_errno())}")
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    if not os.access(__file__, os.R_OK):
        sys.exit(NOT_READABLE)


if __name__ == "__main__":
    become_nobody()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
