"""`octetrl bench train`: full micro-batches, FLOPs by the formula, turns in alternation, the trainer's own gradient."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octetrl.bench.hardware import BF16_FLOPS
from octetrl.bench.mix import Mix, draw_work
from octetrl.bench.model import find_model
from octetrl.bench.parts import GAPS, Kernel, Trace
from octetrl.bench.train import (
    StepTime,
    TrainBench,
    TrainTurn,
    build_trainer,
    check_memory,
    estimate_bytes,
    measure,
    model_flops,
    profile_rows,
    rows_of,
)
from octetrl.bench.turns import compared, in_turn
from octetrl.bench.workload import LengthRange
from octetrl.config.schema import Fp8Config, TrainerConfig
from octetrl.fp8.policy import precision_policy
from octetrl.system.errors import UserError
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.without_update import accumulate_gradients

TINY = find_model("tiny")
CPU = torch.device("cpu")


def bench(*precisions: str, rounds: int = 1) -> TrainBench:
    trainer = TrainerConfig(tokens_per_micro_batch=48)
    return TrainBench(TINY, precisions, Mix(LengthRange(5, 20)), trainer, CPU, micro_batches=2, rounds=rounds, steps=1)


# --- what is trained on -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix", [Mix(LengthRange(16, 16)), Mix(LengthRange(2, 90)), Mix(None, mean=40, sigma=1.5), Mix(LengthRange(99, 99))]
)
@pytest.mark.parametrize("tokens", [65, 64, 200, 17])
def test_a_micro_batch_is_full_to_the_last_token(mix: Mix, tokens: int) -> None:
    for seed in range(20):
        lengths = mix.draw(random.Random(seed), tokens, max_positions=64)
        assert sum(lengths) == tokens
        assert all(2 <= length <= 64 for length in lengths)


def test_lognormal_lengths_have_their_mean() -> None:
    lengths = Mix(None, mean=300, sigma=0.7).draw(random.Random(0), 1_000_000, max_positions=100_000)
    assert sum(lengths) / len(lengths) == pytest.approx(300, rel=0.05)


def test_work_is_the_same_for_every_layout_and_trains_on_its_share() -> None:
    for padded in (False, True):
        layout = PackingLayout(tokens_per_micro_batch=80, padded_attention=padded)
        work = draw_work(Mix(LengthRange(20, 20)), 3, 0.75, layout, TINY.spec, seed=5)
        (micro_batches,) = work.batch.minibatches
        assert [one.token_ids_T.numel() for one in micro_batches] == [80] * 3
        assert (work.tokens, work.trained_tokens, work.lengths) == (240, 180, (20,) * 12)
        assert work.batch.loss_denominators == (180.0,)
        assert all(one.advantages_N.unique().numel() == 4 for one in micro_batches)
        assert min(int(one.target_positions_N.min()) for one in micro_batches) == 5


def test_arms_are_compared_with_their_like() -> None:
    ratios = {"bf16": {"speedup_over_bf16": 1.0}, "fp8": {"speedup_over_bf16": 2.0}}
    assert compared({"bf16": 2.0, "fp8": 4.0}) == ratios
    assert compared({"fp8": 4.0}) == {"fp8": {}}


def test_a_sequence_that_is_all_trained_keeps_its_first_token() -> None:
    work = draw_work(Mix(LengthRange(8, 8)), 1, 1.0, PackingLayout(16), TINY.spec, seed=0)
    assert work.trained_tokens == 14


# --- what is measured ---------------------------------------------------------------------------------------


def test_even_rounds_take_the_arms_in_the_other_order() -> None:
    assert "".join(arm for _, arm in in_turn("abc", 3)) == "abccbaabc"
    assert [number for number, _ in in_turn("ab", 2)] == [1, 1, 2, 2]
    arms = (name for name in "ab")  # read once
    assert list(in_turn(arms, 2)) == [(1, "a"), (1, "b"), (2, "b"), (2, "a")]


def test_flops_are_those_of_a_count_by_hand() -> None:
    """tiny: E 128, F 512, 4 query and 2 kv heads of 32, 4 layers, V 384. One sequence of 3 tokens, 2 trained."""
    linears = 128 * (4 + 2 + 2) * 32 + 4 * 32 * 128 + 128 * 2 * 512 + 512 * 128  # of one layer
    forward = 2 * 4 * linears * 3
    attention = 4 * sum(2 * keys * 128 + 2 * keys * 128 for keys in (1, 2, 3))  # QK^T, then P V, 128 = heads * size
    head = 2 * 384 * 128 * 2
    assert model_flops(TINY.spec, [3], 2) == 3 * forward + 3 * head + 3.5 * attention == 18_327_552
    assert model_flops(TINY.spec, [3, 3], 4) == 2 * 18_327_552


def test_flops_of_a_mixture_count_the_experts_of_a_token_and_of_mla_every_heads_keys() -> None:
    """tiny-mla-moe: the first of 4 layers is dense; 2 of 8 experts, one shared, of 256; 4 heads of 64 + 16, values 32;
    latents of 64. One sequence of 3 tokens, none trained."""
    attention = 128 * 64 + 64 * 4 * 80 + 128 * (64 + 16) + 64 * 4 * (64 + 32) + 4 * 32 * 128
    experts = 8 * 128 + (2 + 1) * 3 * 128 * 256
    weights = 4 * attention + 3 * 128 * 512 + 3 * experts
    forward, backward = 80 + 32, 80 + 32 + 32 + 80 + 80  # a pair of one head: scores, values; again, and dP, dV, dQ, dK
    pairs = (1 + 2 + 3) * 4 * 4
    assert model_flops(find_model("tiny-mla-moe").spec, [3], 0) == 6 * 3 * weights + 2 * pairs * (forward + backward)


def test_precisions_alternate_and_learn_the_same() -> None:
    said: list[tuple[int, str]] = []
    plan = bench("bf16", "fp8", "fp8_full", rounds=2)
    turns = measure(plan, lambda number, turn: said.append((number, turn.precision)))
    names = ["bf16", "fp8", "fp8_full"]
    assert said == [(1, name) for name in names] + [(2, name) for name in reversed(names)]
    assert [turn.loss for turn in turns[:3]] == [turn.loss for turn in reversed(turns[3:])]
    assert turns[0].loss == pytest.approx(turns[1].loss, abs=0.05) and turns[0].loss != turns[1].loss
    rows = rows_of(plan, turns)
    assert [row["precision"] for row in rows] == ["bf16", "fp8", "fp8_full"]
    for row in rows:
        assert row["train/tokens"] == 96 and row["steps"] == 2 and row["train/optimizer_ms"]
        assert float(row["train/tokens_per_second_min"]) <= float(row["train/tokens_per_second"])
        assert "train/ceiling_share" not in row and "memory/peak_gb" not in row, "a CPU has neither"


def test_accumulating_is_training_without_the_update() -> None:
    plan = replace(bench("fp8"), steps=1)
    once, other = build_trainer(plan, "fp8"), build_trainer(plan, "fp8")
    work = draw_work(plan.mix, 2, 0.75, once.layout, TINY.spec, seed=1)
    before = once.model.lm_head_weight.clone()
    loss, amax_LS = accumulate_gradients(once, work.batch, KVReplay())
    assert torch.equal(once.model.lm_head_weight, before) and once.policy_version == 0
    assert amax_LS is None
    update = other.train(work.batch, KVReplay(), None)
    assert float(loss) == update.metrics["loss"]
    assert float(once.optimizer.clip_gradients()) == update.metrics["grad_norm"] > 0
    accumulate_gradients(once, work.batch, KVReplay())
    assert float(once.optimizer.clip_gradients()) == pytest.approx(2 * update.metrics["grad_norm"], rel=1e-5)


def test_observing_where_the_trainer_would() -> None:
    trainer = build_trainer(bench("fp8_full"), "fp8_full")
    work = draw_work(Mix(LengthRange(8, 8)), 1, 0.75, PackingLayout(16), TINY.spec, seed=0)
    _, amax_LS = accumulate_gradients(trainer, work.batch, KVReplay(), collect_kv_amax=True)
    assert amax_LS is not None and bool((amax_LS > 0).all())
    assert accumulate_gradients(trainer, work.batch, KVReplay())[1] is None


def test_without_an_optimizer_nothing_is_updated() -> None:
    plan = replace(bench("bf16"), optimizer=False, steps=2)
    (turn,) = measure(plan)
    assert [step.optimizer for step in turn.steps] == [None, None]
    (row,) = rows_of(plan, [turn])
    assert "train/optimizer_ms" not in row
    policy = build_trainer(plan, "bf16").model.policy
    saved = estimate_bytes(bench("bf16"), policy) - estimate_bytes(plan, policy)
    assert saved == (4 + 12 - 2) * TINY.spec.num_parameters


def test_the_estimate_counts_codes_of_what_is_trained_in_fp8() -> None:
    from octetrl.config.load import PRECISIONS
    from octetrl.config.schema import Fp8Config

    gpu = replace(bench("bf16"), device=torch.device("cuda"))  # nothing is put there
    plain, rollout, fp8 = (
        estimate_bytes(gpu, precision_policy(TINY.spec, Fp8Config(**PRECISIONS[name])))
        for name in ("bf16", "fp8_rollout", "fp8")
    )
    assert plain == rollout < fp8, "codes that only an engine reads are not the trainer's"


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, num_bytes: int, **trainer: object) -> TrainBench:
    """A bench of qwen3-8b for a GPU of so much memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (num_bytes, num_bytes))
    config = TrainerConfig.model_validate(trainer)
    mix = Mix(LengthRange(4096, 4096))
    return TrainBench(find_model("qwen3-8b"), ("bf16", "fp8"), mix, config, torch.device("cuda"))


