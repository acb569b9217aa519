"""A decoder with a scalar head: transformers' numbers, its folder, FP8, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import LoraConfig
from octetrl.fp8.policy import precision_policy
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights, save_weights
from octetrl.models.peft_adapters import load_adapter, read_adapter_config
from octetrl.models.scalar_decoder import ScalarDecoder, ScoreHead
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from tests.saved_adapter import save_adapter
from tests.unit.models.test_lora import ALL, BOUNDS, FP8, SOME, SPECS, TOKENS, hidden
from tests.unit.models.test_lora import make as make_causal
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


def put_around(folder: Path) -> None:
    """Makes the model a part of one that reads images."""
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer | {"vision_config": {"depth": 1}}))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    tensors["model.visual.patch.weight"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(params=["llama", "qwen2-tied", "qwen3_5_text"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ScalarDecoder, Path]:
    """A scalar model with a head that is not zero, and its folder."""
    hf_model(request.param).save_pretrained(tmp_path / "causal")
    if request.param == "qwen3_5_text":
        put_around(tmp_path / "causal")
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


# ---------------------------------------------------------------- adapters


HEAD = "base_model.model.score.weight"
LAST = BOUNDS[1:].long() - 1


def make(
    lora: LoraConfig = ALL,
    *,
    spec: ModelSpec = SPEC,
    fp8: Fp8Config | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 2,
) -> ScalarDecoder:
    """A random trunk, the same for every `seed`; branches and a head that are not zero; frozen as a run freezes it."""
    model = ScalarDecoder(spec, precision_policy(spec, fp8 or Fp8Config()), dtype=dtype, lora=lora)
    model.random_init(0)
    model.draw_adapters(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [model.score.weight, *(adapter.b for _, adapter in model.adapters())]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    model.train_adapters_alone()
    return model


def rewards(model: ScalarDecoder) -> Tensor:
    return model.scalars(hidden(model)[LAST])


@pytest.mark.parametrize("fp8", [Fp8Config(), FP8], ids=["bf16", "fp8"])
def test_adapters_and_the_head_are_all_that_is_trained(fp8: Fp8Config) -> None:
    model = make(SOME, fp8=fp8)
    rewards(model).square().sum().backward()
    trained = dict(model.trained_parameters())
    assert "score.weight" in trained and len(trained) == 1 + 2 * 2 * SPEC.num_layers
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None) == (name in trained), name
        assert parameter.grad is None or parameter.grad.any(), name
    assert all(linear.weight is None for _, linear in model.float8_linears())


def test_names_and_fields_are_pefts_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    """As PEFT 0.21 writes them; where it is installed, the tests below ask it."""
    model, other = make(SOME), make(SOME, seed=3)
    save_adapter(model, tmp_path, base="models/base")
    load_adapter(other, tmp_path)
    for (name, mine), (_, theirs) in zip(model.trained_parameters(), other.trained_parameters(), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name
    assert read_adapter_config(tmp_path).is_scalar
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors[HEAD].shape == (1, SPEC.hidden_size) and tensors[HEAD].dtype == torch.float32
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])


# --- PEFT itself ----------------------------------------------------------------------------------------------


def classifier(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )


@torch.no_grad()
def their_rewards(model: Any) -> Tensor:
    return torch.cat([model(TOKENS[None, rows]).logits[0] for rows in (slice(9), slice(9, 16))])


@pytest.mark.parametrize(("name", "lora"), [("qwen3", SOME), ("qwen2", ALL)])
def test_peft_loads_ours_and_gives_the_same_rewards(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    peft, spec = pytest.importorskip("peft"), SPECS[name]
    model, other = make(lora, spec=spec, dtype=torch.float32), make(lora, spec=spec, dtype=torch.float32, seed=3)
    save_weights(make_causal(None, spec=spec, dtype=torch.float32), tmp_path / "base")  # which has no score.weight
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(classifier(tmp_path / "base"), tmp_path / "adapter").eval()
    assert isinstance(theirs, peft.PeftModelForSequenceClassification)
    torch.testing.assert_close(rewards(model).detach(), their_rewards(theirs), rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "theirs"))
    assert ours.keys() == again.keys() and all(torch.equal(again[name], tensor) for name, tensor in ours.items())
    load_adapter(other, tmp_path / "theirs")
    assert torch.equal(rewards(other), rewards(model))


def test_one_that_peft_began_is_loaded(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    save_weights(make_causal(None, dtype=torch.float32), tmp_path / "base")
    given = peft.LoraConfig(task_type="SEQ_CLS", r=SOME.rank, lora_alpha=SOME.alpha, target_modules=list(SOME.targets))
    theirs = peft.get_peft_model(classifier(tmp_path / "base"), given).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    model = make(SOME, dtype=torch.float32)
    load_adapter(model, tmp_path / "theirs")
    torch.testing.assert_close(rewards(model).detach(), their_rewards(theirs), rtol=1e-4, atol=1e-4)


# --- what is refused ------------------------------------------------------------------------------------------


def test_a_policys_adapter_is_no_reward_models_nor_are_other_modules_saved_whole(tmp_path: Path) -> None:
    save_adapter(make_causal(ALL), tmp_path / "causal", base=None)
    with pytest.raises(UserError, match="task_type CAUSAL_LM"):
        load_adapter(make(ALL), tmp_path / "causal")
    save_adapter(make(ALL), tmp_path, base=None)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    for whole in (["score", "embed_tokens"], ["lm_head"]):
        file.write_text(json.dumps(config | {"modules_to_save": whole}))
        with pytest.raises(UserError, match=r"modules_to_save .* is not supported; only the head of a reward model is"):
            load_adapter(make(ALL), tmp_path)


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (None, "'base_model.model.score.weight' is missing"),
        (torch.zeros(3, SPEC.hidden_size), r"is \[3, 32\] instead of \[1, 32\]"),
        (torch.full((1, SPEC.hidden_size), torch.inf), "is not finite everywhere"),
    ],
)
def test_a_head_that_is_not_one_reward_is_refused(head: Tensor | None, what: str, tmp_path: Path) -> None:
    model = make(ALL)
    save_adapter(model, tmp_path, base=None)
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != HEAD}
    save_file(tensors if head is None else tensors | {HEAD: head}, file)
    with pytest.raises(UserError, match=what):
        load_adapter(model, tmp_path)
