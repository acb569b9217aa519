"""The benchmark of draft rows on a CPU: what it compares, and what it says of tiles with other bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels import attention_drafts
from benchmarks.kernels.attention_drafts import PRECISIONS, TILES, Drafted, show, workload_rows


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the kernel is given. It has no CPU; here it is right except with a tile of 2 stages."""
    given: list[dict[str, Any]] = []

    def decode(q_NHD: Tensor, *tables: Any, **how: Any) -> Tensor:
        given.append({"tables": tables, **how})
        wrong = how["tile"] is not None and how["tile"].stages == 2
        return q_NHD + 1.0 if wrong else q_NHD

    monkeypatch.setattr(attention_drafts, "attention_decode_triton", decode)
    monkeypatch.setattr(attention_drafts, "COLD_BYTES", 1)
    monkeypatch.setattr(attention_drafts, "SEQUENCES", 2)
    torch.manual_seed(0)
    return given


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_together_are_compared_with_rows_alone(
    decoded: list[dict[str, Any]], precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(workload_rows(precision, 100, 4, "cpu", lambda call: (call(), 2.0)[1]))
    assert [row["tile"] for row in rows][:2] == ["alone", f"*{16 if 'fp8' in precision else 32} columns, 3 stages"]
    assert len(rows) == 2 + len(TILES[precision]) and {row["workload"] for row in rows} == {"2x100+4"}
    wrong = [row["tile"] for row in rows if row.get("differing_rows")]
    assert wrong == [f"{tile.columns} columns, {tile.stages} stages" for tile in TILES[precision] if tile.stages == 2]
    assert decoded[0]["draft_offset_B"] is None and decoded[2]["draft_offset_B"] is not None
    show(rows)
    assert "2.0 (1.00)" in capsys.readouterr().out


def test_rows_of_a_sequence_have_its_pages_and_one_key_more_each() -> None:
    drafted = Drafted.random("bf16", 127, 2, "cpu")
    assert drafted.offset_N[:6].tolist() == [0, 1, 2, 0, 1, 2]
    assert drafted.pages.contexts[:3].tolist() == [127, 128, 129]
    assert drafted.pages.table[:3].unique(dim=0).shape == (1, 2)
