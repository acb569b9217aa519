"""The rollout benchmark: workloads are as asked, the bandwidth model is the formula, no arm leaves anything behind."""

from __future__ import annotations

import gc
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from octetrl.bench import rollout as bench_rollout
from octetrl.bench.bandwidth_model import weight_bytes
from octetrl.bench.hardware import MEMORY_BYTES_PER_SECOND
from octetrl.bench.model import find_model
from octetrl.bench.profile import BETWEEN_KERNELS, kernel_rows, short_name
from octetrl.bench.rollout import Bench, build_arm, measure, rows_of
from octetrl.bench.workload import (
    STAIRS,
    LengthRange,
    Shape,
    Workload,
    check_positions,
    fixed_lengths,
    lognormal_lengths,
    recorded_lengths,
)
from octetrl.cli.bench_options import with_layers
from octetrl.engine.kv_cache import KVCache
from octetrl.records import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.system.errors import UserError
from octetrl.telemetry.bench_record import write_result
from octetrl.telemetry.rollouts import RolloutFiles
from octetrl.telemetry.source_digest import source_digest

VOCAB = 384
TINY = with_layers(find_model("tiny"), 1)
SMALL = fixed_lengths(Shape(4, 9, 6), 2, VOCAB, seed=0)


def bench(*precisions: str, workload: Workload = SMALL, rounds: int = 1) -> Bench:
    return Bench(TINY, precisions, (workload,), torch.device("cpu"), rounds, warmup_tokens=2)


# --- workloads ----------------------------------------------------------------------------------------------


def test_a_shape_is_what_it_says() -> None:
    assert Shape.parse("128x512+4096") == Shape(128, 512, 4096)
    assert str(Shape.parse("1x2+3")) == "1x2+3"


@pytest.mark.parametrize(
    "text", ["128x512", "0x1+1", "1x1+0", "axb+c", "128x512+4096 ", "-1x2+3", "\u0664x4+4", "4x4+" + "9" * 5000]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="128x512") as caught:
        Shape.parse(text)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("text", ["9" * 5000, "\u0664", "4-" + "9" * 5000])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="2048-4096") as caught:
        LengthRange.parse(text, "--lengths")
    assert len(str(caught.value)) < 250


def test_fixed_lengths_are_groups_of_siblings() -> None:
    workload = fixed_lengths(Shape(12, 7, 5), 4, VOCAB, seed=3)
    assert [request.num_siblings for request in workload.requests] == [4, 4, 4]
    assert workload.siblings == [(7, 5)] * 12
    assert len({request.prompt_token_ids for request in workload.requests}) == 3
    assert len({request.seed for request in workload.requests}) == 3
    assert all(request.sampling.ignore_eos for request in workload.requests)
    assert workload == fixed_lengths(Shape(12, 7, 5), 4, VOCAB, seed=3)
    assert workload != fixed_lengths(Shape(12, 7, 5), 4, VOCAB, seed=4)


def test_live_tokens_are_those_of_a_decode_loop() -> None:
    workload = lognormal_lengths(Shape(8, 11, 20), 4, VOCAB, 0, sigma=0.8, max_positions=1024)
    counted = 0
    for prompt, answer in workload.siblings:
        cached = prompt - 1  # the prompt's last token is the first query
        for _ in range(answer):
            cached += 1
            counted += cached
    assert workload.live_token_steps == counted


def test_lognormal_lengths_have_their_mean_and_their_spread() -> None:
    workload = lognormal_lengths(Shape(4000, 2, 400), 8, VOCAB, 0, sigma=0.7, max_positions=40_000)
    answers = [answer for _, answer in workload.siblings]
    assert statistics.fmean(answers) == pytest.approx(400, rel=0.05)
    assert statistics.median(answers) == pytest.approx(400 * 2.718281828 ** (-(0.7**2) / 2), rel=0.05)
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert len(prompts) == 500 and {request.num_siblings for request in workload.requests} == {8}
    assert len({request.seed for request in workload.requests}) == 500
    separate = workload.separate()
    assert separate.siblings == workload.siblings and separate.name == "4000x2+400 lognormal 0.7"
    assert workload.name == "4000x2+400 lognormal 0.7 grouped"
    assert {request.num_siblings for request in separate.requests} == {1}
    assert len({request.seed for request in separate.requests}) == 4000
    assert [request.prompt_token_ids for request in separate.requests] == [one for one in prompts for _ in range(8)]
    assert workload.prompts == separate.prompts == list(dict.fromkeys(prompts)), "what calibration reads: each once"


