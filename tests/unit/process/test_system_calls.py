"""The system-call filter, run by a BPF interpreter of 20 lines: both machines, every rule, whatever the high words."""

from __future__ import annotations

import errno
import itertools
import platform
import random
import re
import struct
from pathlib import Path

import pytest

from octetrl.process import system_calls
from octetrl.process.system_calls import (
    ALWAYS,
    BY_ARGUMENT,
    CLONE3,
    FIRST_UNKNOWN,
    OTHERS_OF_THE_USER,
    READ_ATTRIBUTES,
    SIGNALS,
    filter_program,
)

ALLOWED, ENDED, PID = 0x7FFF0000, 0x80000000, 4711
REFUSED, UNKNOWN, UNSUPPORTED = (0x00050000 | error for error in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP))
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
HEADERS = {  # of the kernel, where the machine has them
    "x86_64": ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"],
    "aarch64": ["/usr/include/asm-generic/unistd.h"],
}
FIRST, SECOND, THIRD, FOURTH = 0, 1, 2, 3
REFUSED_BY_ARGUMENT = {  # (call, the argument that decides): its values
    ("fcntl", SECOND): {
        "F_SETOWN": 8, "F_SETSIG": 10, "F_SETOWN_EX": 15, "F_SETLEASE": 1024, "F_NOTIFY": 1026, "F_SETPIPE_SZ": 1031,
    },
    ("ioctl", SECOND): {
        "FIOSETOWN": 0x8901, "SIOCSPGRP": 0x8902, "TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "SIOCGIFCONF": 0x8912,
        "SIOCGIWNAME": 0x8B01, "FS_IOC_SETFLAGS": 0x40086602, "FS_IOC_ENABLE_VERITY": 0x40806685,
    },
    ("prctl", FIRST): {
        "PR_SET_DUMPABLE": 4, "PR_SET_SECCOMP": 22, "PR_SET_MEMORY_MERGE": 67, "PR_FUTEX_HASH": 78,
    },
    ("madvise", THIRD): {"MADV_MERGEABLE": 12},
    ("setrlimit", FIRST): {"RLIMIT_CORE": 4},
    ("setsockopt", THIRD): {
        "SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33, "SO_BINDTODEVICE": 25,
        "SO_BINDTOIFINDEX": 62,
    },
    ("clone", FIRST): {"CLONE_NEWUSER": 0x10000011, "CLONE_NEWNS": 0x00020011, "CLONE_NEWNET": 0x40000000},
    ("socketpair", FIRST): {"AF_TIPC": 30},
    ("mmap", FOURTH): {
        "MAP_SHARED | MAP_ANONYMOUS": 0x21, "MAP_SHARED_VALIDATE | MAP_ANONYMOUS": 0x23,
        "with MAP_POPULATE and MAP_GROWSDOWN": 0x8121, "MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB": 0x40022,
    },
    ("prlimit64", FIRST): {"another process": 1},
    ("tgkill", FIRST): {"another process": PID + 1},
    ("kill", FIRST): {"a process and not the group": PID, "every process": 2**32 - 1},
}  # fmt: skip
ALLOWED_BY_ARGUMENT = {
    ("fcntl", SECOND): {
        "F_DUPFD": 0, "F_GETFD": 1, "F_SETFD": 2, "F_GETFL": 3, "F_SETFL": 4, "F_GETLK": 5, "F_SETLK": 6,
        "F_SETLKW": 7, "F_GETOWN": 9, "F_OFD_SETLK": 37, "F_DUPFD_CLOEXEC": 1030, "F_GETPIPE_SZ": 1032,
    },
    ("ioctl", SECOND): {
        "TCGETS": 0x5401, "FIONBIO": 0x5421, "FIOCLEX": 0x5451, "FIONREAD": 0x541B,
        "FICLONE, which copies try first": 0x40049409,
    },
    ("madvise", THIRD): {"MADV_DONTNEED": 4},
    ("setrlimit", FIRST): {"RLIMIT_NOFILE": 7},
    ("clone", FIRST): {"a thread": 0x003D0F00, "fork": 0x01200011},
    ("prctl", FIRST): {"PR_SET_NAME": 15},
    ("setsockopt", THIRD): {"SO_PASSCRED": 16},
    ("mmap", FOURTH): {
        "MAP_PRIVATE | MAP_ANONYMOUS": 0x22, "the same with MAP_NORESERVE": 0x4022, "MAP_SHARED of a file": 0x01,
    },
    ("prlimit64", FIRST): {"itself": 0},
    ("tgkill", FIRST): {"its own threads": PID},
    ("kill", FIRST): {"its group": 0},
}  # fmt: skip
HIGH_WORDS = (0, 1, 2**31, 2**32 - 1, 0x5A5A1234)


