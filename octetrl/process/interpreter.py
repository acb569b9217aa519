"""The Python that runs the foreign code, and which files it needs.

It is the run's own interpreter without the run's packages (those of a virtual environment are left out), unless another
is named: the interpreter of a virtual environment brings the packages of that environment. As root the foreign code is
another user, who may not reach an interpreter in a private folder; then the machine's own Python takes its place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from octetrl.system.errors import UserError

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_SYSTEM_PYTHON = "/usr/bin/python3"
_QUESTION = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"


@dataclass(frozen=True, slots=True)
class Interpreter:
    executable: str
    folders: tuple[str, ...]  # what it reads, files among them: none inside another
    links: dict[str, str]  # symbolic links of the root folder, such as /bin -> usr/bin


@cache
def find_interpreters(path: str | None = None) -> tuple[Interpreter, ...]:
    """`path`, or else this process's own and the machine's, to be tried in turn. UserError when `path` does not run."""
    if path is None:
        found = [_interpreter(os.path.realpath(sys.executable), [sys.base_prefix, sys.base_exec_prefix])]
        if os.access(_SYSTEM_PYTHON, os.X_OK):
            found.append(_interpreter(os.path.realpath(_SYSTEM_PYTHON), []))
        return tuple(found)
    try:
        answer = subprocess.run([path, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=30, check=True)
        prefixes = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"environment.sandbox.python: '{path}' does not run as a Python ({error}); give an interpreter's path"
        ) from error
    return (_interpreter(os.path.abspath(path), [*prefixes, str(Path(os.path.realpath(path)).parent)]),)


def _interpreter(executable: str, prefixes: list[str]) -> Interpreter:
    links = {path: os.readlink(path) for path in _SYSTEM_FOLDERS if os.path.islink(path)}
    wanted = [path for path in (*_SYSTEM_FOLDERS, *_SYSTEM_FILES) if path not in links and os.path.exists(path)]
    wanted += [place for path in (executable, *prefixes) for place in (path, os.path.realpath(path))]
    folders: list[str] = []
    for path in sorted(set(wanted) - {"/"}, key=len):  # a Python whose prefix is the root has its files in /lib
        if not any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders):
            folders.append(path)
    return Interpreter(executable, tuple(folders), links)
