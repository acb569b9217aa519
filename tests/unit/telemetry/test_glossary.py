"""The table of metrics: complete for what a run writes, one entry a name, and the page made from it."""

from __future__ import annotations

import ast
import re

import pytest

from octetrl.cli.main import run_command
from octetrl.config.limits import MISMATCH_LIMIT
from octetrl.records import METRIC_NAME as NAME
from octetrl.telemetry.glossary import METRICS, explained
from octetrl.telemetry.metrics import MISMATCH, TRUNCATED_LIMIT
from octetrl.telemetry.step_line import StepLine
from tests.house.tree import python_files, syntax

FAMILIES = (
    r"(reward|eval|rollout|mismatch|correction|ratio|train|time|memory|value|preference|distill|router|data|fp8|kl"
    r"|publish|checkpoint)"
)
PREFIXES = {"reward/component"}  # of which names are made


def written_names() -> set[str]:
    """Texts in the package that look like a metric's name, the benches' results left out."""
    found = set()
    for path in python_files("octetrl"):
        if path.startswith(("octetrl/bench", "octetrl/cli", "octetrl/config", "octetrl/telemetry/glossary")):
            continue
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if re.fullmatch(FAMILIES + r"/[a-z_0-9]*[a-z0-9]", node.value) else set()
    return found


def test_every_name_in_the_code_is_explained() -> None:
    names = written_names()
    assert len(names) > 80
    assert sorted(name for name in names - PREFIXES if explained(name) is None) == []


def test_entries_are_sound_and_plain_names_come_before_patterns() -> None:
    entries = [one for family in METRICS.values() for one in family]
    assert len({one.name for one in entries}) == len(entries)
    for one in entries:
        assert NAME.fullmatch(re.sub(r"\{\w+\}", "x", one.name)), one.name
        assert one.meaning.endswith(".") and (not one.look or one.look.endswith((".", ")"))), one
        if "{" not in one.name:
            assert explained(one.name) is one
    assert explained("rollout/reward_crash").name == "rollout/{status}"
    assert explained("mismatch/decile_3/gen_kl").name == "mismatch/decile_{n}/gen_kl"
    assert explained("nobody/knows") is None


def test_the_command_searches_texts_where_no_name_has_the_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["metrics", "learn_beside_tail"]) == 0
    assert "rollout/moved_answers" in capsys.readouterr().out
    assert run_command(["metrics", "moved"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["Rollout", "rollout/moved_answers"]
    assert run_command(["metrics", "nosuchword"]) == 2


@pytest.mark.parametrize(
    ("label", "metric"),
    [
        ("equal rewards", "reward/zero_variance_fraction"),
        ("Train tok/s", "train/tokens_per_second"),
        ("clamped KV", "fp8/kv_saturation"),
        ("apart", "mismatch/token_mult_prob_error"),
    ],
)
def test_what_the_console_calls_a_metric_is_found(label: str, metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["metrics", label]) == 0
    assert metric in capsys.readouterr().out


def test_the_console_and_the_table_have_the_same_limits() -> None:
    cut, apart = explained("rollout/truncated_share"), explained(MISMATCH)
    assert cut is not None and cut.look.startswith(f"Above {TRUNCATED_LIMIT:.0%}: raise rollout.max_new_tokens")
    assert apart is not None and f"Above {MISMATCH_LIMIT:g} (`mismatch.warn_above`)" in apart.look
    for above, tone in ((-1e-3, "plain"), (1e-3, "warn")):
        step = {"rollout/truncated_share": TRUNCATED_LIMIT + above, MISMATCH: MISMATCH_LIMIT + above}
        assert [part.tone for part in StepLine(3).parts(1, step)] == ["plain", tone, tone]
