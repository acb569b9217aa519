"""Shares of the mismatch: they sum to the whole, and a fault planted in one kind of tensor is charged to that kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octetrl.doctor.attribution import Attribution, Sides, attribute, mismatch_between, shapley
from octetrl.doctor.examine import ExaminedWorker
from octetrl.doctor.findings import examine, forward_logprobs
from octetrl.shapes.presets import preset_config
from tests.e2e import tiny_run
from tests.unit.doctor import test_examine
from tests.unit.doctor.test_examine import hook_one_ulp

FEW = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 32}
SMALL_EXPERTS = preset_config("tiny-moe") | tiny_run.SHAPE | FEW
del SMALL_EXPERTS["eos_token_id"]


def subject(model: Path, precision: str, **changes: Any) -> ExaminedWorker:
    """A few tokens of each prompt: what is attributed are the log-probs of the answers."""
    return test_examine.subject(model, precision, test_examine.SHORT, **changes)


def attribution_of(one: ExaminedWorker) -> Attribution:
    return attribute(examine(one))


def shares_of(found: Attribution) -> dict[str, float]:
    """Shares of the mean difference, which with the rest are the whole, as those of gen_kl are."""
    for which in ("mean_abs", "gen_kl"):
        whole = sum(getattr(share, f"of_{which}") for share in found.shares) + getattr(found.rest, which)
        assert whole == pytest.approx(1.0, abs=1e-9)
    return {share.kind: share.of_mean_abs for share in found.shares}


@pytest.mark.parametrize(
    ("precision", "changes", "kinds"),
    [
        ("fp8_rollout", {"fp8__bf16_first_layers": 1}, ["weights", "activations"]),
        ("fp8_full", {"fp8__kv_replay": False}, ["K", "V"]),
        ("fp8_full", {"fp8__kv_replay": False, "fp8__kv_cache": "dynamic"}, ["K", "V"]),
        (
            "fp8_full",
            {"fp8__kv_replay": False, "fp8__kv_cache_tensors": "k", "fp8__train": False},
            ["weights", "activations", "K"],
        ),
        ("fp8_full", {"fp8__train": False, "fp8__kv_replay": False}, ["weights", "activations", "K", "V"]),
    ],
)
def test_formats_that_differ_explain_all(
    model: Path, precision: str, changes: dict[str, Any], kinds: list[str]
) -> None:
    found = attribution_of(subject(model, precision, **changes))
    shares = shares_of(found)
    assert list(shares) == kinds
    assert all(0.02 < share < 0.98 for share in shares.values())
    assert found.rest == (0.0, 0.0)  # with everything moved, the trainer has the engine's bits
    assert found.mismatch.mean_abs > 0


def test_experts_are_linears_like_others(tmp_path: Path) -> None:
    """With everything moved the trainer has the engine's bits; a fault in a router is named."""
    folder = tiny_run.make_model(tmp_path / "moe", **SMALL_EXPERTS)
    found = attribution_of(subject(folder, "fp8_rollout"))
    assert list(shares_of(found)) == ["weights", "activations"]
    assert found.rest == (0.0, 0.0)
    one = subject(folder, "bf16")
    hook_one_ulp(one.worker.engine_model.get_submodule("layers.1.mlp.gate"))
    assert "layer 1, router logits" in examine(one).report.verdict


def test_nothing_to_attribute(model: Path) -> None:
    found = attribution_of(subject(model, "fp8_full"))
    assert found.lines() == ["nothing to attribute: every log-prob is equal"]
    assert not found.shares


def test_models_without_qk_norm_keep_k(tmp_path: Path) -> None:
    qwen2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    model = tiny_run.make_model(tmp_path / "qwen2", num_hidden_layers=2, **qwen2)
    shares = shares_of(attribution_of(subject(model, "fp8_full", fp8__kv_replay=False)))
    assert list(shares) == ["V"]
    assert shares["V"] == 1.0


def test_each_kind_moves_alone(model: Path) -> None:
    """Each brings log-probs of its own, and moved away again the trainer has its bits back."""
    examined = examine(subject(model, "fp8_full", fp8__train=False, fp8__kv_replay=False))
    sides, modules = Sides(examined), examined.subject.module_pass(examined.sequences)

    def moved(*kinds: str) -> torch.Tensor:
        with sides.swapped(frozenset(kinds)):
            return forward_logprobs(modules, examined.sequences)

    own_N = moved()
    alone = [moved(kind) for kind in ("weights", "activations", "K", "V")]
    for first, logprobs_N in enumerate(alone):
        assert 1e-4 < float((logprobs_N - own_N).abs().mean()) < 0.1
        assert not any(torch.equal(logprobs_N, other_N) for other_N in alone[:first])
    assert torch.equal(moved("weights", "activations", "K", "V"), examined.engine_logprobs_N)
    assert torch.equal(moved(), own_N)


