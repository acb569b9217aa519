"""The two programs of a judgement on code, each for a sandbox of its own: the tests (`judging`) and the code
(`contestant`). docs/sandbox.md explains them. A sandbox does not have this package, so each program is one text."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent
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
    return _joined("wire", "contestant")


@cache
def judge_program() -> str:
    return _joined("wire", "link", "judging")


def _joined(*modules: str) -> str:
    """A program that runs `main` of the last module; each module may import the ones before it."""
    files = [(f"{__name__}.{name}", (_FOLDER / f"{name}.py").read_text(encoding="utf-8")) for name in modules]
    return _PROGRAM.format(package=__name__, files=files)
