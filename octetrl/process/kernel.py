"""System calls that Python's standard library lacks, through libc. Failures raise OSError that names the call.

**Landlock**: a process gives up files, network and signals for itself and its children, without privileges. After
`restrict`, only the named folders can be opened, listed, run or written; TCP is refused (Linux 6.7); signals and
abstract sockets reach no process outside (6.12); processes outside can't be traced and their /proc files not read. Not
covered, and refused by the system-call filter instead: changes of a file's mode, owner, times and attributes. Not
covered at all: whether a path exists, and `stat` of it. Source: the kernel's userspace-api/landlock; the ABI's version
says what the kernel supports.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys

_PDEATHSIG, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_BOUNDING_READ, _BOUNDING_DROP, _AMBIENT, _CLEAR_ALL = 23, 24, 47, 4
_CAPSET_VERSION = 0x20080522
_CAP_SYS_PTRACE = 19
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEVICE = 1, 2, 4, 8, 1 << 14, 1 << 15
_MAKE_DEVICE_FILES = 1 << 6 | 1 << 11
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP_BIND_AND_CONNECT = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3
KEEPS_SIGNALS = 6

_libc = ctypes.CDLL(None, use_errno=True)


def system_call(number: int, *arguments: ctypes.c_void_p | int | bytes | None, what: str) -> int:
    """A raw system call. Arguments go as 64-bit words."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    _libc.syscall.restype = ctypes.c_long
    return _checked(_libc.syscall(ctypes.c_long(number), *words), what)


def die_with_parent(signal_number: int) -> None:
    _prctl(_PDEATHSIG, signal_number, what="death signal")


def adopt_orphans() -> None:
    """Make descendants whose parent has died children of this process."""
    _prctl(_SUBREAPER, 1, what="subreaper")


def hide_from_other_processes() -> None:
    """Keep other processes of the same user from tracing this one or reading its memory and environment."""
    _prctl(_DUMPABLE, 0, what="not dumpable")


def sees_descriptors_of_others() -> bool:
    """Whether /proc shows this process what processes of its sandboxes hold open: as root they are another user's."""
    if os.geteuid() != 0:
        return True
    with open("/proc/self/status") as lines:
        effective = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_PTRACE & 1)


def give_up_privileges_for_good() -> None:
    """No program run from here on gains rights by its set-user-id bit or its capabilities."""
    _prctl(_NO_NEW_PRIVILEGES, 1, what="no new privileges")


def drop_capabilities() -> None:
    """Those of root, and those that entering a user namespace gives, for good."""
    give_up_privileges_for_good()
    for number in range(64):
        if _libc.prctl(_BOUNDING_READ, ctypes.c_ulong(number)) > 0:
            _prctl(_BOUNDING_DROP, number, what="bounding set")
    _prctl(_AMBIENT, _CLEAR_ALL, what="ambient set")
    _checked(_libc.capset(struct.pack("=Ii", _CAPSET_VERSION, 0), bytes(24)), "capset")


def enter_namespaces(folder: int, *names: str) -> None:
    """folder: a descriptor of /proc/PID/ns."""
    descriptors = [os.open(name, os.O_RDONLY, dir_fd=folder) for name in names]
    own = {os.stat(f"/proc/self/ns/{name}").st_ino for name in names}
    for descriptor in descriptors:
        if os.fstat(descriptor).st_ino not in own:  # its own can't be entered again, and may not be
            _checked(_libc.setns(descriptor, 0), "setns")
        os.close(descriptor)


def takes_filters() -> bool:
    """Whether the kernel has seccomp filters, tested by a call with an invalid program."""
    if sys.platform != "linux":
        return False
    return _libc.prctl(_SECCOMP, ctypes.c_ulong(2), None, None, None) < 0 and ctypes.get_errno() == errno.EFAULT


def install_filter(program: bytes) -> None:
    """A BPF program that judges every further system call of this process and its children."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    text = ctypes.create_string_buffer(program, len(program))
    filter_program = Program(len(program) // 8, ctypes.addressof(text))
    _prctl(_SECCOMP, 2, ctypes.addressof(filter_program), what="seccomp filter")


def _prctl(option: int, *arguments: int, what: str) -> None:
    padded = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *padded), what)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0: it has none, or it is switched off."""
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
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        system_call(_ADD_RULE, ruleset, 1, ctypes.addressof(rule), 0, what=f"Landlock rule for {path}")
    finally:
        os.close(descriptor)
