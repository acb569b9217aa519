"""The room a sandbox is in: namespaces and a root of its own, with nothing in it but what a program needs.

    /usr /lib ... and the interpreter    read-only, from the machine
    /dev/{null,zero,full,random,urandom} the machine's
    /proc                                of the sandbox's own processes
    /program                             the program, read-only
    /tmp                                 empty, in memory, of a limited size and number of files; working folder and HOME

No network but a loopback that is down, no other user's or parent's process, no file of the machine's besides. As root
the namespaces are made directly and the program runs as a user id that nobody has; otherwise they are made inside a
user namespace, in which this process may mount though it is nobody outside.
"""

from __future__ import annotations

import os

from octetrl.environments.sandbox.linux import (
    BIND,
    NO_DEVICES,
    NO_EXECUTION,
    NO_SUID,
    PRIVATE,
    READ_ONLY,
    RECURSIVE,
    REMOUNT,
    change_root,
    mount,
    unshare,
)

WORK, PROGRAM = "/tmp", "/program"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_STAGES = ("/tmp", "/mnt", "/var", "/run")  # any folder will do: it is covered in our mount namespace alone
_KEPT_FLAGS = NO_SUID | NO_DEVICES | NO_EXECUTION | 1024 | 2048  # a user namespace may not lift them; the last: atimes


def enter_namespaces() -> None:
    """New ones of every kind for this process; of processes for its children, the first of which is the init."""
    rest = ("mount", "network", "pid", "ipc", "uts", "cgroup")
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        unshare(*rest)
        return
    unshare("user", *rest)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_root(folders: list[str], links: dict[str, str]) -> None:
    """Make the room and step into it. folders: shown read-only at their own paths; links: path -> what it points to."""
    mount("none", "/", None, RECURSIVE | PRIVATE)
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (*folders, *DEVICES)}
    stage = next(path for path in _STAGES if os.path.isdir(path))
    mount("tmpfs", stage, "tmpfs", NO_SUID | NO_DEVICES, "size=1m,nr_inodes=512,mode=0755")
    for path, descriptor in sources.items():
        target = stage + path
        _make_place(target, is_folder=path not in DEVICES and os.path.isdir(f"/proc/self/fd/{descriptor}"))
        mount(f"/proc/self/fd/{descriptor}", target, None, BIND | RECURSIVE)
        kept = os.statvfs(target).f_flag & _KEPT_FLAGS
        if path not in DEVICES:
            mount("none", target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | kept)
        os.close(descriptor)
    for path, text in links.items():
        os.makedirs(os.path.dirname(stage + path), exist_ok=True)
        os.symlink(text, stage + path)
    os.symlink(WORK, f"{stage}/dev/shm")
    for path in ("/proc", WORK, PROGRAM):
        os.makedirs(stage + path, exist_ok=True)
    _mount_proc(f"{stage}/proc")
    change_root(stage)


def furnish(user: int, files: dict[str, str], disk_bytes: int, max_files: int) -> None:
    """Inside the room: the program's files, and the empty folder of `user`."""
    size = sum(len(text.encode()) for text in files.values())
    mount("tmpfs", PROGRAM, "tmpfs", NO_SUID | NO_DEVICES, f"size={size + (1 << 20)},nr_inodes=64,mode=0755")
    write_files(PROGRAM, files)
    mount("none", PROGRAM, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
    options = f"size={disk_bytes},nr_inodes={max_files},mode=0700,uid={user}"
    mount("tmpfs", WORK, "tmpfs", NO_SUID | NO_DEVICES, options)


def seal_root() -> None:
    mount("none", "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)


def write_files(folder: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
        os.chmod(path, 0o644)


def _make_place(target: str, *, is_folder: bool) -> None:
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _mount_proc(target: str) -> None:
    flags = NO_SUID | NO_DEVICES | NO_EXECUTION
    try:
        mount("proc", target, "proc", flags, "subset=pid")
    except OSError:  # a kernel before 5.8
        mount("proc", target, "proc", flags)
