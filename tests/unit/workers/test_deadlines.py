"""How long a phase may take follows from how long it usually takes."""

from __future__ import annotations

import pytest

from octetrl.config.cluster import DeadlineConfig
from octetrl.workers.team import Deadlines


def test_the_limit_follows_from_the_longest_so_far() -> None:
    deadlines = Deadlines(DeadlineConfig())
    assert (deadlines.limit("train"), deadlines.limit("load")) == (3600.0, 3600.0), "the first may compile"
    assert deadlines.limit("state") == deadlines.limit("submit") == 300.0, "they compute nothing"
    for seconds, limit in ((2.0, 300.0), (100.0, 1000.0), (31.0, 1000.0)):
        deadlines.took("train", seconds)
        assert deadlines.limit("train") == limit
    assert deadlines.limit("publish") == 3600.0, "each phase has its own"


@pytest.mark.parametrize("phase", ["state", "train"])
def test_the_recipe_sets_the_limits(phase: str) -> None:
    deadlines = Deadlines(DeadlineConfig(first_seconds=50.0, least_seconds=20.0, times_usual=3.0))
    assert deadlines.limit(phase) == (20.0 if phase == "state" else 50.0)
    deadlines.took(phase, 10.0)
    assert deadlines.limit(phase) == 30.0
