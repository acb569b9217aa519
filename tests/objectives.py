"""An objective's section by its name, where the name is a test's parameter."""

from __future__ import annotations

from typing import Any

from octetrl.config.algorithm import OBJECTIVES


def objective(name: str = "grpo", **fields: Any) -> Any:
    return OBJECTIVES[name](**fields)
