"""A decoder with a scalar head: transformers' numbers, its folder, FP8, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from octetrl.config.schema import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights, save_weights
from octetrl.models.scalar_decoder import ScalarDecoder, ScoreHead
from octetrl.system.errors import UserError
from tests.unit.models.tiny_families import decoder_of, hf_model, packed
from tests.unit.trainer.tiny_trainer import SPEC

LENGTHS = [12, 5, 9]


def scalar_of(folder: Path, fp8: Fp8Config | None = None, *, new_head: bool = False) -> ScalarDecoder:
    spec = load_spec(folder, scalar=True)
    model = ScalarDecoder(spec, precision_policy(spec, fp8 or Fp8Config()), dtype=torch.float32)
    load_weights(model, folder, new_head=new_head)
    return model


def scalars(model: ScalarDecoder, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The tokens, and the scalar of each."""
    token_ids_T, positions_T, context = packed(lengths)
    return token_ids_T, model.scalars(model(token_ids_T, positions_T, context))


@pytest.fixture(params=["llama", "qwen2-tied"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ScalarDecoder, Path]:
    """A scalar model with a head that is not zero, and its folder."""
    hf_model(request.param).save_pretrained(tmp_path / "causal")
    model = scalar_of(tmp_path / "causal", new_head=True)
    assert not model.score.weight.any()
    with torch.no_grad():
        model.score.weight.normal_()
    save_weights(model, tmp_path / "scalar")
    return model, tmp_path / "scalar"


def test_transformers_loads_the_folder_and_scores_the_same(saved: tuple[ScalarDecoder, Path]) -> None:
    model, folder = saved
    theirs, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and theirs.config.num_labels == 1
    token_ids_T, scalars_T = scalars(model, LENGTHS)
    last_B = torch.tensor(LENGTHS).cumsum(0) - 1
    expected = torch.stack([theirs(input_ids=ids[None]).logits[0, 0] for ids in token_ids_T.split(LENGTHS)])
    torch.testing.assert_close(scalars_T[last_B], expected, rtol=1e-4, atol=1e-4)
    again = scalar_of(folder).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items()), "bit for bit"
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    with pytest.raises(UserError, match=f"unsupported architecture {theirs.config.architectures[0]}"):
        load_spec(folder)  # nobody generates from a reward model


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied"])
def test_the_trunk_is_the_decoders(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    token_ids_T, positions_T, context = packed(LENGTHS)
    hidden_TE = decoder_of(tmp_path)(token_ids_T, positions_T, context)
    assert torch.equal(scalar_of(tmp_path, new_head=True)(token_ids_T, positions_T, context), hidden_TE)


def test_fp8_linears_are_the_policys() -> None:
    spec = replace(SPEC, vocab_size=97)
    policy = precision_policy(spec, Fp8Config(rollout=True, train=True, bf16_first_layers=1))
    model = ScalarDecoder(spec, policy)
    model.random_init(0)
    assert [name.split(".")[1] for name, _ in model.float8_linears()] == ["1"] * 4
    with torch.no_grad():
        model.score.weight.normal_()
    _, scalars_T = scalars(model, LENGTHS)
    scalars_T.square().sum().backward()
    assert scalars_T.dtype == torch.float32 and scalars_T.any()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_a_model_without_one_score_is_refused_unless_a_new_one_is_asked_for(tmp_path: Path) -> None:
    hf_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"1 missing: score\.weight"):
        scalar_of(tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"score\.weight \[3, 64\] instead of \[1, 64\]"):
        scalar_of(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scalar_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    for size in (64, 72, 576, 1024):
        head = ScoreHead(size, device="cpu")
        nn.init.normal_(head.weight)
        hidden_NE = torch.randn(33, size).to(dtype)
        together_N = head(hidden_NE)
        for count in (1, 7, 16):
            assert torch.equal(torch.cat([head(rows) for rows in hidden_NE.split(count)]), together_N), (size, count)
