"""The console: lines at several widths, what runs now, several threads, pipes."""

import re
import threading
from io import StringIO
from itertools import pairwise

import pytest

from octetrl.telemetry import console as console_module
from octetrl.telemetry.console import Console, Phase, bar_line, leave_screen
from octetrl.telemetry.step_line import (
    NUMBERS,
    TIME,
    StepLine,
    duration,
    environment_parts,
    evaluation_parts,
    line,
    rows_of,
)

METRICS = {"reward/mean": 0.53125, "loss": -0.0012, "mismatch/token_mult_prob_error": 1.00021, "time/step": 14.2}
ALL = {number.metric: 12345.678 for number in NUMBERS} | {TIME: 100.0, "mismatch/unequal_tokens": 3.0}


class Terminal(StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text)


# ---------------------------------------------------------------- lines


def test_plain_is_one_line_a_step_and_nothing_for_short_phases(terminal: Terminal) -> None:
    out = StringIO()
    console = Console("plain", 100, out=out)
    with console.phase("rollout") as progress:
        progress(3, total=8, tokens=120)
    console.step(12, METRICS)
    assert out.getvalue() == "step  12/100  reward 0.531  log-probs 0.021% apart  14 s  20:50 left\n"
    out = StringIO()
    own = {"reward/component/polite": 0.5, "environment/letters": 12.0, "leak/share": 0.25, "train/updates": 1.0}
    Console("plain", 100, out=out).step(1, METRICS | own)
    assert out.getvalue().splitlines()[1:] == ["  own metrics  reward: polite 0.500  letters 12.000  leak/share 0.250"]
    out = StringIO()
    console = Console("plain", 9, out=out)
    with console.steps(5, [{"step": 4.0, "eval/accuracy": 0.7}, {"step": 5.0}]):
        console.step(6, {"eval/accuracy": 0.6}, is_due=False)
    assert out.getvalue() == "eval 6/9  held-out accuracy 0.600  best so far 0.700 at step 4\n"


@pytest.mark.parametrize("width", [80, 120])
def test_the_kl_of_a_run_with_a_reference_is_always_shown(width: int) -> None:
    metrics = METRICS | {"kl": 0.0123, "rollout/failure_share": 0.5, "entropy": 1.0}
    text = line(StepLine(10_000).parts(1, metrics, width=width))
    assert "kl 0.0123" in text and len(text) <= width


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_line_fits_and_says_what_its_numbers_mean(width: int) -> None:
    lines = StepLine(10_000)
    texts = [line(lines.parts(9_000, ALL, "1.5 h", width)), line(lines.parts(9_001, METRICS, "1.4 h", width))]
    assert all(len(text) <= width for text in texts)
    assert texts[0].startswith("step  9000/10000  reward 12345.678") == (width > 40)
    assert texts[0].endswith("1.5 h left")
    assert ("log-probs differ in 3 tokens" in texts[0]) == (width >= 80)
    assert width < 80 or "log-probs 0.021% apart" in texts[1]


def test_lines_are_columns() -> None:
    lines = StepLine(20)
    steps = [
        {"reward/mean": 0.25, "rollout/truncated_share": 0.0, "time/step": 1.0},
        {"reward/mean": -1.25, "rollout/truncated_share": 1.0, "time/step": 12.0},
        {"reward/mean": 0.5, "rollout/truncated_share": 0.0, "time/step": 3.0},
    ]
    texts = [line(lines.parts(step, metrics, "9 s")) for step, metrics in enumerate(steps, start=9)]
    assert texts == [
        "step  9/20  reward 0.250  1.0 s  9 s left",
        "step 10/20  reward -1.250  truncated 100%   12 s  9 s left",
        "step 11/20  reward  0.500  truncated   0%  3.0 s  9 s left",
    ]