# --- planted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kind"), [((0, 1), "K"), ((2, 3), "V")])
def test_wrong_scales(model: Path, heads: tuple[int, ...], kind: str) -> None:
    one = subject(model, "fp8_full")
    scales = one.worker.kv_scales
    assert scales is not None
    wrong_LS = scales.scale_LS.clone()
    wrong_LS[:, heads] *= 1.5
    one.worker.kv_scales = replace(scales, scale_LS=wrong_LS)
    found = attribution_of(one)
    assert shares_of(found) == {kind: 1.0}
    assert found.shares[0].engine == "FP8, calibrated, other scales"


@pytest.mark.parametrize("tied", [True, False])
def test_another_lm_head(model: Path, tmp_path: Path, tied: bool) -> None:
    one = subject(tiny_run.make_model(tmp_path / "tied", num_hidden_layers=2) if tied else model, "bf16")
    engine: Any = one.worker.engine_model
    weight = nn.Parameter(engine.lm_head_weight.detach() * torch.linspace(0.5, 1.5, 320).to(torch.bfloat16)[:, None])
    (engine.embedding if tied else engine.lm_head)._parameters["weight"] = weight
    found = attribution_of(one)
    shares = shares_of(found)
    assert list(shares) == (["lm_head", "norms, embedding"] if tied else ["lm_head"])
    assert shares["lm_head"] > 0.5
    assert found.rest == (0.0, 0.0)


def test_another_norm_and_another_linear(model: Path) -> None:
    one = subject(model, "bf16")
    engine: Any = one.worker.engine_model
    engine.norm._parameters["weight"] = nn.Parameter(engine.norm.weight.detach() * 1.25)
    down = engine.layers[1].mlp.down_proj
    down._parameters["weight"] = nn.Parameter(down.weight.detach() * 1.02)
    found = attribution_of(one)
    shares = shares_of(found)
    assert list(shares) == ["weights", "norms, embedding"]
    assert shares["norms, embedding"] > 0.7
    assert found.rest == (0.0, 0.0)


def test_an_op_that_differs_is_the_rest(model: Path) -> None:
    one = subject(model, "fp8_rollout")
    for layer in one.worker.engine_model.decoder_layers():
        layer.mlp.down_proj.register_forward_hook(lambda _module, _inputs, output: output * 1.5)
    found = attribution_of(one)
    assert found.rest.mean_abs > 0.3
    assert "look at the first difference" in found.lines()[-1]
    one = subject(model, "fp8_full")
    hook_one_ulp(one.worker.engine_model.get_submodule("layers.0"))
    found = attribution_of(one)
    assert not found.shares
    assert found.rest.mean_abs in (0.0, 1.0)  # an ulp may be rounded away


# --- parts ----------------------------------------------------------------------------------------------------


def test_shares_are_those_by_hand() -> None:
    def left(**by_moved: float) -> dict[frozenset[str], float]:
        return {frozenset(moved.replace("none", "")): value for moved, value in by_moved.items()}

    assert shapley(["a", "b"], left(none=1.0, a=0.25, b=0.75, ab=0.0)) == {"a": 0.75, "b": 0.25}
    together = shapley(["a", "b"], left(none=1.0, a=1.0, b=1.0, ab=0.5))  # neither helps alone
    assert together == {"a": 0.25, "b": 0.25}
    assert shapley([], left(none=1.0)) == {}


def test_the_mismatch_is_that_of_the_metrics() -> None:
    from octetrl.telemetry.mismatch import mismatch_metrics

    generator_N, trainer_N = torch.randn(2, 50)
    found = mismatch_between(generator_N, trainer_N)
    metrics = mismatch_metrics(generator_N, trainer_N, torch.arange(50), torch.full((50,), 50))
    assert found.gen_kl == pytest.approx(metrics["mismatch/gen_kl"])
    assert found.mean_abs == pytest.approx(float((generator_N - trainer_N).abs().mean()))
