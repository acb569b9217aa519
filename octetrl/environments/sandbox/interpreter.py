"""The Python that runs the foreign code: which files it needs, and whether an unprivileged user can reach them.

It is the run's own interpreter without the run's packages (those of a virtual environment are left out), unless another
is named: the interpreter of a virtual environment brings the packages of that environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from octetrl.config.errors import UserError

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_QUESTION = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"


@dataclass(frozen=True, slots=True)
class Interpreter:
    executable: str
    folders: tuple[str, ...]  # what it reads, files among them: none inside another
    links: dict[str, str]  # symbolic links of the root folder, such as /bin -> usr/bin

    @property
    def is_public(self) -> bool:
        """Whether any user of the machine can run it."""
        places = [Path(self.executable), *map(Path, self.folders)]
        return all(_is_open(path) for path in places)


@cache
def find_interpreter(path: str | None = None) -> Interpreter:
    """`path`, or this process's own without its virtual environment. Raises UserError when `path` does not run."""
    if path is None:
        return _interpreter(os.path.realpath(sys.executable), [sys.base_prefix, sys.base_exec_prefix])
    try:
        answer = subprocess.run([path, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=30, check=True)
        prefixes = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"environment.sandbox.python: '{path}' does not run as a Python ({error}); give an interpreter's path"
        ) from error
    return _interpreter(os.path.abspath(path), [*prefixes, str(Path(os.path.realpath(path)).parent)])


@cache
def system_interpreter() -> Interpreter | None:
    """The machine's own Python, for where a user without rights can't reach the run's."""
    path = "/usr/bin/python3"
    return _interpreter(os.path.realpath(path), []) if os.access(path, os.X_OK) else None


def _interpreter(executable: str, prefixes: list[str]) -> Interpreter:
    links = {path: os.readlink(path) for path in _SYSTEM_FOLDERS if os.path.islink(path)}
    wanted = [path for path in (*_SYSTEM_FOLDERS, *_SYSTEM_FILES) if path not in links and os.path.exists(path)]
    wanted += [os.path.realpath(path) for path in (executable, *prefixes)] + [path for path in prefixes]
    folders: list[str] = []
    for path in sorted(set(wanted), key=len):
        if not any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders):
            folders.append(path)
    return Interpreter(executable, tuple(folders), links)


def _is_open(path: Path) -> bool:
    """Whether others may read it, run it where it can be run, and pass all folders above it."""
    try:
        mode = path.stat().st_mode
        return bool(mode & 0o004) and all(folder.stat().st_mode & 0o001 for folder in path.resolve().parents)
    except OSError:
        return False
