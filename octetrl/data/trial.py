"""Try a call of foreign code in a copy of this process, with limits of time and memory."""

from __future__ import annotations

import os
import resource
import select
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

SECONDS = 10  # of a core
GIB = 4  # beyond what the process has
_WAITED = 120.0  # seconds, on a machine that is short of cores
_FULL = 3  # exit code
_PARALLEL = "TOKENIZERS_PARALLELISM"


def find_excess(call: Callable[[], object]) -> str | None:
    """What `call` takes too much of. None: it ends, with or without an error, or could not be tried.

    The call may use no threads and no GPU: the copy has neither."""
    before = os.environ.get(_PARALLEL)
    os.environ[_PARALLEL] = "false"  # the tokenizers library then says nothing of the copy
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads, which the copy lacks
            copy = os.fork()
        if copy == 0:
            _try(call)
    except RuntimeError:  # another thread holds a lock file, and its library lets nobody copy the process
        os.close(reader)
        return None
    finally:
        os.close(writer)
        os.environ.pop(_PARALLEL) if before is None else os.environ.update({_PARALLEL: before})
    try:
        if not select.select([reader], [], [], _WAITED)[0]:
            os.kill(copy, signal.SIGKILL)
    except BaseException:
        os.kill(copy, signal.SIGKILL)
        raise
    finally:
        os.close(reader)
        _, status, used = os.wait4(copy, 0)
    if os.WIFSIGNALED(status):
        return f"{SECONDS} seconds" if used.ru_utime + used.ru_stime > SECONDS / 2 else None
    return f"{GIB} GiB" if os.WEXITSTATUS(status) == _FULL else None


def _try(call: Callable[[], object]) -> NoReturn:
    """In the copy, whose descriptors end with it."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + GIB * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        call()
    except MemoryError:
        os._exit(_FULL)
    finally:
        os._exit(0)