def test_lognormal_lengths_end_with_the_models_positions() -> None:
    workload = lognormal_lengths(Shape(400, 10, 40), 4, VOCAB, 0, sigma=1.5, max_positions=100)
    answers = [answer for _, answer in workload.siblings]
    assert max(answers) == 90 and min(answers) >= 1
    even = lognormal_lengths(Shape(4, 10, 40), 4, VOCAB, 0, sigma=0.0, max_positions=100)
    assert even.siblings == [(10, 40)] * 4


def test_hints_are_the_mean_length_of_the_answers_to_a_prompt() -> None:
    workload = lognormal_lengths(Shape(8, 10, 40), 4, VOCAB, 0, sigma=1.0, max_positions=1024)
    hinted = workload.hinted()
    assert hinted.siblings == workload.siblings and hinted.name == "8x10+40 lognormal 1 grouped hinted"
    answers = [answer for _, answer in workload.siblings]
    hints = [request.expected_tokens for request in hinted.requests]
    assert hints == [round(statistics.fmean(answers[:4])), round(statistics.fmean(answers[4:]))]
    assert [request.expected_tokens for request in workload.separate().hinted().requests] == [
        hint for hint in hints for _ in range(4)
    ]
    assert hints[0] != hints[1] and {request.expected_tokens for request in workload.requests} == {None}


def test_a_warm_up_is_the_same_prompts_with_shorter_answers() -> None:
    cut = Workload("cut", SMALL.cut(4))
    assert cut.siblings == [(9, 4)] * 4
    assert [r.prompt_token_ids for r in cut.requests] == [r.prompt_token_ids for r in SMALL.requests]
    assert Workload("cut", SMALL.cut(100)).siblings == SMALL.siblings
    ragged = lognormal_lengths(Shape(8, 11, 20), 4, VOCAB, 0, sigma=0.8, max_positions=1024)
    expected = [(prompt, min(answer, 15)) for prompt, answer in ragged.siblings]
    assert Workload("cut", ragged.cut(15)).siblings == expected


def test_a_warm_up_by_stairs_ends_one_answer_after_another() -> None:
    stairs = Workload("stairs", fixed_lengths(Shape(600, 3, 700), 2, VOCAB, 0).stairs(4)).siblings
    assert stairs == [(3, 4 + place % STAIRS) for place in range(600)]
    assert Workload("stairs", SMALL.stairs(100)).siblings == SMALL.siblings
    ragged = lognormal_lengths(Shape(8, 11, 20), 4, VOCAB, 0, sigma=0.8, max_positions=1024)
    expected = [(prompt, min(answer, 9 + place)) for place, (prompt, answer) in enumerate(ragged.siblings)]
    assert Workload("stairs", ragged.stairs(9)).siblings == expected
    assert [one.sampling.max_new_tokens for one in SMALL.stairs(2)] == [3, 5], "the longest of each request"
    assert (ragged.short(9), SMALL.short(4)) == (ragged.stairs(9), SMALL.cut(4)), "no size compiles while it is timed"


def rollout(task: str, prompt: int, answers: tuple[int, ...]) -> Rollout:
    turns = tuple(
        Turn(tuple(range(prompt)), Completion((5,) * n, (0.0,) * n, "", FinishReason.STOP, 0, "")) for n in answers
    )
    status = RolloutStatus.SCORED if turns else RolloutStatus.PROMPT_TOO_LONG
    return Rollout(Task(task, ""), turns, status, 1.0 if turns else None)


def test_recorded_lengths_are_those_of_a_runs_file(tmp_path: Path) -> None:
    groups = [
        RolloutGroup(Task("a", ""), (rollout("a", 3, (7,)), rollout("a", 3, (2, 4)), rollout("a", 3, ()))),
        RolloutGroup(Task("b", ""), (rollout("b", 3, (1,)),)),
    ]
    path = RolloutFiles(tmp_path).write(12, groups)
    workload = recorded_lengths(path, None, VOCAB, seed=0)
    assert workload.siblings == [(3, 7), (3, 6), (3, 1)], "a prompt that was too long has no answer to measure"
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert len(prompts) == 2 and prompts[0] != prompts[1], "siblings share their prompt"
    assert workload.name == "3x3+5 step_000012 grouped"
    assert recorded_lengths(path, 2, VOCAB, seed=0).siblings == [(3, 7), (3, 6)]
    with pytest.raises(UserError, match="holds 3 rollouts"):
        recorded_lengths(path, 4, VOCAB, seed=0)