def test_important_numbers_stay_and_a_warning_takes_the_room_of_others() -> None:
    sound = {"reward/mean": 0.25, "mismatch/token_mult_prob_error": 1.0, "entropy": 5.923, "grad_norm": 0.25}
    sound |= {"rollout/mean_length": 16.0, "rollout/truncated_share": 0.0, "reward/zero_variance_fraction": 0.0}
    sound |= {"rollout/tokens_per_second": 900.0, "train/tokens_per_second": 900.0, "memory/peak_gb": 7.5, TIME: 1.5}
    equal = {"reward/zero_variance_fraction": 0.5}, {"reward/zero_variance_fraction": 1.0}
    lines = StepLine(200)
    steps = [sound, sound | equal[0], sound | equal[1], {"reward/mean": 0.25, TIME: 1.5} | equal[1], sound]
    texts = [line(lines.parts(step, metrics, "1:20:00")) for step, metrics in enumerate(steps, start=9)]
    assert all(word in texts[number] for word in ("reward", "log-probs", "length") for number in (0, 1, 2, 4)), texts
    assert "equal rewards 100%" in texts[2] and "equal rewards" in texts[4] and max(map(len, texts)) <= 120
    failed = line(
        StepLine(200).parts(2, sound | {"rollout/failure_share": 0.5, "rollout/truncated_share": 0.5}, "9 s", 80)
    )
    assert "failed 50%" in failed and "truncated 50%" in failed
    assert "discarded tokens 7.5" in line(StepLine(200).parts(2, sound | {"agent/discarded_tokens": 7.5}, "9 s", 80))


def test_what_a_line_says_of_rewards_and_environments() -> None:
    waits = line(StepLine(3).parts(1, {"time/step": 10.0, "time/reward": 4.5}))
    assert waits == "step 1/3  waiting for rewards 45%  10 s"
    assert line(StepLine(3).parts(1, {"time/step": 10.0, "time/reward": 0.5})) == "step 1/3  10 s"
    metrics = {"environments/b/reward": 0.5, "environments/b/failure_share": 0.0, "environments/c/share": 0.0}
    metrics |= {"environments/a/failure_share": 1.0, "eval/environments/b/accuracy": 0.25}
    assert line(environment_parts(metrics, "each", "environments/{}/reward")) == "each  a -  b 0.500"
    assert line(environment_parts(metrics, "each", "eval/environments/{}/accuracy")) == "each  b 0.250"
    assert environment_parts({"reward/mean": 1.0}, "each", "environments/{}/reward") == []
    metrics = {f"environments/tasks_{n}/reward": 0.5 for n in range(12)}
    parts = environment_parts(metrics, "  reward by environment", "environments/{}/reward")
    rows = [line(row) for row in rows_of(parts, 80)]
    assert len(rows) > 2 and all(len(row) <= 80 for row in rows)
    assert " ".join(rows).split() == line(parts).split()
    assert {row.index("tasks_") for row in rows} == {len("  reward by environment  ")}
    assert [line(row) for row in rows_of(parts[:2], 10)] == ["  reward by environment  tasks_0 0.500"]
    assert list(rows_of([], 80)) == []


def test_log_probs_are_said_in_words() -> None:
    def said(**metrics: float) -> str:
        return line(StepLine(3).parts(1, {f"mismatch/{name}": value for name, value in metrics.items()}))

    assert said(token_mult_prob_error=1.0) == "step 1/3  log-probs equal"
    assert said(token_mult_prob_error=1.0, unequal_tokens=0.0) == "step 1/3  log-probs equal"
    assert said(token_mult_prob_error=1.0, unequal_tokens=2.0) == "step 1/3  log-probs differ in 2 tokens"
    assert said(token_mult_prob_error=1.01) == "step 1/3  log-probs 1.000% apart"
    stale = {"mismatch/token_mult_prob_error": 1.249, "rollout/on_policy_share": 0.25}
    parts = StepLine(3).parts(1, stale)
    assert line(parts) == "step 1/3  stale 75%, log-probs 24.9% apart", "it may be of the engine as well"
    assert parts[-1].tone == "warn" and StepLine(3, limit=1.5).parts(1, stale)[-1].tone == "plain"
    out = StringIO()
    assert Console("plain", 3, out=out, mismatch_limit=1.5)._line.parts(1, stale)[-1].tone == "plain"


def test_an_evaluation_is_compared_with_the_best() -> None:
    now = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6, "time/evaluate": 3.0}
    first = line(evaluation_parts(10, 20, now, {}))
    assert first == "eval 10/20  held-out accuracy 0.500  95% interval 0.400 to 0.600  3.0 s"
    assert "the best so far, +0.250 against step 5" in line(evaluation_parts(10, 20, now, {5: 0.25, 7: 0.1}))
    assert "best so far 0.750 at step 5" in line(evaluation_parts(10, 20, now, {5: 0.75}))
    said = line(evaluation_parts(10, 20, {"eval/accuracy": 0.0}, {5: 0.0}))
    assert said == "eval 10/20  held-out accuracy 0.000  none above 0 so far"


