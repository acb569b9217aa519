"""Imports of large libraries, without garbage collection meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection while modules are imported, and leave them out of every later one.

    Collections would take a fifth of the import's time and free nothing: modules stay as long as the process. A
    process that has PyTorch already, or collects no garbage, is left as it is."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
