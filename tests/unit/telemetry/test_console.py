from io import StringIO

import pytest

from octetrl.telemetry import console as console_module
from octetrl.telemetry.console import COLUMNS, Console

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
    assert (
        out.getvalue() == "step 12/100  reward 0.531  log-probs 0.021% apart  step s 14.20  loss -0.0012  21 min left\n"
    )


def test_a_line_fits_and_says_what_its_numbers_mean() -> None:
    out = StringIO()
    many = {line.metric: 12345.678 for column in COLUMNS for line in column}
    Console("plain", 10_000, out=out).step(9_000, {**many, "mismatch/unequal_tokens": 3.0})
    Console("plain", 3, out=out).step(3, {"mismatch/token_mult_prob_error": 1.0, "rollout/failure_share": 0.0})
    full, equal = out.getvalue().splitlines()
    assert 90 < len(full) <= 120 and full.startswith("step 9000/10000  reward") and full.endswith(" h left")
    assert "log-probs differ in 3 tokens" in full
    assert equal == "step 3/3  log-probs equal"


def test_a_pipe_gets_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "HEARTBEAT_SECONDS", 0.0)
    out = StringIO()
    with Console("plain", 3, out=out).phase("rollout") as progress:
        progress(3, total=8, tokens=120)
    assert out.getvalue().startswith("  rollout: 3 of 8, ") and "tok/s" in out.getvalue()


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