def verdict(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the filter answers to a call, by the definition of classic BPF (the kernel's networking/filter)."""
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *padded)
    lines = list(struct.iter_unpack("=HBBI", program))
    at = loaded = 0
    while True:
        code, if_true, if_false, value = lines[at]
        at += 1
        if code == 0x20:
            assert value % 4 == 0 and value < 64, "the kernel refuses other offsets"
            (loaded,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return int(value)
        else:
            is_true = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += if_true if is_true else if_false


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    return str(request.param)


def strictest() -> bytes:
    return filter_program(same_user=True, signals_open=True, pid=PID)


def test_calls_that_are_refused_whatever_their_arguments(machine: str) -> None:
    column, architecture = MACHINES[machine]
    program, mildest = strictest(), filter_program(same_user=False, signals_open=False, pid=PID)
    for name, numbers in (ALWAYS | OTHERS_OF_THE_USER | SIGNALS).items():
        number = numbers[column]
        if number is not None and name != "kill":
            assert verdict(program, architecture, number) == REFUSED, name
            assert verdict(mildest, architecture, number) == (REFUSED if name in ALWAYS else ALLOWED), name
    for name, row in READ_ATTRIBUTES.items():
        assert (
            verdict(program, architecture, row[column]) == verdict(mildest, architecture, row[column]) == UNSUPPORTED
        ), name
    for number in (CLONE3[column], FIRST_UNKNOWN, 2**29):
        assert verdict(program, architecture, number) == verdict(mildest, architecture, number) == UNKNOWN
    assert verdict(program, architecture, FIRST_UNKNOWN - 1) == REFUSED  # the last of the tables, file_setattr
    for number in (0, 1, 9, 202, 257) if machine == "x86_64" else (63, 64, 222, 98, 56):  # read, write, mmap, ...
        assert verdict(program, architecture, number) == ALLOWED


@pytest.mark.parametrize(("table", "expected"), [(REFUSED_BY_ARGUMENT, REFUSED), (ALLOWED_BY_ARGUMENT, ALLOWED)])
def test_calls_judged_by_one_argument(machine: str, table: dict, expected: int) -> None:
    """The kernel cuts these arguments to 32 bits, so what the high word holds must not change the answer."""
    column, architecture = MACHINES[machine]
    rng = random.Random(0)
    for (name, argument), values in table.items():
        number = (BY_ARGUMENT | SIGNALS)[name][column]
        for (what, value), high in itertools.product(values.items(), HIGH_WORDS):
            arguments = [rng.getrandbits(64) for _ in range(6)]
            arguments[argument] = high << 32 | value
            answer = verdict(strictest(), architecture, number, tuple(arguments))
            assert answer == expected, (name, what, hex(high))


def test_what_is_refused_by_argument_at_every_level(machine: str) -> None:
    column, architecture = MACHINES[machine]
    mildest = filter_program(same_user=False, signals_open=False, pid=PID)
    for (name, argument), values in REFUSED_BY_ARGUMENT.items():
        for what, value in values.items() if name not in ("kill", "tgkill") else ():
            answer = verdict(mildest, architecture, BY_ARGUMENT[name][column], (*[3] * argument, value))
            assert answer == REFUSED, (name, what)
    column, architecture = MACHINES[machine]
    number = BY_ARGUMENT["socketpair"][column]
    for flags in (0, 0x800, 0x80000, 0xFFFFFFFF << 32):  # SOCK_NONBLOCK, SOCK_CLOEXEC
        for kind in range(16):  # SOCK_STREAM 1, SOCK_DGRAM 2, SOCK_RAW 3, SOCK_RDM 4, SOCK_SEQPACKET 5
            for family in (1, 2, 16):
                expected = ALLOWED if family == 1 and not kind & 2 else REFUSED
                assert verdict(strictest(), architecture, number, (family, kind | flags)) == expected, (family, kind)
    column, architecture = MACHINES[machine]
    number = BY_ARGUMENT["prlimit64"][column]
    for new in (1, 0xFFFF, 1 << 32, 0xFFFF << 32):
        for high in (0, 7 << 32):
            assert verdict(strictest(), architecture, number, (high, high | 4, new)) == REFUSED, hex(new)
        assert verdict(strictest(), architecture, number, (0, 7, new)) == ALLOWED
    assert verdict(strictest(), architecture, number, (0, 4, 0, new)) == ALLOWED


def test_no_signal_reaches_the_first_process(machine: str) -> None:
    """It may be the warden: before Linux 6.12 nothing else keeps a program of its user from signalling it."""
    column, architecture = MACHINES[machine]
    mildest = filter_program(same_user=False, signals_open=False, pid=PID)
    for name, numbers in (SIGNALS | {"tgkill": BY_ARGUMENT["tgkill"]}).items():
        for high in (0, 2**32 - 1):
            assert verdict(mildest, architecture, numbers[column], (high << 32 | 1, 1, 2)) == REFUSED, name
        assert verdict(mildest, architecture, numbers[column], (PID, PID, 2)) == ALLOWED, name


def test_other_abis_of_the_machine_end_the_process(machine: str) -> None:
    others = {"i386": 0x40000003, "arm": 0x40000028, **{name: value for name, (_, value) in MACHINES.items()}}
    own = others.pop(machine)
    for architecture in others.values():
        for number in (0, 20, 41, 425):
            assert verdict(strictest(), architecture, number) == ENDED
    if machine == "x86_64":
        for number in (0x40000000, 0x40000029, 0x40000048, 0xFFFFFFFF):  # x32: the same calls under other numbers
            assert verdict(strictest(), own, number) == ENDED


def test_each_call_has_one_rule(machine: str) -> None:
    """A second rule of the same call would never be reached."""
    column, _ = MACHINES[machine]
    tables = (ALWAYS, READ_ATTRIBUTES, OTHERS_OF_THE_USER, SIGNALS, BY_ARGUMENT)
    numbers = [table[name][column] for table in tables for name in table]
    known = [number for number in numbers if number is not None]
    assert len(known) == len(set(known))
    assert len(strictest()) // 8 < 4096  # the kernel's limit


def test_numbers_are_the_kernels(machine: str) -> None:
    """Against the C library's copy of the kernel's table; calls newer than the copy are left out."""
    header = next((Path(path) for path in HEADERS[machine] if Path(path).exists()), None)
    if header is None:
        pytest.skip("no headers of the kernel on this machine")
    words = re.findall(r"^#define __NR3?2?_?(\w+)\s+(\d+)", header.read_text(), re.MULTILINE)
    numbers = {name: int(number) for name, number in words}
    column, _ = MACHINES[machine]
    tables = {**ALWAYS, **READ_ATTRIBUTES, **OTHERS_OF_THE_USER, **SIGNALS, **BY_ARGUMENT}
    compared = {name: (numbers[name], row[column]) for name, row in tables.items() if name in numbers}
    assert {name: pair for name, pair in compared.items() if pair[0] != pair[1] and pair[1] is not None} == {}
    assert len(compared) > 110


def test_a_machine_of_another_kind_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not system_calls.can_filter()
