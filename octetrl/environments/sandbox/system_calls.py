"""Which system calls code in a sandbox may not make, as a seccomp filter (classic BPF).

The filter refuses by name and lets the rest through: a program in Python uses some hundred calls, and a list of all
that are harmless would break with the next libc. What is refused answers EPERM, which a program sees as an error, not
as its end. Three kinds:

    always       sockets (a socketpair is allowed), tracing, mounting, new namespaces, kernel modules, keys, io_uring
                 (which makes calls past the filter), memory that no limit counts (memfd, System V, mq, pages pinned in
                 a pipe), priorities, processors and limits of processes, and leaving the process group, so that one
                 signal to the group ends all of a sandbox at once
    same user    what reaches a file of that user though Landlock does not see it (modes, times, attributes), and hiding
                 from the process that watches
    signals      where Landlock is too old for them; those to process 1, which may be the warden, always

Some calls are judged by one argument: `fcntl` and `ioctl` by their command (a file that sends a signal when it is ready
is a `kill` under another name), `clone` by its flags, `prctl` by its option, `kill` by its target, `setsockopt` by its
option, `mmap` by its flags. The kernel declares most of these arguments as 32 bits wide and the flags of `mmap` end
below bit 32, so the filter reads the low word and ignores the high word, as the kernel does.

Numbers are of the kernel's tables for x86_64 and aarch64; a machine of another kind has no filter.
A call through another ABI of the same machine (i386, x32) ends the process.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable

from octetrl.environments.sandbox.linux import takes_filters

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}

ALWAYS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree_attr": (467, 467),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "pidfd_send_signal": (424, 424),
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    "sendfile": (40, 71),
}
OTHERS_OF_THE_USER: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "truncate": (76, 45),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
SIGNALS: dict[str, tuple[int, int]] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
BY_ARGUMENT: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "mmap": (9, 222),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "setsockopt": (54, 208),
    "socketpair": (53, 199),
    "tgkill": (234, 131),
}
CLONE3 = (435, 435)  # its flags are in memory, where no filter looks: answered "no such call", and libc takes clone
_NEW_NAMESPACE_FLAGS = 0x7E020000
_OWNER_OF_SIGNALS = {"F_SETOWN": 8, "F_SETSIG": 10, "F_SETOWN_EX": 15}
_OWNER_AND_TERMINAL_INPUT = {"FIOSETOWN": 0x8901, "SIOCSPGRP": 0x8902, "TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}
_PIPE_SIZE = 1031  # F_SETPIPE_SZ
_SIZES_OF_BUFFERS = {"SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33}
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000  # MAP_SHARED_VALIDATE has the bit of MAP_SHARED too
_LOCAL_SOCKETS = 1  # AF_UNIX
_SET_DUMPABLE = 4
_FIRST_PROCESS = 1  # in bubblewrap the warden, elsewhere the machine's or the container's own

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data; both machines are little-endian
_ALLOW, _END_PROCESS, _ANSWER_ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_X32 = 0x40000000


def can_filter() -> bool:
    """Whether the kernel takes filters, and the tables above are of this machine."""
    return platform.machine() in _ARCHITECTURES and takes_filters()


def filter_program(*, same_user: bool, signals_open: bool, pid: int) -> bytes:
    """The filter for process `pid`, to be installed by it. same_user: others of its user are within its reach;
    signals_open: nothing else keeps it from signalling them, so it may signal itself and its group alone."""
    column = _COLUMN[platform.machine()]
    refused = dict(ALWAYS)
    refused |= OTHERS_OF_THE_USER if same_user else {}
    refused |= {name: number for name, number in SIGNALS.items() if signals_open and name != "kill"}
    lines = [
        _line(_LOAD, _ARCHITECTURE_AT),
        _line(_JUMP_EQUAL, _ARCHITECTURES[platform.machine()], 1, 0),
        _line(_RETURN, _END_PROCESS),
        _line(_LOAD, _NUMBER_AT),
    ]
    if platform.machine() == "x86_64":
        lines += [_line(_JUMP_GREATER_EQUAL, _X32, 0, 1), _line(_RETURN, _END_PROCESS)]
    for numbers in refused.values():
        number = numbers[column]
        if number is not None:
            lines += [_line(_JUMP_EQUAL, number, 0, 1), _line(_RETURN, _ANSWER_ERRNO | _EPERM)]
    lines += [_line(_JUMP_EQUAL, CLONE3[column], 0, 1), _line(_RETURN, _ANSWER_ERRNO | _ENOSYS)]
    lines += _refuse(BY_ARGUMENT["clone"][column], 0, [_NEW_NAMESPACE_FLAGS], _JUMP_ANY_BIT)
    lines += _refuse(BY_ARGUMENT["fcntl"][column], 1, [*_OWNER_OF_SIGNALS.values(), _PIPE_SIZE])
    lines += _refuse(BY_ARGUMENT["ioctl"][column], 1, _OWNER_AND_TERMINAL_INPUT.values())
    lines += _refuse(BY_ARGUMENT["setsockopt"][column], 2, _SIZES_OF_BUFFERS.values())
    lines += _allow_only(BY_ARGUMENT["socketpair"][column], 0, _LOCAL_SOCKETS)
    lines += _allow_only(BY_ARGUMENT["prlimit64"][column], 0, 0)
    lines += _refuse_shared_memory(BY_ARGUMENT["mmap"][column])
    if same_user:
        lines += _refuse(BY_ARGUMENT["prctl"][column], 0, [_SET_DUMPABLE])
    signals = {name: numbers[column] for name, numbers in SIGNALS.items()} | {"tgkill": BY_ARGUMENT["tgkill"][column]}
    if signals_open:
        lines += _allow_only(signals["kill"], 0, 0)
        lines += _allow_only(signals["tgkill"], 0, pid)
    else:
        for number in signals.values():
            lines += _refuse(number, 0, [_FIRST_PROCESS])
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _refuse(number: int, argument: int, values: Iterable[int], jump: int = _JUMP_EQUAL) -> list[bytes]:
    """Refuse call `number` where its argument (0 is the first) matches one of `values`, and allow it otherwise."""
    return _by_argument(number, argument, list(values), jump, matching=_ANSWER_ERRNO | _EPERM, otherwise=_ALLOW)


def _allow_only(number: int, argument: int, value: int) -> list[bytes]:
    """Allow call `number` where its argument is `value`, and refuse it otherwise."""
    return _by_argument(number, argument, [value], _JUMP_EQUAL, matching=_ALLOW, otherwise=_ANSWER_ERRNO | _EPERM)


def _refuse_shared_memory(mmap: int) -> list[bytes]:
    """Refuse shared memory without a file, and huge pages. Pages of shared memory stay when no process maps them any
    more, and huge pages are in no process's sum, so neither would be counted."""
    return [
        _line(_JUMP_EQUAL, mmap, 0, 6),
        _line(_LOAD, _ARGUMENTS_AT + 8 * 3),
        _line(_JUMP_ANY_BIT, _MAP_HUGETLB, 2, 0),
        _line(_JUMP_ANY_BIT, _MAP_ANONYMOUS, 0, 2),
        _line(_JUMP_ANY_BIT, _MAP_SHARED, 0, 1),
        _line(_RETURN, _ANSWER_ERRNO | _EPERM),
        _line(_RETURN, _ALLOW),
    ]


def _by_argument(
    number: int, argument: int, values: list[int], jump: int, *, matching: int, otherwise: int
) -> list[bytes]:
    count = len(values)
    return [
        _line(_JUMP_EQUAL, number, 0, count + 3),
        _line(_LOAD, _ARGUMENTS_AT + 8 * argument),
        *(_line(jump, value, count - index, 0) for index, value in enumerate(values)),
        _line(_RETURN, otherwise),
        _line(_RETURN, matching),
    ]


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