def test_what_would_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = on_a_gpu(monkeypatch, 150_700_000_000)
    with pytest.raises(UserError) as refused:
        check_memory(plan)
    assert str(refused.value) == (
        "--precision: bf16 takes about 158 GB and the GPU has 151; take --optimizer-states 8bit"
        " --master stochastic_rounding, add --offload, leave the update out with --no-optimizer, or lower --tokens or"
        " --layers"
    )
    for fits in (
        {"optimizer": {"states": "8bit", "master": "stochastic_rounding"}},
        {"optimizer": {"offload": True}},
    ):
        check_memory(on_a_gpu(monkeypatch, 150_700_000_000, **fits))
    check_memory(replace(plan, optimizer=False))


def test_on_a_cpu_the_limit_is_the_available_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = on_a_gpu(monkeypatch, 10**9)
    plan = replace(on_gpu, device=CPU, precisions=("fp8",))
    policy = precision_policy(plan.model.spec, Fp8Config(train=True))
    needed = estimate_bytes(plan, policy)
    assert needed > 1.2 * estimate_bytes(on_gpu, policy), "emulation keeps values in float64"
    monkeypatch.setattr("octetrl.bench.memory.available_host_bytes", lambda: needed)
    check_memory(plan)
    monkeypatch.setattr("octetrl.bench.memory.available_host_bytes", lambda: 10**9)
    with pytest.raises(
        UserError, match=r"fp8 takes about \d+ GB and this machine has 1 available; use a GPU, leave the"
    ):
        check_memory(plan)


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"optimizer": {"states": "8bit"}}, "; take --master stochastic_rounding, add --offload,"),
        ({"optimizer": {"offload": True}, "activation_checkpointing": "none"}, "; take --checkpointing layer, leave"),
        ({"optimizer": {"offload": True}, "checkpointed_layers": 3}, "; take --checkpointing layer, leave"),
        ({"optimizer": {"offload": True}}, "; leave the update out with --no-optimizer, or lower"),
    ],
)
def test_a_remedy_already_taken_is_not_named(
    trainer: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"bf16 takes about .* and the GPU has 10; ") as refused:
        check_memory(on_a_gpu(monkeypatch, 10**10, **trainer))
    assert said in str(refused.value)
    plan = replace(on_a_gpu(monkeypatch, 10**10), optimizer=False)
    with pytest.raises(UserError, match=r"has 10; lower --tokens or --layers$"):
        check_memory(plan)
    with pytest.raises(UserError, match=r"has 10; lower --tokens$"):  # a folder's layers are all there
        check_memory(replace(plan, model=replace(plan.model, folder=Path("model"))))