def test_a_line_of_the_file_ends_where_its_writer_ended_it(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\r\nh"
    turn = Turn((1, 2), Completion((5,) * 3, (0.0,) * 3, text, FinishReason.STOP, 0, ""))
    group = RolloutGroup(Task("a", text), (Rollout(Task("a", text), (turn,), RolloutStatus.SCORED, 1.0),) * 2)
    path = RolloutFiles(tmp_path).write(1, [group])
    assert "\u2028" in path.read_text(encoding="utf-8")
    assert recorded_lengths(path, None, VOCAB, seed=0).siblings == [(2, 3)] * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rollout with an answer"),
        ("{}\n", "line 1"),
        ("[1]\n", "line 1"),
        ("{", "line 1"),
        (b"\xff", "no text"),
        ("9" * 5000, "line 1"),
        ('{"task_id": ' + "[" * 100_000, "line 1"),
    ],
    ids=["empty", "no fields", "a list", "no JSON", "no text", "a long number", "deep"],
)
def test_what_is_no_rollouts_file_is_refused(text: str | bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=said):
        recorded_lengths(path, None, VOCAB, seed=0)


def test_groups_are_whole_and_lengths_fit() -> None:
    with pytest.raises(UserError, match=r"^workload 12x4\+4: 12 requests are no whole groups of 8; .* such as 16$"):
        fixed_lengths(Shape(12, 4, 4), 8, VOCAB, seed=0)
    check_positions(Shape(1, 24, 1000), 1024, "tiny")
    with pytest.raises(UserError, match="24 \\+ 1001 tokens and tiny has 1024 positions; shorten --prompt or --answer"):
        check_positions(Shape(1, 24, 1001), 1024, "tiny")


# --- what is measured ---------------------------------------------------------------------------------------


def test_an_unknown_model_comes_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'qwen3-8b'"):
        find_model("qwen3-8")


def test_precisions_alternate_and_leave_no_cache_behind() -> None:
    alive: list[int] = []

    def look(number: int, turn: bench_rollout.Turn) -> None:
        gc.collect()
        alive.append(sum(type(thing) is KVCache for thing in gc.get_objects()))

    gc.collect()
    before = sum(type(thing) is KVCache for thing in gc.get_objects())
    turns = measure(bench("bf16", "fp8_full", rounds=2), look)
    assert [turn.precision for turn in turns] == ["bf16", "fp8_full", "fp8_full", "bf16"], "forth and back"
    assert alive == [before] * 4
    assert all(turn.metrics.generated_tokens == 24 for turn in turns)
    for row in rows_of(turns):
        assert row["rounds"] == 2 and row["workload"] == "4x9+6"
        assert row["rollout/tokens_per_second_min"] <= row["rollout/tokens_per_second"]
        assert row["rollout/live_kv_tokens"] == SMALL.live_token_steps / 6 == 4 * (9 + 2.5)
        assert "rollout/floor_share" not in row, "the bandwidth model is of a GPU"


def test_the_engine_takes_prompts_in_the_chunks_that_were_asked_for() -> None:
    arm = build_arm(replace(bench("bf16"), prefill_chunk=16), "bf16", SMALL)
    assert arm.engine._prefill_chunk == 16
    assert build_arm(bench("bf16"), "bf16", SMALL).engine._prefill_chunk == 2048


def test_the_engine_reads_weights_in_their_format() -> None:
    spec = TINY.spec
    linears = spec.num_parameters - spec.vocab_size * spec.hidden_size
    linears -= (2 * spec.num_layers + 1) * spec.hidden_size + 2 * spec.num_layers * spec.head_size  # norms
    head = 2 * spec.vocab_size * spec.hidden_size
    scales = 4 * linears // 128**2  # every side of every linear of `tiny` is a multiple of 128
    plain, rollout_only, full = (build_arm(bench(name), name, SMALL) for name in ("bf16", "fp8_rollout", "fp8_full"))
    read = [weight_bytes(spec, arm.policy, rows=4) for arm in (plain, rollout_only, full)]
    assert read == [2 * linears + head] + 2 * [linears + scales + head]
    values = 2 * spec.num_layers * spec.num_kv_heads * spec.head_size
    assert (plain.kv_bytes_per_token, rollout_only.kv_bytes_per_token) == (2 * values, 2 * values)
    assert full.kv_bytes_per_token == values


