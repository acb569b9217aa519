"""The attention benchmark on a CPU: what it asks of a library, what it says of one that refuses, and cold caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.kernels import attention
from benchmarks.kernels.attention import (
    CACHES,
    COLD_BYTES,
    DECODE,
    Pages,
    Row,
    causal_flops,
    decode_rows,
    show,
    trainer_rows,
)


def timed(call: Callable[[], Any]) -> float:
    call()
    return 2.0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of 40 tokens, and no backward: it has no CPU."""
    monkeypatch.setattr(attention, "PACKED", [(2, 40)])
    monkeypatch.setattr(attention, "attention_packed_backward_triton", lambda *given: None)
    torch.manual_seed(0)


def test_a_library_is_asked_for_the_same_attention(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(trainer_rows("bf16", "cpu", timed))
    assert [row["op"] for row in rows] == [
        "packed forward",
        "packed backward",
        "cuDNN forward",
        "FlashAttention forward",
    ]
    _, _, refused, flash = rows
    assert {row["workload"] for row in rows} == {"2x40"}
    assert isinstance(flash["relative_error"], float) and 0 < flash["relative_error"] < 5e-3
    assert (flash["us"], flash["tflop_per_s"]) == (2.0, causal_flops(2, 0, 40) / 2.0 / 1e6)
    assert "us" not in refused and "No viable backend" in str(refused["refused"])
    show(rows)
    assert "No viable" in capsys.readouterr().out


def test_a_library_has_no_fp8_cache(small: None) -> None:
    assert [row["op"] for row in trainer_rows("fp8_calibrated", "cpu", timed)] == ["packed forward", "packed backward"]


def test_calls_of_decode_find_no_keys_in_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    visited: list[Pages] = []
    monkeypatch.setattr(attention, "DECODE", {"1x256": [256], "2x300": [300, 300]})
    monkeypatch.setattr(attention, "COLD_BYTES", 3 << 20)
    monkeypatch.setattr(Pages, "decode", lambda pages, *given: visited.append(pages))
    rows: list[Row] = list(decode_rows("fp8_dynamic", "cpu", lambda call: float(len([call() for _ in range(9)]))))
    assert [(row["op"], row["workload"]) for row in rows] == [
        (op, workload) for workload in ("1x256", "2x300") for op in ("decode", "decode, quantised")
    ]
    for first, contexts in ((0, [256]), (18, [300, 300])):
        caches = list({id(pages): pages for pages in visited[first : first + 18]}.values())
        assert all(pages.contexts.tolist() == contexts for pages in caches)
        read = [pages.bytes_read for pages in caches]
        assert sum(read) >= 3 << 20 > sum(read[1:]), "as many as are needed"
        turns = [id(pages) for pages in visited[first : first + 18]]
        assert turns == [id(caches[call % len(caches)]) for call in range(18)]


def test_few_long_sequences_are_among_the_workloads() -> None:
    assert [DECODE[f"{count}x16384"] for count in (1, 4, 16)] == [[16384] * count for count in (1, 4, 16)]
    assert max(DECODE["48x300..16000"]) == 16000 and len(DECODE["48x300..16000"]) == 48, "ragged, as a rollout's tail"
    assert {"bf16", "fp8_calibrated"} <= set(CACHES)
    assert COLD_BYTES > 4 * 60e6, "an H200's L2 has 50 to 60 MB"
