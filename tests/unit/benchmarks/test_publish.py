"""The benchmark of publishing, with a small model on a CPU: every part runs, and a part that forgets a byte fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import publish

CPU = torch.device("cpu")


def test_every_part_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "REPEATS", 1)
    rows = publish.bench("tiny", CPU)
    assert [row["op"] for row in rows] == [
        "quantise",
        "quantise half",
        "requantise",
        "transpose",
        "sums of the digest",
        "engine",
    ]
    for row in rows:
        ms, host_ms = row["ms"], row["host_ms"]
        assert isinstance(ms, float) and isinstance(host_ms, float) and 0 < host_ms <= ms
        assert ("separate_ms" in row) == (row["op"] not in ("sums of the digest", "engine"))


@pytest.mark.parametrize("number", range(4))
def test_a_part_that_writes_nothing_is_found(number: int) -> None:
    case = list(publish.cases(*publish.build("tiny", CPU)))[number]
    with pytest.raises(AssertionError, match="the results differ"):
        publish.measure(replace(case, together=lambda: None), "tiny", CPU)
