"""Rejection sampling: who of a group is learnt from."""

from __future__ import annotations

import pytest

from octetrl.algorithms.rejection import best_of_group
from octetrl.algorithms.table import build_algorithm
from tests.objectives import objective


@pytest.mark.parametrize(
    ("best", "threshold", "expected"),
    [
        (1, 0.0, [3]),
        (2, 0.0, [1, 3]),
        (3, 0.0, [1, 3, 4]),
        (9, 0.0, [1, 3, 4]),  # the others have no reward above 0
        (9, -1.0, [0, 1, 2, 3, 4]),
        (9, 2.0, []),
    ],
)
def test_the_best_above_the_threshold(best: int, threshold: float, expected: list[int]) -> None:
    advantages = best_of_group([0.0, 1.0, -0.5, 2.0, 1.0], best, threshold)
    assert [place for place, advantage in enumerate(advantages) if advantage == 1.0] == expected
    assert advantages.count(None) == 5 - len(expected)


def test_the_table_learns_them_as_if_given() -> None:
    algorithm = build_algorithm(objective(name="rft", best_of_group=1, reward_threshold=0.5))
    assert algorithm.advantages([[0.0, 1.0, 1.0], [0.0, 0.4]]) == [[None, 1.0, None], [None, None]]
    assert not algorithm.needs_reference and not algorithm.needs_proximal and algorithm.shape is None
