"""The doctor on a CPU: equal where parity is promised, and a fault planted in one op of one side is named exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octetrl.doctor.examine as doctor
import octetrl.engine.model_runner as model_runner
import octetrl.models.blocks.attention.module as attention
from octetrl.doctor.examine import Examination, ExaminedWorker, wake_branches
from octetrl.doctor.findings import Report, examine, first_difference, noted
from octetrl.doctor.passes import DrawnSequences, EngineLimits, Pass, PassPiece, engine_plans
from octetrl.doctor.taps import Fingerprints, Note, RolloutTap, Site, Tap, TrainingTap, fingerprint, sites_of
from octetrl.fp8.format import E4M3
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_packed import attention_packed_forward_reference
from octetrl.kernels.rows.silu_mul import silu_mul_reference
from octetrl.models import training_forward
from octetrl.models.blocks.attention import rollout as attention_rollout
from octetrl.models.blocks.attention import training as attention_training
from octetrl.models.blocks.mlp import rollout as mlp_rollout
from octetrl.models.blocks.mlp import training as mlp_training
from octetrl.models.decoder import Decoder
from tests.e2e import tiny_run

SMALL = Examination(prompts=2, sequences=2, answer_tokens=6)
PROMPT = "What is {} + 4 - 7 + 1 now?"  # a page of 16 tokens and a bit
SHORT = "{} + 4"  # enough for a fault that shows at every token


def subject(model: Path, precision: str, prompt: str = PROMPT, **changes: Any) -> ExaminedWorker:
    """Prompts are short: every token of theirs is a forward of the engine's, and each examination takes all ways."""
    tasks = model.parent / "tasks.jsonl"
    given = [{"prompt": prompt.format(number), "answer": str(number - 2)} for number in range(20)]
    tasks.write_text("".join(json.dumps(task) + "\n" for task in given))
    changes = {"precision": precision, **{name.replace("__", "."): value for name, value in changes.items()}}
    changes |= {"environment.dataset": str(tasks)}
    return ExaminedWorker(tiny_run.tiny_recipe(model, model.parent / "run", changes), SMALL)


def report_of(one: ExaminedWorker) -> Report:
    return examine(one).report


def one_ulp(x: Tensor, place: int = -1) -> Tensor:
    """`x` with one element moved to the next number: the last of its last row, or with 0 the first of its first."""
    x = x.detach().clone()
    element = x[(place,) * x.dim()]
    element.copy_(torch.nextafter(element, torch.full_like(element, torch.inf)))
    return x


def hook_one_ulp(module: nn.Module) -> None:
    module.register_forward_hook(lambda _module, _inputs, output: one_ulp(output))


# --- equal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("bf16", {}),
        ("fp8", {}),
        ("fp8_full", {}),
        ("fp8_full", {"fp8__kv_cache": "dynamic"}),
        ("fp8_full", {"engine__page_size": 128, "fp8__bf16_last_layers": 1, "rollout__temperature": 0.7}),
        ("bf16", {"engine__prefix_cache": "off", "model__dtype": "float32", "trainer__tokens_per_micro_batch": 60}),
    ],
)
def test_every_bit_is_equal(model: Path, precision: str, changes: dict[str, Any]) -> None:
    one = subject(model, precision, **changes)
    report = report_of(one)
    assert report.equal
    assert report.verdict.startswith("equal: every bit of") and report.verdict.endswith("24 sampled tokens")
    ways = [name for name, _ in report.passes]
    assert {"trainer, each alone", "engine, decode", "engine, chunked prefill", "engine, in another batch"} <= set(ways)
    assert "engine, prefix hit" in ways  # siblings share their prompt's pages, small ones if need be
    for decoder in (one.worker.trainer_model, one.worker.engine_model):  # nothing is left on the models
        for module in decoder.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
            assert not {"forward", "_attend_packed", "_attend_paged"} & module.__dict__.keys()
            assert getattr(module, "probe", None) is None
    assert all(parameter.grad is None for parameter in one.worker.trainer_model.parameters())


# --- a fault in one op of one side ----------------------------------------------------------------------------


Fault = Callable[[ExaminedWorker], None]


def ulp(side: str, name: str) -> Fault:
    return lambda one: hook_one_ulp(getattr(one.worker, f"{side}_model").get_submodule(name))


