"""Ctrl-C once asks, twice stops, and the handler from before comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octetrl.run.loop import train
from octetrl.system.errors import Terminated
from octetrl.system.process import StopRequest, ending_signal, terminable
from octetrl.telemetry.ending import ending_of
from tests.e2e.tiny_run import tiny_recipe


@pytest.fixture(autouse=True)
def signals_are_heard() -> Iterator[None]:
    """A shell starts its background jobs with SIGINT and SIGQUIT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGQUIT), before, strict=True):
        signal.signal(number, handler)


def test_the_first_asks_the_second_stops_and_the_handler_from_before_comes_back() -> None:
    before, lines = signal.getsignal(signal.SIGINT), list[str]()
    with pytest.raises(KeyboardInterrupt), StopRequest(lines.append) as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        signal.raise_signal(signal.SIGINT)
    assert len(lines) == 1 and "stopping after this step" in lines[0]
    assert signal.getsignal(signal.SIGINT) == before


def test_the_second_does_not_cost_a_save() -> None:
    """The step has ended and nothing is shown: an impatient user presses once more."""
    lines = list[str]()
    with pytest.raises(KeyboardInterrupt), StopRequest(lines.append) as stop:
        signal.raise_signal(signal.SIGINT)
        stop.saving = 4
        signal.raise_signal(signal.SIGINT)
        stop.saving = -1  # reached: the save goes on
        signal.raise_signal(signal.SIGINT)
    assert stop.saving == -1 and any("saving step 4; press Ctrl-C again" in line for line in lines)


def test_a_background_job_that_ignores_ctrl_c_still_ignores_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest(print) as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.asked
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT])
def test_sigterm_waits_for_the_step_and_a_forked_process_dies_of_it(number: signal.Signals) -> None:
    """Schedulers send it before they take a machine back."""
    lines = list[str]()
    with StopRequest(lines.append) as stop:
        child = os.fork()
        if child == 0:
            signal.raise_signal(number)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
        signal.raise_signal(number)
        assert stop.asked and isinstance(stop.error, Terminated) and stop.error.code == 143
    assert signal.getsignal(number) is signal.SIG_DFL
    assert lines == [f"stopping after this step; {number.name}: send it again to stop at once"]
    with pytest.raises(Terminated) as at_once, StopRequest(lines.append):
        signal.raise_signal(number)
        signal.raise_signal(number)
    with pytest.raises(Terminated) as before_the_steps, terminable():
        signal.raise_signal(number)
    for error in (stop.error, at_once.value, before_the_steps.value):
        assert ending_of(error).why == f"by {number.name}"


def test_sigterm_stays_sigterm_where_a_library_makes_another_exit_of_it() -> None:
    """As Ray does within a call of its own."""

    def call(*, with_signal: bool) -> None:
        with terminable():
            try:
                if with_signal:
                    signal.raise_signal(signal.SIGUSR1)
            except SystemExit:
                pass
            raise SystemExit(1)

    with pytest.raises(Terminated) as caught:
        call(with_signal=True)
    assert (caught.value.code, caught.value.by) == (143, "SIGUSR1")
    with pytest.raises(SystemExit) as other:
        call(with_signal=False)
    assert other.value.code == 1 and ending_signal(other.value) is None, "also after a run that SIGTERM ended"


def test_sigterm_before_the_first_step_ends_the_run_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def build_run(*_: object, **__: object) -> None:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        with StopRequest(print) as stop:
            signal.raise_signal(signal.SIGTERM)
            asked.append(stop.asked)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("octetrl.run.loop.build_run", build_run)
    with pytest.raises(Terminated):
        train(tiny_recipe(tmp_path / "model", tmp_path / "run"))
    assert asked == [True], "the steps have their own handler"
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_exit_after_a_command_that_a_signal_ended_is_no_signal() -> None:
    with pytest.raises(Terminated), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert ending_signal(SystemExit(3)) is None