def test_codes_that_are_remade_are_a_remedy_in_fp8_and_then_take_what_bf16_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = replace(on_a_gpu(monkeypatch, 10**10), precisions=("fp8",))
    with pytest.raises(UserError, match=r"take --optimizer-states 8bit .* --weight-codes remade, add --offload"):
        check_memory(kept)
    remade = replace(on_a_gpu(monkeypatch, 10**10, weight_codes="remade"), precisions=("fp8",))
    with pytest.raises(UserError, match=r"take --optimizer-states 8bit --master stochastic_rounding, add --offload"):
        check_memory(remade)
    spec = remade.model.spec
    kept_fp8, fp8, bf16 = (
        estimate_bytes(plan, precision_policy(spec, Fp8Config(train=in_fp8)))
        for plan, in_fp8 in ((kept, True), (remade, True), (remade, False))
    )
    linears = 6_945_767_424
    assert kept_fp8 - fp8 == pytest.approx(2 * linears, rel=0.01)
    assert fp8 - bf16 == pytest.approx(0, abs=0.001 * bf16), "scales, and the codes of one weight"


# --- from turns to rows -------------------------------------------------------------------------------------


def turn_of(seconds: tuple[float, ...], precision: str = "bf16", trace: Trace | None = None) -> TrainTurn:
    work = draw_work(Mix(LengthRange(16, 16)), 1, 0.75, PackingLayout(32), TINY.spec, seed=0)
    steps = tuple(StepTime(one, 0.25, 0.125) for one in seconds)
    return TrainTurn(precision, steps, work, 0.5, 1.0, 3 * 10**9, 2 * 10**9, trace)


