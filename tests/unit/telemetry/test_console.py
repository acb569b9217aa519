from io import StringIO

import pytest

from octetrl.telemetry.console import Console

METRICS = {"reward/mean": 0.53125, "loss": -0.0012, "mismatch/token_mult_prob_error": 1.00021, "time/step": 14.2}


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_is_one_line_a_step_and_nothing_for_phases() -> None:
    out = StringIO()
    console = Console("plain", 100, out=out)
    with console.phase("rollout") as progress:
        progress(3, total=8, tokens=120)
    console.step(12, METRICS)
    assert out.getvalue() == "step 12/100  reward 0.531  loss -0.0012  mismatch 1.00021  step s 14.20\n"


def test_auto_is_plain_on_a_pipe() -> None:
    out = StringIO()
    Console("auto", 2, out=out).step(1, METRICS)
    assert len(out.getvalue().splitlines()) == 1


def test_quiet_shows_warnings_only() -> None:
    out, err = StringIO(), StringIO()
    console = Console("quiet", 100, out=out, err=err)
    console.step(1, METRICS)
    console.note("resumed")
    console.warn("mismatch [high]")
    assert (out.getvalue(), err.getvalue()) == ("", "warning: mismatch [high]\n")


def test_live_shows_the_phase_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    console = Console("auto", 100, out=out)
    with console.phase("rollout") as progress:
        progress(3, total=8, tokens=120)
        with console.phase("inner") as inner:
            inner(1)
    console.step(12, METRICS)
    shown = out.getvalue()
    assert "rollout" in shown and "tok/s" in shown and "3/8" in shown and "inner" not in shown
    assert "step 12/100" in shown and "0.531" in shown and "14.20" in shown


def test_a_finished_table_is_shown_as_given() -> None:
    out = StringIO()
    Console("plain", 1, out=out).table("demo", ["", "accuracy"], [["after SFT", "0.42"], ["after GRPO", "0.87"]])
    assert all(word in out.getvalue() for word in ("demo", "accuracy", "after SFT", "0.42", "after GRPO", "0.87"))