@pytest.mark.parametrize("earlier", [{}, {50: 0.25}, {50: 0.75}])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_an_evaluation_fits_and_keeps_the_comparison_longest(width: int, earlier: dict[int, float]) -> None:
    now = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6, "time/evaluate": 3.0}
    shown = line(evaluation_parts(90, 100, now, earlier, width))
    assert len(shown) <= width and shown.startswith("eval  90/100  held-out accuracy 0.500")
    assert ("best so far" in shown) == (bool(earlier) and width >= 80)
    has_interval = "95% interval 0.400 to 0.600" in shown
    assert has_interval == (width == 120 or (width == 80 and not earlier))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, ""), (0.04, "0.0 s"), (9.4, "9.4 s"), (9.96, "10 s"), (59.6, "1:00"), (119, "1:59"), (7199, "1:59:59")],
)
def test_a_duration_is_seconds_or_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---------------------------------------------------------------- what runs now


class Clock:
    """The time that the console reads; it passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_the_time_left_is_steady(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve steps of 2 s come after twelve of 40 s, again and again, and the first one compiles for 20 minutes."""
    clock, steps = Clock(), 240
    monkeypatch.setattr(console_module, "time", clock)
    console = Console("auto", steps, out=terminal)
    seconds = [1200.0, *(2.0 if step // 12 % 2 else 40.0 for step in range(2, steps + 1))]
    ends: list[float] = []
    for step, spent in enumerate(seconds[:-1], start=1):
        console._next_step(step - 1)
        clock.now += spent
        console.step(step, {"time/step": spent})
        said = console._whole(step + 1).facts[-1].removesuffix(" left")
        parts = [float(part) for part in said.removesuffix(" s").split(":")]
        ends.append(clock.now + sum(part * 60**place for place, part in enumerate(reversed(parts))))
    whole = sum(seconds)
    assert all(abs(end - whole) < 0.15 * whole for end in ends[48:]), "when the run will end, as said after each step"
    assert max(abs(b - a) for a, b in pairwise(ends[48:])) < 0.03 * whole


@pytest.mark.parametrize("width", [20, 40, 79, 119])
def test_a_bar_fits_any_width(width: int) -> None:
    phase = Phase("rollout", done=16, total=64, tokens=1_000)
    text = bar_line("rollout", phase.share, [*phase.facts, "2.0 s left"], width, 10, plain=False).plain
    assert len(text) <= width
    assert width < 40 or text.endswith("2.0 s left")
    bar = re.search("━+─+", text)
    assert width < 79 or (bar is not None and abs(bar[0].count("━") / len(bar[0]) - 0.25) < 0.05)
    assert bar_line("rollout", 0.5, [], width, 10, plain=True).plain.isascii()


def test_the_share_counts_answers_or_tokens_or_the_last_time() -> None:
    assert Phase("load").share is None and Phase("load").seconds_left is None
    assert Phase("rollout", done=8, total=64).share == 0.125
    assert Phase("rollout", done=8, total=64, tokens=50, most_tokens=100).share == 0.5
    before = Phase("publish", before=1e-9)
    assert before.share == 0.99 and before.seconds_left is None
    half = Phase("train", done=2, total=4, began=Phase("now").began - 10)
    assert half.seconds_left == pytest.approx(10, abs=1)


def test_live_shows_the_phases_of_a_step_and_leaves_only_lines(terminal: Terminal) -> None:
    console = Console("auto", 100, out=terminal)
    with console.steps(11):
        with console.phase("rollout") as progress:
            progress(3, total=8, tokens=120)
            with console.phase("inner") as inner:
                inner(4, total=8)
            console._live.refresh()  # type: ignore[union-attr]
        console._live.refresh()  # type: ignore[union-attr]
        console.step(12, METRICS)
    shown = plain(terminal.getvalue())
    assert "rollout" in shown and "4/8 answers" in shown and "inner" not in shown
    assert "step 12/100" in shown and "rewards" in shown, "what follows a rollout"
    last = terminal.getvalue().split("step ")[-1]
    assert "\x1b[?25h" in last and plain(last).split("\n")[-1].strip("\r") == "", (
        "the cursor is back, the bars are gone"
    )
    assert console_module._on_screen == []


def test_phases_of_two_threads_have_a_line_each(terminal: Terminal) -> None:
    console, begun, ends = Console("auto", 3, out=terminal), threading.Event(), threading.Event()

    def draw() -> None:
        with console.phase("rollout") as progress:
            progress(1, total=2)
            begun.set()
            ends.wait(120)

    thread = threading.Thread(target=draw)
    with console.steps(0):
        thread.start()
        begun.wait(120)
        with console.phase("train") as progress:
            progress(3, total=7)
            shown = [row.plain for row in console._bottom().renderables]  # type: ignore[union-attr]
        ends.set()
        thread.join()
    assert [text.split()[0] for text in shown] == ["rollout", "train", "step"]
    assert "1/2 answers" in shown[0] and "3/7 micro-batches" in shown[1]


def test_workers_have_a_line_each(terminal: Terminal) -> None:
    console = Console("auto", 3, out=terminal)
    console.workers = lambda: [f"worker {rank}: train for 3 s" for rank in range(10)]
    with console.steps(2, [{"step": 1, "eval/accuracy": 0.5}, {"step": 2, "eval/accuracy": 0.25}]):
        shown = [row.plain for row in console._bottom().renderables]  # type: ignore[union-attr]
    assert shown[0].split()[:2] == ["step", "3/3"] and "held-out accuracy 0.250  " in shown[0], "the latest one"
    assert shown[-2].strip() == "worker 7: train for 3 s" and "2 more: octetrl status" in shown[-1]


def test_a_stopped_command_leaves_the_screen(terminal: Terminal) -> None:
    console = Console("auto", 3, out=terminal)
    context = console.phase("rollout")
    context.__enter__()
    leave_screen()
    assert console._live is None and terminal.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


# ---------------------------------------------------------------- pipes


def test_a_pipe_gets_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "HEARTBEAT_SECONDS", 0.02)
    out = StringIO()
    console = Console("plain", 3, out=out)
    console.workers = lambda: ["worker 0: busy"]
    with console.steps(1), console.phase("train") as progress:
        progress(3, total=8)
        waited = threading.Event()
        for _ in range(10_000):
            if "worker" in out.getvalue():
                break
            waited.wait(0.01)
    first, second, *_ = out.getvalue().splitlines()
    assert re.match(r"  step 2/3, train: 3/8 micro-batches, \d+ s", first) and second == "    worker 0: busy"
    assert console._heart is None and console._ended.is_set()


@pytest.mark.parametrize(("mode", "term"), [("auto", None), ("auto", "dumb"), ("plain", "xterm")])
def test_auto_is_plain_without_a_terminal(mode: str, term: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term or "xterm")
    out = StringIO() if term is None else Terminal()
    console = Console(mode, 2, out=out)  # type: ignore[arg-type]
    with console.steps(0), console.phase("rollout"):
        console.step(1, METRICS)
    console.rows("grpo: tiny", [("precision", "FP8"), ("", "and " * 60)])
    text = out.getvalue()
    assert text.isascii() and "\x1b" not in text and len(text.splitlines()) == 4
    assert text.splitlines()[2] == "  precision  FP8"


def test_rows_wrap_on_a_terminal(terminal: Terminal) -> None:
    Console("auto", 1, out=terminal).rows("title", [("label", "word " * 30)])
    lines = plain(terminal.getvalue()).splitlines()
    assert len(lines) == 4 and all(len(text) < 80 for text in lines)
    assert lines[1].startswith("  label  word") and lines[2].startswith("         word")


def test_quiet_shows_warnings_only() -> None:
    out, err = StringIO(), StringIO()
    console = Console("quiet", 100, out=out, err=err)
    with console.steps(0), console.phase("rollout") as progress:
        progress(1, 2)
        console.step(1, METRICS | {"eval/accuracy": 0.5})
    console.rows("banner", [("a", "b")])
    console.note("resumed")
    console.warn("mismatch [high]")
    assert (out.getvalue(), err.getvalue()) == ("", "warning: mismatch [high]\n")
