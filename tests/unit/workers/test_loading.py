"""A worker's memory while it loads a model: one whole FP8 weight at a time, and afterwards what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octetrl.config.schema import Fp8Config, LoraConfig, ModelConfig, OptimizerConfig, Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.layers.weight_memory import Loading
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import load_weights, save_weights, save_weights_fp8
from octetrl.models.peft_adapters import begin_adapters, load_trained
from octetrl.models.weight_files import SINGLE
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.sharded_state import load_shared
from octetrl.trainer.shared_weights import keep_owned_rows, optimizer_of
from octetrl.workers.models import ModelBuilder
from octetrl.workers.scalar_models import build_critic_model, build_reward_model
from tests.allocated import Allocated
from tests.objectives import objective
from tests.parity.shapes import TINY
from tests.parity.sides import PRECISIONS
from tests.team import run_team

CPU = torch.device("cpu")
# Blocks of 128 rows that end inside of q, k and gate; a short last block; and experts of 40 rows.
ODD: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 200, "vocab_size": 301}
SPECS = {
    "llama": replace(TINY["llama"], **ODD),
    "qwen2.5": replace(TINY["qwen2.5"], **ODD),
    "mla-moe": spec_from_config(
        preset_config("tiny-mla-moe") | {"num_hidden_layers": 2, "moe_intermediate_size": 40, "vocab_size": 301}
    ),
    "deep": replace(TINY["qwen3"], num_layers=6, hidden_size=128, intermediate_size=256, vocab_size=128),
}
MIXED = PRECISIONS["fp8"].model_copy(update={"bf16_last_layers": 1, "ignore": ("*.o_proj",)})
FP8 = {**PRECISIONS, "fp8_rollout": Fp8Config(rollout=True), "mixed": MIXED}


def loaded_whole(spec: ModelSpec, fp8: Fp8Config, folder: Path, lora: LoraConfig | None = None) -> Decoder:
    """The model with all its weights in memory."""
    model = Decoder(spec, precision_policy(spec, fp8), "train", lora=lora)
    load_weights(model, folder)
    return model


def builder(spec: ModelSpec, fp8: Fp8Config, folder: Path, peers: Peers = ALONE, **options: Any) -> ModelBuilder:
    lora = options.pop("lora", None)
    recipe = Recipe(
        model=ModelConfig(preset="tiny", init="random", lora=lora),
        algorithm=objective(),
        fp8=fp8,
        **options.pop("recipe", {}),
    )

    def fill(model: Decoder, loading: Loading) -> None:
        load_weights(model, folder, loading=loading)
        begin_adapters(model, 1)

    return ModelBuilder(recipe, spec, precision_policy(spec, fp8), CPU, fill, peers, **options)


def saved(spec: ModelSpec, folder: Path) -> Path:
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
    model.random_init(7)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    save_weights(model, folder)
    return folder


def assert_loaded(model: Decoder, whole: Decoder, peers: Peers | None) -> None:
    """Codes, scales and BF16 parts are those of `whole`; an FP8 weight is the rows of `peers`, if any, and no more."""
    expected = dict(whole.named_parameters())
    linears = dict(model.float8_linears())
    held = {f"{name}.weight" for name in linears}
    assert linears.keys() == dict(whole.float8_linears()).keys()
    for name, linear in whole.float8_linears():
        assert torch.equal(linears[name].codes.view(torch.uint8), linear.codes.view(torch.uint8)), name
        assert torch.equal(linears[name].scale, linear.scale), name
        linears[name].check_codes()
        assert not linears[name].has_weight
    for name, parameter in model.named_parameters():
        if name not in held:
            assert torch.equal(parameter, expected[name]), name
    if peers is None:
        assert all(linear.weight is None and linear.own_rows is None for linear in linears.values())
        return
    optimizer, _ = optimizer_of(model, OptimizerConfig(), seed=0, peers=peers)
    for slot in optimizer.slots:
        assert torch.equal(slot.weight, slot.rows.of(expected[slot.name].detach())), slot.name
    kept = sum(slot.weight.numel() for slot in optimizer.slots if slot.name in held)
    own = [linear.own_rows for linear in linears.values()]
    assert sum(rows.rows_RK.untyped_storage().nbytes() for rows in own if rows is not None) == 2 * kept


@pytest.mark.parametrize(
    ("kind", "precision", "count"),
    [
        ("llama", "fp8_full", 3),
        ("qwen2.5", "fp8", 2),
        ("qwen2.5", "mixed", 2),
        ("mla-moe", "fp8_full", 3),
        ("llama", "bf16", 2),
        ("qwen2.5", "fp8_rollout", 2),
    ],
)
def test_each_worker_has_all_codes_and_its_rows(kind: str, precision: str, count: int, tmp_path: Path) -> None:
    spec, fp8 = SPECS[kind], FP8[precision]
    whole = loaded_whole(spec, fp8, saved(spec, tmp_path))
    models = run_team(count, lambda peers: _checked(builder(spec, fp8, tmp_path, peers).trainer_model(), whole, peers))
    own = [[linear.own_rows for _, linear in model.float8_linears()] for model in models]
    for place, (name, _) in enumerate(whole.float8_linears()):
        rows = torch.cat([part[place].rows_RK for part in own])  # type: ignore[union-attr]
        assert torch.equal(rows, whole.get_parameter(f"{name}.weight")), name


def _checked(model: Decoder, whole: Decoder, peers: Peers) -> Decoder:
    assert_loaded(model, whole, peers)
    return model


def test_random_weights_are_those_of_a_whole_model() -> None:
    spec, fp8 = SPECS["mla-moe"], FP8["fp8"]
    whole = Decoder(spec, precision_policy(spec, fp8), "train")
    whole.random_init(3)

    def work(peers: Peers) -> None:
        model = Decoder(spec, precision_policy(spec, fp8), "train", fp8_weights=False)
        keep_owned_rows(model, peers)
        model.random_init(3)
        assert_loaded(model, whole, peers)

    run_team(2, work)


def test_block_fp8_folders_load_to_the_same_rows(tmp_path: Path) -> None:
    spec = replace(TINY["llama"], hidden_size=128, intermediate_size=256, head_size=32, num_kv_heads=4)
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
    model.random_init(5)
    save_weights_fp8(model, tmp_path)
    whole = loaded_whole(spec, FP8["fp8"], tmp_path)
    run_team(2, lambda peers: _checked(builder(spec, FP8["fp8"], tmp_path, peers).trainer_model(), whole, peers))


@pytest.mark.parametrize("kind", ["not trained", "lora", "reference"])
def test_a_model_that_is_not_updated_has_codes_alone(kind: str, tmp_path: Path) -> None:
    spec, fp8 = SPECS["qwen2.5"], FP8["fp8_full"]
    lora = LoraConfig(rank=4) if kind == "lora" else None
    whole = loaded_whole(spec, fp8, saved(spec, tmp_path), lora)
    begin_adapters(whole, 1)
    with Allocated(torch.bfloat16) as allocated:
        built = builder(spec, fp8, tmp_path, lora=lora, trains=kind != "not trained")
        model = built._first_policy(whole) if kind == "reference" else built.trainer_model()
    assert_loaded(model, whole, None)
    weights = [linear.weight.nbytes for _, linear in whole.float8_linears() if linear.weight is not None]
    others = sum(one.nbytes for one in whole.parameters()) - sum(weights)
    assert allocated.now() == others
    assert allocated.peak <= others + 3 * max(weights)


@pytest.mark.parametrize("kind", ["critic", "reward model"])
def test_models_with_a_scalar_head(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(model=ModelConfig(preset="tiny", init="random"), algorithm=objective(), fp8=FP8["fp8"])

    def build(peers: Peers) -> Decoder:
        if kind == "critic":
            return build_critic_model(recipe, TINY["qwen3"], CPU, peers)
        return build_reward_model(recipe, CPU, peers)

    whole = build(ALONE)
    assert all(linear.has_weight for _, linear in whole.float8_linears())
    run_team(2, lambda peers: _checked(build(peers), whole, peers))


def test_no_worker_holds_all_bf16_weights_while_it_loads(tmp_path: Path) -> None:
    """The peak is what it keeps and a few tensors of the largest weight's size: read, checked, quantised."""
    spec, fp8 = SPECS["deep"], FP8["fp8_full"]
    saved(spec, tmp_path)
    whole = loaded_whole(spec, fp8, tmp_path)
    weights = [linear.weight.nbytes for _, linear in whole.float8_linears() if linear.weight is not None]
    others = sum(one.nbytes for one in whole.parameters()) - sum(weights)

    def work(peers: Peers) -> tuple[int, int]:
        with Allocated(torch.bfloat16) as allocated:
            model = builder(spec, fp8, tmp_path, peers).trainer_model()
            peak = allocated.peak
            load_shared(model, peers, lambda model, rows: load_trained(model, tmp_path, rows))  # of one worker's run
        assert allocated.peak == peak
        return allocated.now(), peak

    found = run_team(3, work)
    assert sum(kept - others for kept, _ in found) == sum(weights)
    for kept, peak in found:
        assert kept - others <= sum(weights) / 2
        assert peak <= kept + 3 * max(weights) < 0.7 * (others + sum(weights))


