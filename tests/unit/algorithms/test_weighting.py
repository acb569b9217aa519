from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.algorithms.weighting import weigh


def test_token() -> None:
    assert weigh([3, 1, 6], "token") == ([1.0, 1.0, 1.0], 10.0)


def test_sequence() -> None:
    assert weigh([4, 1, 2], "sequence") == ([0.25, 1.0, 0.5], 3.0)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50), st.sampled_from(["token", "sequence"]))
def test_a_constant_loss_keeps_its_value(counts: list[int], weighting: str) -> None:
    token_weights, denominator = weigh(counts, weighting)
    total = sum(count * weight for count, weight in zip(counts, token_weights, strict=True))
    assert total / denominator == pytest.approx(1.0)


@pytest.mark.parametrize("counts", [[], [2, 0]])
def test_samples_without_trained_tokens_are_refused(counts: list[int]) -> None:
    with pytest.raises(AssertionError, match="left out"):
        weigh(counts, "token")
