"""Landlock: a process gives up files, network and signals for itself and its children, without privileges.

After `restrict`, only the named folders can be opened, listed, run or written; TCP is refused (Linux 6.7); signals and
abstract sockets reach no process outside (6.12); processes outside can't be traced and their /proc files not read. Not
covered, and refused by the system-call filter instead: changes of a file's mode, owner, times and attributes. Not
covered at all: whether a path exists, and `stat` of it.

Source: the kernel's userspace-api/landlock; the ABI's version tells what the kernel knows.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys

from octetrl.process.linux import system_call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEVICE = 1, 2, 4, 8, 1 << 14, 1 << 15
_MAKE_DEVICE_FILES = 1 << 6 | 1 << 11
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP_BIND_AND_CONNECT = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3
KEEPS_SIGNALS = 6


def landlock_version() -> int:
    """Of the kernel's Landlock; 0: it has none, or it is switched off."""
    if sys.platform != "linux":
        return 0
    try:
        return system_call(_CREATE_RULESET, None, 0, 1, what="Landlock")
    except OSError:
        return 0


def restrict(readable: list[str], writable: list[str]) -> None:
    """Leave this process the paths `readable` (to run too) and `writable`, files or folders. For good."""
    version = landlock_version()
    rights = _FILE_RIGHTS[min(version, 5)]
    network = _TCP_BIND_AND_CONNECT if version >= 4 else 0
    scoped = _ABSTRACT_SOCKETS_AND_SIGNALS if version >= KEEPS_SIGNALS else 0
    size = 8 if version < 4 else 16 if version < KEEPS_SIGNALS else 24
    attributes = struct.pack("=QQQ", rights, network, scoped)[:size]
    ruleset = system_call(_CREATE_RULESET, attributes, size, 0, what="Landlock ruleset")
    try:
        for path in readable:
            _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in writable:
            _allow(ruleset, path, rights & ~_MAKE_DEVICE_FILES)
        system_call(_RESTRICT_SELF, ruleset, 0, what="Landlock")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _ON_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights & _known(), descriptor))
        system_call(_ADD_RULE, ruleset, 1, ctypes.addressof(rule), 0, what=f"Landlock rule for {path}")
    finally:
        os.close(descriptor)


def _known() -> int:
    return _FILE_RIGHTS[min(landlock_version(), 5)]