BROKEN = {
    "missing": (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "up_proj"),
    "shape": (
        lambda tensors: _changed(tensors, "model.layers.0.self_attn.k_proj.weight", lambda one: one[1:]),
        "k_proj",
    ),
    "extra": (lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}), "layers.9"),
    "not finite": (
        lambda tensors: _changed(tensors, "model.layers.1.mlp.up_proj.weight", lambda one: one / 0),
        "up_proj.weight' is not finite everywhere",
    ),
}


def _changed(tensors: dict[str, Tensor], name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors[name] = change(tensors[name]).contiguous()


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_folder_is_one_line(how: str, tmp_path: Path) -> None:
    spec, fp8 = SPECS["llama"], FP8["fp8"]
    tensors = load_file(saved(spec, tmp_path) / SINGLE)
    tensors = {name: one.clone() for name, one in tensors.items()}
    change, said = BROKEN[how]
    change(tensors)
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    lines = []
    for load in (
        lambda: loaded_whole(spec, fp8, tmp_path),
        lambda: builder(spec, fp8, tmp_path, trains=False).trainer_model(),
    ):
        with pytest.raises(UserError) as error:
            load()
        lines.append(str(error.value))
    assert lines[0] == lines[1] and said in lines[0] and "\n" not in lines[0]
