"""The benchmark of speculation: a row for each kind of drafts, and every answer as without drafts."""

from __future__ import annotations

import pytest
import torch

from octetrl.bench.model import find_model
from octetrl.bench.rollout import Bench
from octetrl.bench.speculation import measure_speculation
from octetrl.bench.workload import Shape, fixed_lengths
from octetrl.cli.bench_options import with_layers
from octetrl.cli.main import run_command
from octetrl.config.speculation import SpeculationConfig

TINY = with_layers(find_model("tiny"), 1)
WORKLOAD = fixed_lengths(Shape(2, 9, 10), 2, 384, seed=0)


def test_speculation_is_measured_beside_none_and_keeps_every_answer() -> None:
    said: list[str] = []
    one = Bench(TINY, ("bf16",), (WORKLOAD,), torch.device("cpu"), warmup_tokens=2, max_batch=16)
    always = SpeculationConfig(max_draft_tokens=4, max_sequences=16, min_gain=0.0)
    rows = measure_speculation(one, ["ngram", "0", "1", "0.8"], always, said.append)
    none, ngram, wrong, right, _ = rows
    assert [row["rollout/drafts"] for row in rows] == ["none", "ngram", "0", "1", "0.8"] and len(said) == 5
    assert all(row["rollout/unequal_answers"] == 0 and float(row["rollout/speedup"]) > 0 for row in rows)
    assert "rollout/drafted_tokens" not in none and none["rollout/speedup"] == 1.0
    assert ngram["rollout/drafts"] == "ngram" and wrong["rollout/accepted_tokens"] == 0
    assert right["rollout/accepted_tokens"] == right["rollout/drafted_tokens"] > 0
    steps = [int(row["rollout/steps"]) for row in rows]
    assert [row["rollout/forwards_saved"] for row in rows[1:]] == [steps[0] - one for one in steps[1:]]
    assert int(right["rollout/forwards_saved"]) > 0 == wrong["rollout/forwards_saved"]
    assert "rollout/forwards_saved" not in none
    assert int(right["rollout/steps"]) < int(none["rollout/steps"]) == int(wrong["rollout/steps"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drafts", "often"], "--drafts: 'often' is neither"),
        (["--drafts", "0.5", "--rounds", "2"], "one round"),
        (["--always-draft"], "--always-draft: it measures nothing without drafts; add --drafts"),
    ],
)
def test_drafts_that_cannot_be_measured_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", "rollout", "--device", "cpu", *options]) == 2
    assert said in capsys.readouterr().err
