"""Which system calls code in a sandbox may not make, as a seccomp filter (classic BPF).

The filter refuses by name and lets the rest through: a program in Python uses some hundred calls, and a list of all
that are harmless would break with the next libc. What is refused answers EPERM, which a program sees as an error, not
as its end. Calls newer than the tables answer "no such call", as an older kernel would. Four kinds:

    always       what `ALWAYS` lists, with the reasons
    attributes   of files by their path, which Landlock lets anybody read: answered "not supported", for programs that
                 copy files expect this
    same user    what reaches a file of that user though Landlock does not see it (modes, times, attributes)
    signals      where Landlock is too old for them; those to process 1, which may be the warden, always

Some calls are judged by one argument. Of `fcntl`, `ioctl` and `prctl` only the named commands are allowed: others list
the machine's addresses, change flags of a file that is merely readable, lock out its writers, allocate kernel memory,
or send a signal when a file is ready, which is a `kill` under another name. `clone` is judged by its flags, `kill` by
its target, `setsockopt` by its option, `mmap` by its flags, `madvise` by its advice. The kernel declares most of these
arguments as 32 bits wide and the flags of `mmap` end below bit 32, so the filter reads the low word and ignores the
high word, as the kernel does.

A stream of a pair can't be connected again or send to an address. A datagram socket could do both, to any socket whose
path it knows; `sendmsg` has the address in memory, where no filter looks, so there are none.

Numbers are of the kernel's tables for x86_64 and aarch64; a machine of another kind has no filter.
A call through another ABI of the same machine (i386, x32) ends the process.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable

from octetrl.process.kernel import takes_filters

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}

ALWAYS: dict[str, tuple[int | None, int | None]] = {  # on x86_64 and on aarch64; None: it has no such call
    # sockets; a socketpair of streams is judged by its arguments
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    # other processes: tracing, their memory, descriptors and signals
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # io_uring makes calls past the filter
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # memory that no limit counts, among it pages pinned in a pipe
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "sendfile": (40, 71),
    # System V objects, which other processes own and which outlive a process
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192),
    "semctl": (66, 191),
    # what the machine has a fixed number of, and what loads all its disks
    "io_setup": (206, 0), "sync": (162, 81), "syncfs": (306, 267),
    # names of files and mounts
    "inotify_init": (253, None), "inotify_init1": (294, 26), "statmount": (457, 457), "listmount": (458, 458),
    "fanotify_init": (300, 262), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "lookup_dcookie": (212, 18),
    # filters, which can write to the kernel's log
    "seccomp": (317, 277),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "open_tree_attr": (467, 467), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    # the kernel: programs, events, keys, modules, the machine's state
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "personality": (135, 92),
    "syslog": (103, 116), "vhangup": (153, 58),
    # leaving the process group: one signal to it ends all of a sandbox at once
    "setsid": (112, 157), "setpgid": (109, 154),
    # priorities and processors
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
READ_ATTRIBUTES: dict[str, tuple[int, int]] = {
    "getxattr": (191, 8), "lgetxattr": (192, 9), "getxattrat": (464, 464), "listxattr": (194, 11),
    "llistxattr": (195, 12), "listxattrat": (465, 465), "file_getattr": (468, 468),
}  # fmt: skip
OTHERS_OF_THE_USER: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469), "truncate": (76, 45),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
SIGNALS: dict[str, tuple[int, int]] = {
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
BY_ARGUMENT: dict[str, tuple[int, int]] = {
    "clone": (56, 220), "fcntl": (72, 25), "ioctl": (16, 29), "madvise": (28, 233), "mmap": (9, 222),
    "prctl": (157, 167), "prlimit64": (302, 261), "setrlimit": (160, 164), "setsockopt": (54, 208),
    "socketpair": (53, 199), "tgkill": (234, 131),
}  # fmt: skip
CLONE3 = (435, 435)  # its flags are in memory, where no filter looks: answered "no such call", and libc takes clone
FIRST_UNKNOWN = 470  # from here on the tables have not been read; numbers from 424 are of both machines
_NEW_NAMESPACE_FLAGS = 0x7E020000
_DUPLICATES, _FLAGS, _LOCKS, _GETOWN, _PIPE_SIZE = (0, 1027, 1030), (1, 2, 3, 4), (5, 6, 7, 36, 37, 38), 9, 1032
_FILE_COMMANDS = (*_DUPLICATES, *_FLAGS, *_LOCKS, _GETOWN, _PIPE_SIZE)
_DEVICE_COMMANDS = {
    "TCGETS": 0x5401, "TCGETS2": 0x802C542A, "TIOCGPGRP": 0x540F, "TIOCGWINSZ": 0x5413,
    "FIONREAD": 0x541B, "TIOCOUTQ": 0x5411, "FIONBIO": 0x5421, "FIONCLEX": 0x5450, "FIOCLEX": 0x5451,
    "FICLONE": 0x40049409,
}  # fmt: skip
_PROCESS_COMMANDS = {
    "PR_SET_PDEATHSIG": 1, "PR_GET_PDEATHSIG": 2, "PR_GET_DUMPABLE": 3, "PR_SET_NAME": 15, "PR_GET_NAME": 16,
    "PR_GET_SECCOMP": 21, "PR_CAPBSET_READ": 23, "PR_SET_TIMERSLACK": 29, "PR_GET_TIMERSLACK": 30,
    "PR_SET_CHILD_SUBREAPER": 36, "PR_GET_CHILD_SUBREAPER": 37, "PR_SET_NO_NEW_PRIVS": 38, "PR_GET_NO_NEW_PRIVS": 39,
    "PR_SET_THP_DISABLE": 41, "PR_GET_THP_DISABLE": 42, "PR_SVE_SET_VL": 50, "PR_SVE_GET_VL": 51,
    "PR_SET_TAGGED_ADDR_CTRL": 55, "PR_GET_TAGGED_ADDR_CTRL": 56, "PR_SME_SET_VL": 63, "PR_SME_GET_VL": 64,
    "PR_SET_VMA": 0x53564D41,
}  # fmt: skip
_SOCKET_OPTIONS = {
    "SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33,
    "SO_BINDTODEVICE": 25, "SO_BINDTOIFINDEX": 62,
}  # fmt: skip
_MERGEABLE = 12  # pages that equal those of other processes are merged, which shows in the time of a write
_CORE_DUMPS = 4  # RLIMIT_CORE, see warden.py
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000  # MAP_SHARED_VALIDATE has the bit of MAP_SHARED too
_LOCAL_SOCKETS = 1  # AF_UNIX
_DATAGRAMS = 2  # bit of SOCK_DGRAM and of SOCK_RAW, which is the same there; not of SOCK_STREAM and SOCK_SEQPACKET
_FIRST_PROCESS = 1  # in bubblewrap the warden, elsewhere the machine's or the container's own

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data; both machines are little-endian
_ALLOW, _END_PROCESS, _ANSWER_ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _ENOTSUP = 1, 38, 95
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
    lines += _answer(_ENOSYS, FIRST_UNKNOWN, _JUMP_GREATER_EQUAL)
    lines += _answer(_ENOSYS, CLONE3[column])
    for table, error in ((refused, _EPERM), (READ_ATTRIBUTES, _ENOTSUP)):
        for numbers in table.values():
            number = numbers[column]
            lines += [] if number is None else _answer(error, number)
    call = {name: numbers[column] for name, numbers in BY_ARGUMENT.items()}
    lines += _refuse(call["clone"], 0, [_NEW_NAMESPACE_FLAGS], _JUMP_ANY_BIT)
    lines += _allow_only(call["fcntl"], 1, _FILE_COMMANDS)
    lines += _allow_only(call["ioctl"], 1, _DEVICE_COMMANDS.values())
    lines += _allow_only(call["prctl"], 0, _PROCESS_COMMANDS.values())
    lines += _refuse(call["setsockopt"], 2, _SOCKET_OPTIONS.values())
    lines += _refuse(call["setrlimit"], 0, [_CORE_DUMPS])
    lines += _refuse(call["madvise"], 2, [_MERGEABLE])
    lines += _allow_local_streams(call["socketpair"])
    lines += _allow_own_limits(call["prlimit64"])
    lines += _refuse_shared_memory(call["mmap"])
    signals = {name: numbers[column] for name, numbers in SIGNALS.items()} | {"tgkill": call["tgkill"]}
    if signals_open:
        lines += _allow_only(signals["kill"], 0, [0])
        lines += _allow_only(signals["tgkill"], 0, [pid])
    else:
        for number in signals.values():
            lines += _refuse(number, 0, [_FIRST_PROCESS])
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _refuse(number: int, argument: int, values: Iterable[int], jump: int = _JUMP_EQUAL) -> list[bytes]:
    """Refuse call `number` where its argument (0 is the first) matches one of `values`, and allow it otherwise."""
    return _by_argument(number, argument, list(values), jump, matching=_ANSWER_ERRNO | _EPERM, otherwise=_ALLOW)


def _allow_only(number: int, argument: int, values: Iterable[int]) -> list[bytes]:
    """Allow call `number` where its argument is one of `values`, and refuse it otherwise."""
    return _by_argument(number, argument, list(values), _JUMP_EQUAL, matching=_ALLOW, otherwise=_ANSWER_ERRNO | _EPERM)


def _answer(error: int, number: int, jump: int = _JUMP_EQUAL) -> list[bytes]:
    """Answer `error` to call `number`, or with a jump of another kind to those that it matches."""
    return [_line(jump, number, 0, 1), _line(_RETURN, _ANSWER_ERRNO | error)]


def _allow_local_streams(socketpair: int) -> list[bytes]:
    return [
        _line(_JUMP_EQUAL, socketpair, 0, 6),
        _line(_LOAD, _ARGUMENTS_AT),
        _line(_JUMP_EQUAL, _LOCAL_SOCKETS, 0, 3),
        _line(_LOAD, _ARGUMENTS_AT + 8),
        _line(_JUMP_ANY_BIT, _DATAGRAMS, 1, 0),
        _line(_RETURN, _ALLOW),
        _line(_RETURN, _ANSWER_ERRNO | _EPERM),
    ]


def _allow_own_limits(prlimit: int) -> list[bytes]:
    """Allow a process to read and change its own limits, and to read that of core dumps, for which the pointer to the
    new limit is null in both words."""
    new_limit_at = _ARGUMENTS_AT + 8 * 2
    return [
        _line(_JUMP_EQUAL, prlimit, 0, 10),
        _line(_LOAD, _ARGUMENTS_AT),
        _line(_JUMP_EQUAL, 0, 0, 7),
        _line(_LOAD, _ARGUMENTS_AT + 8),
        _line(_JUMP_EQUAL, _CORE_DUMPS, 0, 4),
        _line(_LOAD, new_limit_at),
        _line(_JUMP_EQUAL, 0, 0, 3),
        _line(_LOAD, new_limit_at + 4),
        _line(_JUMP_EQUAL, 0, 0, 1),
        _line(_RETURN, _ALLOW),
        _line(_RETURN, _ANSWER_ERRNO | _EPERM),
    ]


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