def test_rows_are_medians_ratios_and_shares_of_the_ceiling() -> None:
    plan = bench("bf16", "fp8")
    turns = [turn_of((4.0, 1.0)), replace(turn_of((2.0,)), peak_bytes=5 * 10**9), turn_of((1.0,), "fp8")]
    plain, fp8 = rows_of(plan, turns)
    assert (plain["train/tokens_per_second"], fp8["train/tokens_per_second"]) == (16.0, 32.0)
    assert (plain["train/speedup_over_bf16"], fp8["train/speedup_over_bf16"]) == (1.0, 2.0)
    flops = model_flops(TINY.spec, [16, 16], 24)
    assert plain["train/tflops"] == pytest.approx(flops / 2 / 1e12)
    assert plain["train/ceiling_share"] == pytest.approx(flops / 2 / BF16_FLOPS)
    assert (plain["memory/peak_gb"], plain["memory/estimate_gb"]) == (5.0, 3.0)
    assert (plain["train/optimizer_ms"], plain["train/requantize_ms"]) == (250.0, 125.0)
    assert plain["train/whole_tokens_per_second"] == pytest.approx(32 / (2.0 + 0.25 + 0.125))
    assert "train/speedup_over_bf16" not in rows_of(plan, turns[2:])[0]


@pytest.mark.parametrize(
    ("mode", "given", "layers"), [("none", None, 0), ("layer", None, 4), ("attention", 3, 3), ("layer", 0, 0)]
)
def test_a_row_says_how_the_trainer_was(mode: str, given: int | None, layers: int) -> None:
    trainer = TrainerConfig.model_validate({"activation_checkpointing": mode, "checkpointed_layers": given})
    plan = replace(bench("bf16"), trainer=trainer)
    (row,) = rows_of(plan, [turn_of((1.0,))])
    assert (row["train/checkpointing"], row["train/checkpointed_layers"]) == (mode, layers)
    assert (row["train/optimizer_states"], row["train/master"]) == ("float32", "float32")
    assert "train/master" not in rows_of(replace(plan, optimizer=False), [turn_of((1.0,))])[0]


def test_the_time_table_is_of_the_unprofiled_wall_time() -> None:
    trace = Trace((), {}, (Kernel("_adamw_kernel", None, 0.0, 1e6),))  # of two steps
    parts, kernels = profile_rows([turn_of((1.0,)), turn_of((1.0, 2.0, 0.625), "fp8", trace=trace)])
    assert [(row["precision"], row["part"], row["ms_per_step"]) for row in parts] == [
        ("fp8", "optimizer", 500.0),
        ("fp8", GAPS, 875.0),
    ]
    assert math.isclose(sum(float(row["share"]) for row in parts), 1.0)
    assert [row["kernel"] for row in kernels] == ["_adamw_kernel"]
