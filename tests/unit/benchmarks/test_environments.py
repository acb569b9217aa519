"""The benchmark of slow environments, small, over the real engine: every rollout ends, with a reward or a reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import environments


def test_none_is_lost_and_the_engine_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--rollouts", "16", "--turns", "3", "--seconds", "0,0.05", "--out", str(tmp_path)]
    monkeypatch.setattr(environments, "MAX_TOKENS", 16)
    monkeypatch.setattr(sys, "argv", ["environments", *words])
    environments.main()
    at_once, slow = json.loads((tmp_path / "environments_tiny.json").read_text())["rows"]
    for row in (at_once, slow):
        assert row["rollout/count"] == 16 and row["rollout/lost"] == 0
        assert row["rollout/rewarded"] + row["rollout/environment_error"] == 16
        assert row["rollout/rewarded"] == at_once["rollout/rewarded"]  # time changes nothing
    assert at_once["rollout/engine_busy_share"] > 0.8  # 1.0 less what a busy machine takes from it
    assert 0 < slow["rollout/engine_busy_share"] <= 1