def no_fault(one: ExaminedWorker) -> None:
    """The recipe's formats differ."""


def wrong_scale(scale: int) -> Fault:
    def plant(one: ExaminedWorker) -> None:
        scales = one.worker.kv_scales
        assert scales is not None
        wrong_LS = scales.scale_LS.clone()
        wrong_LS[1, scale] *= 1.01
        one.worker.kv_scales = replace(scales, scale_LS=wrong_LS)

    return plant


def one_code_of_one_weight(one: ExaminedWorker) -> None:
    linear: Any = one.worker.engine_model.get_submodule("layers.1.attention.o_proj")
    codes = linear.codes.clone()
    codes.view(torch.uint8)[5, 7] ^= 8
    assert codes.dtype == E4M3
    linear.codes = codes


def other_rows_of_the_lm_head(one: ExaminedWorker) -> None:
    head: Any = one.worker.engine_model.lm_head
    weight = head.weight.detach().clone()
    weight[[7, 9]] *= 2
    head._parameters["weight"] = nn.Parameter(weight)


@pytest.mark.parametrize(
    ("precision", "plant", "site", "element"),
    [
        ("bf16", ulp("trainer", "layers.1.attention_norm"), Site(1, "norm"), None),
        ("bf16", ulp("engine", "layers.1.attention.qkv_proj"), Site(1, "qkv_proj"), None),
        ("bf16", ulp("engine", "layers.1.attention.k_norm"), Site(1, "rotated k"), None),
        ("bf16", ulp("trainer", "layers.1.attention.o_proj"), Site(1, "o_proj"), None),
        ("bf16", ulp("trainer", "layers.1.mlp.gate_up_proj"), Site(1, "gate_up_proj"), None),
        ("bf16", ulp("engine", "layers.1.mlp.down_proj"), Site(1, "down_proj"), None),
        ("bf16", ulp("trainer", "layers.1"), Site(1, "residual after MLP"), None),
        ("bf16", ulp("engine", "norm"), Site(None, "final norm"), None),
        ("bf16", ulp("trainer", "embedding"), Site(None, "embedding"), None),
        ("bf16", other_rows_of_the_lm_head, Site(None, "logits"), 7),
        ("fp8", one_code_of_one_weight, Site(1, "o_proj"), 5),
        ("fp8_full", wrong_scale(1), Site(1, "k as cached"), 1),  # the head
        ("fp8_full", wrong_scale(3), Site(1, "v as cached"), 1),
        ("fp8_rollout", no_fault, Site(0, "qkv_proj"), None),
        ("no replay", no_fault, Site(0, "k as cached"), None),
    ],
)
def test_a_fault_in_one_op_of_one_side_is_named(
    model: Path, precision: str, plant: Fault, site: Site, element: int | None
) -> None:
    changes = {"fp8__kv_replay": False} if precision == "no replay" else {}
    one = subject(model, "fp8_full" if changes else precision, SHORT, **changes)
    plant(one)
    first = report_of(one).first
    assert first is not None and first.site == site
    assert element in (None, first.element[0])
    assert precision != "bf16" or element or abs(first.values[0] - first.values[1]) < 0.05 * max(map(abs, first.values))


def test_where_and_what_is_told(model: Path) -> None:
    one = subject(model, "fp8_full")
    hook_one_ulp(one.worker.trainer_model.get_submodule("layers.0.mlp.down_proj"))
    report = report_of(one)
    first = report.first
    assert first is not None and not report.equal
    assert (first.shape, first.element) == ((64,), (63,))
    assert (first.reference, first.other) == ("trainer, packed", "trainer, each alone")
    assert first.num_elements == first.num_rows == 3  # each alone touches every last token; packed, that of the last
    later = replace(first, place=first.place + 1)
    assert replace(report, passes=(("one", later), ("other", first), ("third", later))).first is first
    assert "element [63]" in report.verdict and f"token {first.token}" in report.verdict
    assert report.verdict.startswith("first difference: layer 0, down_proj: 3 of ")


