"""Stands in for pycosat on a machine without a C compiler.

reasoning_gym imports pycosat whatever the dataset, but only `zebra_puzzles` calls it, and pycosat is published as C
source alone. The Makefile installs this instead where the source could not be built; all other datasets then work.
"""

from __future__ import annotations

from typing import NoReturn


def itersolve(*_: object, **__: object) -> NoReturn:
    raise ImportError(
        "this dataset needs pycosat, which was left out because there is no C compiler: "
        "install gcc and python3-dev, then `make clean` and `make test`"
    )


solve = itersolve
