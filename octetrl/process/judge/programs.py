"""The two programs of a judgement, each in one text: a sandbox does not have this package."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

from octetrl.process.judge import contestant, judging, link, remote, wire

_PACKAGE = "octetrl.process.judge"
_PROGRAM = """
import sys, types
path = ""
for part in {package!r}.split("."):
    path = path + "." + part if path else part
    sys.modules[path] = types.ModuleType(path)
for name, text in {files!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), vars(module))
module.main()
"""


@cache
def contestant_program() -> str:
    return _joined(wire, contestant)


@cache
def judge_program() -> str:
    return _joined(wire, remote, link, judging)


def _joined(*modules: ModuleType) -> str:
    """A program that runs `main` of the last module; each module may import the ones before it."""
    files = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in modules]
    assert all(name.rpartition(".")[0] == _PACKAGE for name, _ in files)
    return _PROGRAM.format(package=_PACKAGE, files=files)
