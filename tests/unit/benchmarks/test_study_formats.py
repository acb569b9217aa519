"""The study's measurements of formats: the exact forward against transformers, the codecs by their properties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.study import codecs, kv_formats, real_model
from benchmarks.study.float64_model import PlainModel, Replacement, attend, divergence
from benchmarks.study.texts import Text
from octetrl.config.schema import Fp8Config
from octetrl.fp8.kv_scales import kv_scales_from_amax
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import load_weights, save_weights
from octetrl.run.build import full_precision
from octetrl.shapes.presets import preset_config

TOKENS, HEADS, SIZE = 24, 2, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    spec = spec_from_config(preset_config("tiny") | {"num_hidden_layers": 2})
    model = Decoder(spec, full_precision(spec), "train")
    model.random_init(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    save_weights(model, path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> PlainModel:
    return PlainModel(folder)


def ids(seed: int) -> Tensor:
    return torch.randint(2, 384, (TOKENS,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return [Text(kind, ids(2 * number), ids(2 * number + 1)) for number, kind in enumerate("ab")]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_exact_forward_is_that_of_transformers(folder: Path, plain: PlainModel) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        expected_TV = theirs(ids(7)[None]).logits[0].log_softmax(1)
        torch.testing.assert_close(plain(ids(7)), expected_TV, atol=1e-5, rtol=0)  # their norms are float32
        stream = plain.layers(plain.embed(ids(7)))
        later = plain.layers(stream[1], first=1)
    torch.testing.assert_close(later[-1], stream[-1], rtol=0, atol=0)
    assert len(stream) == 3 and len(later) == 2


def test_a_calibrated_codec_has_the_scales_of_a_run() -> None:
    spec = spec_from_config(preset_config("tiny") | {"num_hidden_layers": 1})
    k_TKD, v_TKD = normal(TOKENS, HEADS, SIZE), normal(TOKENS, HEADS, SIZE, seed=1)
    amax_LS = torch.cat([x.to(torch.bfloat16).float().abs().amax((0, 2)) for x in (k_TKD, v_TKD)])[None]
    expected_LS = kv_scales_from_amax(amax_LS, spec, policy_version=0).scale_LS
    found_S = torch.cat([codecs.head_scales([k_TKD]), codecs.head_scales([v_TKD])])
    assert torch.equal(found_S, expected_LS[0])


def test_errors_of_e4m3_and_int8_on_normal_values() -> None:
    x_TKD = normal(512, HEADS, 64)

    def error(codec: codecs.Codec) -> float:
        return kv_formats.relative(codec([x_TKD])(x_TKD), x_TKD)

    assert error(codecs.e4m3_token) == pytest.approx(0.026, abs=0.002)
    assert error(codecs.e4m3_head()) == pytest.approx(0.026, abs=0.002)
    assert error(codecs.int8_token()) == pytest.approx(0.0062, abs=0.001)  # amax / 127 / sqrt(12), amax = 2.7 std
    assert error(codecs.int8_token(16)) < error(codecs.int8_token()) < error(codecs.int8_head())
    assert error(codecs.bf16) < 0.002


def test_small_tokens_lose_what_scales_of_tokens_keep() -> None:
    x_TKD = normal(64, HEADS, 64)
    x_TKD[0] *= 1e5  # beside it, everything else is below the smallest normal number
    small = x_TKD[1:]
    scale_K = codecs.head_scales([x_TKD])
    assert float(codecs.below_normal(small, scale_K).double().mean()) > 0.99

    def error(codec: codecs.Codec) -> float:
        return kv_formats.relative(codec([x_TKD])(x_TKD)[1:], small)

    assert error(codecs.e4m3_head()) > 0.3
    assert error(codecs.e4m3_token) < 0.03
    assert error(codecs.first_exact(codecs.e4m3_head(), 1)) < 0.03


def test_a_constant_of_channels_changes_no_attention() -> None:
    q, k, v = normal(TOKENS, 4, SIZE), normal(TOKENS, HEADS, SIZE, seed=1), normal(TOKENS, HEADS, SIZE, seed=2)
    constant = normal(HEADS, SIZE, seed=3) * 10
    out = attend(q, k, v)
    torch.testing.assert_close(attend(q, k + constant, v), out)
    torch.testing.assert_close(attend(q, k, v + constant), out + constant.repeat_interleave(2, 0))
    far = k + 8  # BF16's own rounding of values near 8 stays, a third of the error
    error = kv_formats.relative(codecs.int8_token()([far])(far), far)
    assert kv_formats.relative(codecs.centred(codecs.int8_token())([far])(far), far) < 0.7 * error


@torch.no_grad()
def test_one_wrong_layer_shows(plain: PlainModel, texts: list[Text]) -> None:
    calibration, measured = kv_formats.prepare(plain, texts)
    nothing = kv_formats.end_to_end(plain, Replacement(), measured)
    assert nothing["kl"] == 0 and nothing["same_choice"] == 1
    layers = kv_formats.fitted(kv_formats.Format(codecs.e4m3_head(), codecs.bf16), calibration)
    row = kv_formats.errors(layers, measured) | kv_formats.end_to_end(plain, kv_formats.replaced(layers), measured)
    assert 0.01 < float(str(row["k_error"])) < 0.06 and float(str(row["v_error"])) < 0.002
    assert float(str(row["kl"])) > 0 and float(str(row["out_error_worst"])) >= float(str(row["out_error"])) > 0


def test_divergence_is_that_of_torch() -> None:
    p, q = normal(5, 11).log_softmax(1), normal(5, 11, seed=1).log_softmax(1)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(1)
    torch.testing.assert_close(divergence(p, q), expected)


def test_the_command_writes_a_row_a_format(
    folder: Path, tmp_path: Path, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_formats, "read_texts", lambda *_: texts)
    kv_formats.main(["--model", str(folder), "--formats", "by token", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "study_kv-formats.json").read_text())["rows"]
    named = {row["format"]: row for row in rows}
    assert {"exact", "e4m3 by token", "int8 by token, centred", "e4m3 calibrated/int8 by token"} <= named.keys()
    assert abs(named["exact"]["kl"]) < 1e-6 < named["int8 by token"]["kl"]
    assert named["int8 by token"]["bytes"] == 2 * SIZE + 8


def test_what_fp8_does_to_a_model_by_layer_and_head(
    folder: Path, tmp_path: Path, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model, "read_texts", lambda *_: texts)
    real_model.main(["--model", str(folder), "--only", "whole,layer,linears,head", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "study_real-model-whole-layer-linears-head.json").read_text())["rows"]
    whole = {row["format"]: row for row in rows if row["part"] == "whole"}
    assert abs(whole["exact"]["kl"]) < 1e-6 < whole["K calibrated"]["kl"] < whole["linears, K and V calibrated"]["kl"]
    assert [row["layer"] for row in rows if row["part"] == "layer"] == [0, 1]
    linears = {row["format"]: row["kl"] for row in rows if row["part"] == "linears"}
    assert len(linears) == 15 and linears["int8, blocks of 32"] < linears["E4M3, blocks of 32"]
    heads = [row for row in rows if row["part"] == "head"]
    assert len(heads) == 2 * 2 * HEADS
    assert all(0.01 < row["error"] < 0.06 and 0 < row["median_amax"] < 1.5 for row in heads)
    one, both = max(row["kl"] for row in heads), whole["K and V calibrated"]["kl"]
    assert 0 < one < both


def test_the_linears_of_the_real_model_are_those_of_fp8(folder: Path, plain: PlainModel) -> None:
    """The exact forward with FP8's operands is the package's emulated FP8 model, up to its BF16 roundings."""
    spec = plain.spec
    model = Decoder(spec, precision_policy(spec, Fp8Config(train=True)), "train", dtype=torch.float32)
    load_weights(model, folder)
    context = PackedContext(torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS, "none", None)
    with torch.no_grad():
        theirs_TV = model.logits(model(ids(7), torch.arange(TOKENS), context)).log_softmax(1).double()
        ours_TV = plain(ids(7), Replacement(linear=real_model.Linears(True, True)))
        exact_TV = plain(ids(7))
    assert float(divergence(ours_TV, theirs_TV).mean()) < 0.05 * float(divergence(exact_TV, theirs_TV).mean())
    formats = real_model.linear_formats(spec.num_layers)
    with torch.no_grad():
        blocks_TV = plain(ids(7), Replacement(linear=formats["E4M3, blocks of 128"]))
        spared_TV = plain(ids(7), Replacement(linear=formats["E4M3, exact first and last layer"]))
    assert torch.equal(spared_TV, exact_TV), "it has two layers"
    assert float(divergence(ours_TV, blocks_TV).mean()) < 0.05 * float(divergence(exact_TV, blocks_TV).mean())
