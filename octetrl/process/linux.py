"""The few system calls that Python's standard library lacks, through libc.

Everything in this package that runs beside or inside a sandbox uses the standard library alone and starts fast: a
sandbox is started for each test of each completion. Failures raise OSError that says which call failed, on what.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

_PDEATHSIG, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_CAP_SYS_PTRACE = 19

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
