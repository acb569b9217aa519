"""The taps on the fused forwards, on a CPU through the kernels' references: they pass every op, and the bits they tell
are those of the modules; a fault inside is named."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import octetrl.doctor.examine as doctor
from octetrl.doctor.findings import examine, noted
from octetrl.doctor.taps import Fingerprints, Note, RolloutTap, Site, Tap, TrainingTap, sites_of
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_packed import attention_packed_forward_reference
from octetrl.kernels.rows.silu_mul import silu_mul_reference
from octetrl.models import training_forward
from octetrl.models.blocks.attention import rollout as attention_rollout
from octetrl.models.blocks.attention import training as attention_training
from octetrl.models.blocks.mlp import rollout as mlp_rollout
from octetrl.models.blocks.mlp import training as mlp_training
from octetrl.models.decoder import Decoder
from tests.unit.doctor.test_examine import SHORT, one_ulp, subject

QUANTISED = [
    Site(layer, f"{op}, quantised") for layer in range(2) for op in ("norm", "attention out", "MLP norm", "SiLU")
]
PRECISIONS = [("bf16", {}), ("fp8", {}), ("fp8_full", {}), ("fp8_full", {"fp8__kv_cache": "dynamic"})]


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
@pytest.mark.parametrize(("precision", "changes"), PRECISIONS)
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
