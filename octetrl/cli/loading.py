"""A line on a terminal while a command imports PyTorch, which takes seconds before anything else can be shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from octetrl.system.imports import uncollected

LOADING = "  loading PyTorch"


@contextmanager
def loading_pytorch() -> Iterator[None]:
    """Within, a terminal shows the line; afterwards nothing of it is left. A pipe gets nothing."""
    shows = "torch" not in sys.modules and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shows:
        print(LOADING, end="\r", file=sys.stderr, flush=True)
    try:
        with uncollected():
            yield
    finally:
        if shows:
            print("\x1b[2K", end="\r", file=sys.stderr, flush=True)