def test_an_attention_kernel_that_is_an_ulp_off(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = attention.attention_paged
    monkeypatch.setattr(attention, "attention_paged", lambda *args, **kwargs: one_ulp(kernel(*args, **kwargs)))
    first = report_of(subject(model, "fp8_full", SHORT)).first
    assert first is not None
    assert (first.site, first.other) == (Site(0, "attention out"), "engine, decode")
    assert first.shape == (4, 16)


def test_a_branch_that_adds_nothing_yet_hides_nothing(model: Path) -> None:
    """B is zero before the first step. Small numbers stand in for it, so a wrong branch of one side shows."""
    one = subject(model, "fp8_full", SHORT, model__lora={})
    assert one.woke_branches and "every adapter's B is zero" in str(one)
    assert report_of(one).equal
    for _, adapter in one.worker.engine_model.adapters():
        adapter.scale *= 10
    first = report_of(one).first
    assert first is not None and first.site == Site(0, "qkv_proj")


def test_a_branch_that_was_trained_stays_as_it_is(model: Path) -> None:
    adapters = subject(model, "bf16", model__lora={}).worker.trainer_model
    assert not wake_branches(adapters, seed=1)
    assert not wake_branches(subject(model, "bf16").worker.trainer_model, seed=1), "a model without adapters"


# --- ends -----------------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_follow_its_forward(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = model_runner.logprobs_alone
    monkeypatch.setattr(model_runner, "logprobs_alone", lambda *args: one_ulp(own(*args)))
    report = report_of(subject(model, "fp8_full", SHORT))
    assert report.first is None and not report.equal
    assert all(name.startswith("engine") for name in report.off_forwards)
    assert "the engine side does not follow" in report.verdict and "captured graphs" in report.verdict


def test_a_trainer_that_does_not_follow_its_forward(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = subject(model, "fp8_full", SHORT)
    own = one.worker.trainer.forward.logprobs_of

    def off(*args: Any) -> tuple[Tensor, Tensor]:
        logprobs_N, entropy_N = own(*args)
        return one_ulp(logprobs_N).requires_grad_(), entropy_N

    monkeypatch.setattr(one.worker.trainer.forward, "logprobs_of", off)
    report = report_of(one)
    assert report.first is None and not report.equal
    assert all(name.startswith("trainer") for name in report.off_forwards)
    assert "the trainer side does not follow" in report.verdict
    different = dict(report.ends)["trainer, packed"]
    assert different is not None and different.num_logprobs == 1


# --- parts ----------------------------------------------------------------------------------------------------


def test_a_fingerprint_feels_any_one_bit() -> None:
    x = torch.randn(40, 33).to(torch.bfloat16)
    before = fingerprint(x)
    for row in range(40):
        changed = x.clone()
        changed.view(torch.int16)[row, (7 * row) % 33] ^= 1 << (row % 16)
        assert (fingerprint(changed) != before).nonzero().flatten().tolist() == [row]
    assert torch.equal(fingerprint(x.view(40, 11, 3)), before)
    assert not torch.equal(fingerprint(x.roll(1, dims=1)), before)


def test_an_op_that_does_not_repeat_its_bits_is_called_so(model: Path) -> None:
    drawn = DrawnSequences(((5, 6, 7),), (1,), torch.device("cpu"))
    calls: list[float] = [1.0]

    def once(note: Note) -> None:
        note(Site(0, "norm"), torch.arange(3), torch.full((3, 2), calls.pop() if calls else 0.0))

    def always(note: Note) -> None:
        note(Site(0, "norm"), torch.arange(3), torch.zeros(3, 2))

    passes = Pass("trainer", "packed", always), Pass("engine", "decode", once)
    prints: list[Fingerprints] = [noted(one, drawn) for one in passes]
    found = first_difference(*passes, *prints, subject(model, "bf16"), drawn)
    assert found is not None and "does not repeat its bits" in str(found)


@pytest.mark.parametrize("page_size", [16, 128])
def test_plans_compute_every_token_but_the_last_in_order(page_size: int) -> None:
    prompt = tuple(range(40))
    drawn = DrawnSequences(((*prompt, 1, 2, 3, 4), (*prompt, 5, 6), (9, 8, 7)), (40, 40, 1), torch.device("cpu"))
    plans = engine_plans(drawn, EngineLimits(page_size, prefill_chunk=16, max_batch=2))
    ways = [plan.way for plan in plans]
    assert ways == ["decode", "chunked prefill", "prefix hit", "in another batch"]
    for plan in plans:
        done = [0, 0, 0]
        if plan.way == "prefix hit":
            assert plan.page_size == 16 and plan.tables[1][:2] == plan.tables[0][:2]
            done[1] = 32
        for piece in (piece for forward in plan.forwards for piece in forward):
            assert piece.start == done[piece.sequence] < piece.stop
            done[piece.sequence] = piece.stop
        assert done == [43, 41, 2]
        pages = [page for b, table in enumerate(plan.tables) for page in table[2 * (b == 1 and plan.way == ways[2]) :]]
        assert len(pages) == len(set(pages))
    assert (PassPiece(2, 0, 1),) in plans[0].forwards  # two decode together at most


# ---------------------------------------------------------------- the fused forwards


QUANTISED = [
    Site(layer, f"{op}, quantised") for layer in range(2) for op in ("norm", "attention out", "MLP norm", "SiLU")
]
FUSED_PRECISIONS = [("bf16", {}), ("fp8", {}), ("fp8_full", {}), ("fp8_full", {"fp8__kv_cache": "dynamic"})]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor takes the fused forwards, and kernels that have no CPU form are their references."""

    def trainer_tap(decoder: Decoder, keep: training_forward.Keep, note: Note) -> Tap:
        return TrainingTap(decoder, note, partial(training_forward._run_layer, keep="layer"))

    monkeypatch.setattr(doctor, "engine_tap", RolloutTap)
    monkeypatch.setattr(doctor, "trainer_tap", trainer_tap)
    monkeypatch.setattr(attention_training, "attention_packed_forward_triton", attention_packed_forward_reference)
    monkeypatch.setattr(mlp_training, "silu_mul_triton", silu_mul_reference)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(("precision", "changes"), FUSED_PRECISIONS)
def test_they_tell_what_modules_tell(model: Path, precision: str, changes: dict[str, Any]) -> None:
    one = subject(model, precision, **changes)
    sequences = one.sequences(one.engine_ends()[1])
    modules = noted(one.module_pass(sequences), sequences)
    for each in one.passes(sequences):
        told: Fingerprints = noted(each, sequences)
        common = [site for site in sites_of(one.spec) if site in told.bits_R and site in modules.bits_R]
        assert not [site for site in common if told.differing_rows(modules, site).numel()]
        names = {site.op for site in common}
        assert {"qkv_proj", "rotated q", "k as cached", "v as cached", "o_proj", "residual", "gate_up_proj"} <= names
        assert {"embedding", "down_proj", "residual after MLP", "final norm", "logits", "log-prob"} <= names
        plain = {"norm", "attention out", "MLP norm", "SiLU"}
        assert plain <= names if precision == "bf16" else set(QUANTISED) <= set(told.bits_R)


@pytest.mark.usefixtures("on_a_gpu")
def test_both_fused_forwards_are_equal_and_all_is_put_back(model: Path) -> None:
    one = subject(model, "fp8_full")
    assert examine(one).report.equal
    for decoder in (one.worker.trainer_model, one.worker.engine_model):
        assert all(getattr(module, "probe", None) is None for module in decoder.modules())


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("namespace", "kernel", "site", "side"),
    [
        (attention_rollout, "project", Site(0, "qkv_proj"), "engine"),
        (attention_training, "product", Site(0, "qkv_proj"), "trainer"),
        (attention_rollout, "qkv_store", Site(0, "rotated q"), "engine"),
        (mlp_training, "silu_mul_quantize", Site(0, "SiLU, quantised"), "trainer"),
        (mlp_rollout, "silu_mul_quantize", Site(0, "SiLU, quantised"), None),  # the modules have no such tensor
    ],
)
def test_a_kernel_that_is_an_ulp_off(
    model: Path, monkeypatch: pytest.MonkeyPatch, namespace: Any, kernel: str, site: Site, side: str | None
) -> None:
    own = getattr(namespace, kernel)

    def off(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        return made._replace(scale=one_ulp(made.scale, 0)) if isinstance(made, Quantized) else one_ulp(made, 0)

    monkeypatch.setattr(namespace, kernel, off)
    report = examine(subject(model, "fp8_full", SHORT)).report
    assert report.first is not None
    assert (report.first.site, report.at_fault) == (site, side)
