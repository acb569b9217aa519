"""Counts and removes the files of a sandbox.

Two kinds of files are counted: those in the folder, and deleted files that a process still holds open or mapped. If
something prevents counting (a folder without read permission, a process that hides its descriptors), this counts as
exceeding the limit, because a program in a sandbox does not need it.

While the program runs, its processes may replace any folder by a link between two calls. Counting only reads, so this
is harmless. Files are changed only after all processes have ended.
"""

from __future__ import annotations

import os
import stat

from octetrl.process.linux import sees_descriptors_of_others


def folder_use(folder: str, max_files: int) -> tuple[int, int]:
    """Bytes and number of files below `folder`; counting stops past `max_files`."""
    count = size = 0
    frontier = [folder]
    while frontier and count <= max_files:
        try:
            entries = os.scandir(frontier.pop())
        except (FileNotFoundError, NotADirectoryError):  # removed or replaced meanwhile
            continue
        except OSError:  # no permission to read it, or its path is too long for the kernel: neither happens by accident
            return size, max_files + 1
        with entries:
            for entry in entries:
                count += 1
                if count > max_files:
                    break
                try:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    is_folder = entry.is_dir(follow_symlinks=False)
                except FileNotFoundError:  # this one is removed; those after it still count
                    continue
                except OSError:
                    return size, max_files + 1
                if is_folder:
                    frontier.append(entry.path)
    return size, count


def deleted_use(pids: list[int], folder: str, max_files: int) -> tuple[int, int]:
    """Bytes and number of the deleted files that processes `pids` hold open, or mapped from below `folder`.

    A mapped one counts with what is mapped of it, for only the machine's administrator is shown its size. One that is
    underway in a socket is not seen; the kernel bounds those of a user by the number of open files."""
    if not sees_descriptors_of_others():
        return 0, 0
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            _note_descriptors(pid, sizes)
            _note_mappings(pid, os.fsencode(folder) + b"/", sizes)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except PermissionError:
            if _has_memory(pid):  # so it is not merely about to end: it hides
                return sum(sizes.values()), max_files + 1
    return sum(sizes.values()), len(sizes)


def _has_memory(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return not file.read().startswith(b"0 ")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _note_descriptors(pid: int, sizes: dict[tuple[int, int], int]) -> None:
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            try:
                held = os.stat(entry.path)
            except FileNotFoundError:  # closed meanwhile
                continue
            if held.st_nlink == 0 and stat.S_ISREG(held.st_mode):
                sizes[held.st_dev, held.st_ino] = held.st_blocks * 512


def _note_mappings(pid: int, below: bytes, sizes: dict[tuple[int, int], int]) -> None:
    mapped: dict[tuple[int, int], int] = {}
    with open(f"/proc/{pid}/maps", "rb") as lines:
        for line in lines:
            if not line.endswith(b" (deleted)\n"):
                continue
            span, _, _, device, inode, path = line.split(None, 5)
            if path.startswith(below):
                first, _, last = span.partition(b"-")
                major, _, minor = device.partition(b":")
                key = os.makedev(int(major, 16), int(minor, 16)), int(inode)
                mapped[key] = mapped.get(key, 0) + int(last, 16) - int(first, 16)
    for key, size in mapped.items():
        sizes[key] = max(sizes.get(key, 0), size)


def empty_and_remove(folder: str) -> None:
    """Remove `folder` whatever is in it: modes that forbid it, trees too deep for a path or for recursion.

    Folders inside folders are moved up beside them until there is one level only. Called when no process of the sandbox
    lives: one that did could lead this astray by a link. That the program has removed the folder itself is no failure.
    """
    frontier = [folder] if os.path.lexists(folder) else []
    while frontier:
        place = frontier.pop()
        os.chmod(place, 0o700)
        with os.scandir(place) as entries:
            listed = list(entries)
        for entry in listed:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif place == folder:
                frontier.append(entry.path)
            else:
                os.chmod(entry.path, 0o700)
                moved = os.path.join(folder, os.urandom(12).hex())  # a name that the program could not take before
                os.rename(entry.path, moved)
                frontier.append(moved)
        if place != folder:
            os.rmdir(place)
    if os.path.lexists(folder):
        os.rmdir(folder)
