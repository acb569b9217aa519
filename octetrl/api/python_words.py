"""Errors in Python's words: the options of the command line that a message names become arguments of the library."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octetrl.system.errors import RunFailed, UserError

_QUOTED = re.compile(r"(`[^`]*`)")  # a command to type stays as it is
_ALLOWED = re.compile(r"--allow ([\w.]+)")
_FORMS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"--allow ([\w.]+)(?=:)", r"allow \1"),
    (r"--allow [\w.]+(?:=\S+)?(?: --allow [\w.]+(?:=\S+)?)*", lambda found: f"allow={_ALLOWED.findall(found[0])}"),
    (r"--from (\S+?)(?=,? |,?$)", r"model='\1'"),
    (r"--device (\w+)", r"device='\1'"),
    (r"--(resume|fp8|adapter)(?![\w:-])", r"\1=True"),
    (r"--(resume|fp8|adapter|to|allow|device|gpus|private|revision)(?![\w-])", r"\1"),
    (r"--push-to-hub(?![\w-])", "push_to_hub"),
)


def in_python(text: str) -> str:
    """The message with arguments of `octetrl.train`, `FinishedRun` and `LLM` in place of options."""
    parts = _QUOTED.split(text)
    for place in range(0, len(parts), 2):
        for pattern, replacement in _FORMS:
            parts[place] = re.sub(pattern, replacement, parts[place])
    return "".join(parts)


@contextmanager
def python_words() -> Iterator[None]:
    """Raise the same UserError or RunFailed with its text `in_python`. Also a decorator."""
    try:
        yield
    except (UserError, RunFailed) as error:
        error.args = (in_python(str(error)),)
        raise