def test_a_start_says_what_it_found_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    assert bench_rollout.cached_kernels() == 0
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name in ("A/_a.cubin", "A/_a.json", "B/_b.cubin", "C/launcher.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    turns: list[bench_rollout.Turn] = []

    def compile_one(number: int, turn: bench_rollout.Turn) -> None:
        turns.append(turn)
        (tmp_path / "C/_c.cubin").write_text("")

    rows = rows_of(measure(bench("bf16", "fp8"), compile_one))
    assert [turn.cached_kernels for turn in turns] == [(2, 2), (3, 3)]
    places = ("rollout/cached_kernels_before", "rollout/cached_kernels_after")
    assert [[row[place] for place in places] for row in rows] == [[2, 2], [3, 3]]


@dataclass(frozen=True)
class Said:
    """What the rows want to know of an engine."""

    tokens_per_second: float = 6.0
    seconds: float = 4.0
    generated_tokens: int = 24
    prefilled_tokens: int = 16
    kv_capacity_tokens: int = 1000
    batch_occupancy: float = 0.5
    preemptions: int = 0
    step_seconds: tuple[float, ...] = ()
    tail_share: float = 0.0
    session_capture_seconds: float | None = 0.5


def turn_of(said: Said, precision: str = "bf16", **fields: object) -> bench_rollout.Turn:
    turn = bench_rollout.Turn(precision, SMALL, said, 2.0, 0.5, 10**9, 1e6, 4, 10**10)  # type: ignore[arg-type]
    return replace(turn, **fields)


def test_the_bandwidth_model_is_the_formula() -> None:
    """24 tokens at half of 4 places are 12 steps; 4 siblings with 9 + 0..5 keys read 276 in all, 23 a step."""
    (row,) = rows_of([turn_of(Said())])
    step = (1e9 + 23 * 1e6) / MEMORY_BYTES_PER_SECOND
    assert row["rollout/live_kv_tokens"] == 23
    assert row["rollout/floor_step_ms"] == pytest.approx(step * 1e3)
    assert row["rollout/floor_tokens_per_second"] == pytest.approx(2 / step)
    assert row["rollout/floor_share"] == pytest.approx(12 * step / 4.0)
    assert row["memory/peak_gb"] == 10.0


def test_rows_are_medians_and_ratios() -> None:
    turns = [turn_of(Said(tokens_per_second=speed)) for speed in (5.0, 9.0, 6.0)]
    turns += [turn_of(Said(tokens_per_second=speed), "fp8_full") for speed in (12.0, 1.0, 13.0)]
    plain, full = rows_of(turns)
    assert (plain["rollout/tokens_per_second"], full["rollout/tokens_per_second"]) == (6.0, 12.0)
    assert (plain["rollout/speedup_over_bf16"], full["rollout/speedup_over_bf16"]) == (1.0, 2.0)
    assert "rollout/speedup_over_bf16" not in rows_of(turns[3:])[0]


def test_steps_are_shown_where_one_followed_another() -> None:
    first, second = Said(step_seconds=(0.010,) * 98, tail_share=0.2), Said(step_seconds=(0.5, 0.5), tail_share=0.4)
    (row,) = rows_of([turn_of(first), turn_of(second)])
    assert row["rollout/step_ms_p50"] == pytest.approx(10.0)
    assert 10.0 < float(row["rollout/step_ms_p99"]) <= 500.0
    assert row["rollout/tail_share"] == pytest.approx(0.3)
    (lonely,) = rows_of([turn_of(Said())])  # no decode forward followed another
    assert not {"rollout/step_ms_p50", "rollout/step_ms_p99"} & set(lonely)


# --- profile and record -------------------------------------------------------------------------------------


def test_kernels_and_the_time_between_them_are_the_whole_step() -> None:
    kernels = [("_a_kernel", 60, 300.0), ("void x::b<int>(int)", 30, 400.0), ("void x::b<float>(float)", 30, 200.0)]
    rows = kernel_rows(kernels, steps=30, seconds=1e-3)
    assert [row["kernel"] for row in rows] == ["b", "_a_kernel", BETWEEN_KERNELS]
    assert [row["calls_per_step"] for row in rows] == [2, 2, 0]
    assert [row["us_per_step"] for row in rows] == pytest.approx([20, 10, 100 / 30])
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_attention_paged_kernel", "_attention_paged_kernel"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>, std::array<char*, 1ul>>"
            "(int, at::native::FillFunctor<long>, std::array<char*, 1ul>)",
            "vectorized_elementwise_kernel<Fill>",
        ),
        ("void (anonymous namespace)::softmax_warp<float, 10>(float*)", "softmax_warp"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
    ],
)
def test_names_of_kernels_are_short(name: str, short: str) -> None:
    assert short_name(name) == short


@pytest.mark.parametrize("words", [["rollout", "--out", "a b", "--seed", "1"], ["rollout", "--out=a b", "--seed", "1"]])
def test_a_record_has_what_is_needed_to_judge_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTETRL_COMMIT", "abc123")
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/octetrl", "bench", *words])
    path = write_result("rollout", "tiny", [{"precision": "bf16", "workload": "w"}], tmp_path / "new", kernels=[])
    record = json.loads(path.read_text())
    assert path.name == "rollout_tiny.json"
    assert list(record) == [
        "bench",
        "commit",
        "source_digest",
        "date",
        "machine",
        "versions",
        "command",
        "rows",
        "kernels",
    ]
    assert record["source_digest"] == source_digest()
    assert (record["commit"], record["command"]) == ("abc123", "octetrl bench rollout --seed 1")
    assert record["rows"] == [{"precision": "bf16", "workload": "w"}] and record["kernels"] == []
