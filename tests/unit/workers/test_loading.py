"""Loading a model: one worker or several, each with the bits of a whole model in memory.

Each of several workers reads and quantises some rows, has all codes, and keeps the BF16 rows that it owns. None holds
more than one whole FP8 weight at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import LoraConfig, ModelConfig, OptimizerConfig, Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.fp8.quantize import quantize_weight_reference
from octetrl.layers.weight_memory import LoadCount, Loading
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import hf_config, load_weights, save_weights
from octetrl.models.peft_adapters import begin_adapters, load_trained
from octetrl.models.weight_files import LM_HEAD, SINGLE
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.system.errors import UserError
from octetrl.trainer.peers import ALONE, Peers, PeersLost
from octetrl.trainer.sharded_state import load_shared
from octetrl.trainer.shared_weights import keep_owned_rows, optimizer_of
from octetrl.workers.build import fill_weights
from octetrl.workers.models import ModelBuilder
from octetrl.workers.scalar_models import build_critic_model, build_reward_model
from tests.allocated import Allocated
from tests.grid import run_grid
from tests.objectives import objective
from tests.parity.shapes import TINY
from tests.parity.sides import PRECISIONS
from tests.team import run_team
from tests.unit.trainer.test_sharded_state import whole_state, write

CPU = torch.device("cpu")
MIXED = PRECISIONS["fp8"].model_copy(update={"bf16_last_layers": 1, "ignore": ("*.o_proj",)})
FP8 = {**PRECISIONS, "fp8_rollout": Fp8Config(rollout=True), "mixed": MIXED}
# Blocks of 128 rows that end inside of q, k and gate; a short last block; and experts of 40 rows.
ODD: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 200, "vocab_size": 301}
MOE = {"num_hidden_layers": 2, "moe_intermediate_size": 40, "vocab_size": 301}
DEEP = {"num_layers": 6, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 128}
SPECS = {
    "untied": replace(TINY["llama"], **ODD),
    "tied": replace(TINY["llama"], **ODD, tied_embeddings=True),
    "qwen2.5": replace(TINY["qwen2.5"], **ODD),
    "mla-moe": spec_from_config(preset_config("tiny-mla-moe") | MOE),
    "deep": replace(TINY["qwen3"], **DEEP),
}
UP_PROJ, DOWN_PROJ = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
Loaded = tuple[Decoder, LoadCount]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model in BF16, and with the linears in FP8 blocks of every tensor, the last of which are not whole."""
    made = {}
    for kind, spec in SPECS.items():
        made[kind] = saved(spec, tmp_path_factory.mktemp(kind))
        made[f"{kind} in FP8"] = changed(made[kind], tmp_path_factory.mktemp(kind), in_blocks)
    return made


def saved(spec: ModelSpec, folder: Path) -> Path:
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
    model.random_init(7)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    save_weights(model, folder)
    return folder


def changed(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = {name: one.clone() for name, one in load_file(folder / SINGLE).items()}
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, out / SINGLE, metadata={"format": "pt"})
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return out


def in_blocks(tensors: dict[str, Tensor]) -> None:
    for name in [name for name, tensor in tensors.items() if "_proj" in name and tensor.dim() == 2]:
        tensors[name], tensors[name + "_scale_inv"] = quantize_weight_reference(tensors[name])


def builder(
    spec: ModelSpec, fp8: Fp8Config, folder: Path, peers: Peers = ALONE, lora: LoraConfig | None = None, **options: Any
) -> ModelBuilder:
    def fill(model: Decoder, loading: Loading) -> None:
        load_weights(model, folder, loading=loading)
        begin_adapters(model, 1)

    recipe = Recipe(model=ModelConfig(path=str(folder), lora=lora), algorithm=objective(), fp8=fp8)
    part = spec.cut(TensorCut(peers.group.rank, peers.group.size))
    return ModelBuilder(recipe, part, precision_policy(spec, fp8), CPU, fill, peers, **options)


def trained(spec: ModelSpec, fp8: Fp8Config, folder: Path, peers: Peers = ALONE) -> Loaded:
    built = builder(spec, fp8, folder, peers)
    return built.trainer_model(), built.count


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


def team_of(count: int, whole: Decoder, load: Callable[[Peers], Loaded]) -> list[Loaded]:
    """What each of several workers loads, of which all have the codes of `whole`."""

    def work(peers: Peers) -> Loaded:
        loaded = load(peers)
        assert_loaded(loaded[0], whole, peers)
        return loaded

    return run_team(count, work)


@pytest.mark.parametrize("stored", ["", " in FP8"])
@pytest.mark.parametrize(
    ("kind", "precision", "count"),
    [
        ("untied", "fp8_full", 3),
        ("untied", "bf16", 2),
        ("tied", "fp8", 2),
        ("tied", "fp8_rollout", 3),
        ("qwen2.5", "fp8", 2),
        ("qwen2.5", "mixed", 2),
        ("mla-moe", "fp8_full", 3),
        ("mla-moe", "bf16", 2),
    ],
)
def test_each_row_of_a_matrix_is_read_by_one_worker_and_its_codes_are_on_all(
    kind: str, precision: str, count: int, stored: str, folders: dict[str, Path]
) -> None:
    spec, fp8, folder = SPECS[kind], FP8[precision], folders[kind + stored]
    whole, alone = trained(spec, fp8, folder)
    models, counts = zip(*team_of(count, whole, lambda peers: trained(spec, fp8, folder, peers)), strict=True)
    own = [[linear.own_rows for _, linear in model.float8_linears()] for model in models]
    for place, (name, _) in enumerate(whole.float8_linears()):
        rows = torch.cat([part[place].rows_RK for part in own])
        assert torch.equal(rows, whole.get_parameter(f"{name}.weight")), name
    tensors = load_file(folder / SINGLE)
    assert alone.read_bytes == sum(one.nbytes for one in tensors.values()), "one worker reads each tensor once"
    # every worker reads vectors, and all scales of a tensor of codes
    shared = sum(one.nbytes for name, one in tensors.items() if one.dim() == 1 or name.endswith("_scale_inv"))
    # a block at the border of two workers' rows, where ours begin inside of the folder's, is read by both
    borders = sum(128 * layout.in_features * 2 for _, layout in spec.linears()) * (count - 1)
    read = [one.read_bytes for one in counts]
    assert max(read) < (0.75 if count == 2 else 0.6) * alone.read_bytes, "no worker reads everything"
    assert sum(one.quantized_bytes for one in counts) == alone.quantized_bytes
    least = alone.read_bytes + (count - 1) * shared
    assert sum(read) <= least + borders if stored else sum(read) == least


@pytest.mark.parametrize("kind", ["not updated", "lora", "lora in FP8", "reference"])
def test_a_model_that_nobody_updates_has_codes_alone_and_is_shared_too(kind: str, folders: dict[str, Path]) -> None:
    spec, fp8 = SPECS["qwen2.5"], FP8["fp8_full"]
    folder = folders["qwen2.5 in FP8" if kind.endswith("FP8") else "qwen2.5"]
    lora = LoraConfig(rank=4) if kind.startswith("lora") else None
    whole = Decoder(spec, precision_policy(spec, fp8), "train", lora=lora)
    load_weights(whole, folder)
    begin_adapters(whole, 1)

    def work(peers: Peers) -> Loaded:
        mine = builder(spec, fp8, folder, peers, lora, trains=kind != "not updated")
        model = mine._first_policy(Decoder(spec, mine.policy, "train", device="meta")) if kind == "reference" else None
        model = model or mine.trainer_model()
        assert_loaded(model, whole, None)
        return model, mine.count

    with Allocated(torch.bfloat16) as allocated:
        _held, alone = work(ALONE)
        weights = [linear.weight.nbytes for _, linear in whole.float8_linears() if linear.weight is not None]
        others = sum(one.nbytes for one in whole.parameters()) - sum(weights)
        assert allocated.now() == others
    assert allocated.peak <= others + 3 * max(weights)
    counts = [count for _, count in run_team(2, work)]
    assert max(one.read_bytes for one in counts) < 0.75 * alone.read_bytes
    assert sum(one.quantized_bytes for one in counts) == alone.quantized_bytes


def test_random_weights_are_those_of_a_whole_model_quantised_by_their_owners() -> None:
    spec, fp8 = SPECS["mla-moe"], FP8["fp8"]
    recipe = Recipe(model=ModelConfig(preset="tiny", init="random"), algorithm=objective(), fp8=fp8, seed=3)

    def load(peers: Peers) -> Loaded:
        count = LoadCount()
        model = Decoder(spec, precision_policy(spec, fp8), "train", fp8_weights=peers.share.count == 1)
        keep_owned_rows(model, peers)
        load_shared(model, peers, lambda one, rows: fill_weights(one, recipe, rows), count)
        return model, count

    whole, alone = load(ALONE)
    counts = [count for _, count in team_of(2, whole, load)]
    assert sum(one.quantized_bytes for one in counts) == alone.quantized_bytes > 0
    assert sum(one.read_bytes for one in counts) == 0


@pytest.mark.parametrize("kind", ["critic", "reward model"])
def test_models_with_a_scalar_head(kind: str) -> None:
    recipe = Recipe(model=ModelConfig(preset="tiny", init="random"), algorithm=objective(), fp8=FP8["fp8"])

    def load(peers: Peers) -> Loaded:
        if kind == "critic":
            return build_critic_model(recipe, TINY["qwen3"], CPU, peers), LoadCount()
        return build_reward_model(recipe, CPU, peers), LoadCount()

    whole, _ = load(ALONE)
    assert all(linear.has_weight for _, linear in whole.float8_linears())
    team_of(2, whole, load)


def test_no_worker_holds_all_bf16_weights_while_it_loads(folders: dict[str, Path]) -> None:
    """The peak is what it keeps and a few tensors of the largest weight's size: read, checked, quantised."""
    spec, fp8, folder = SPECS["deep"], FP8["fp8_full"], folders["deep"]
    whole, _ = trained(spec, fp8, folder)
    weights = [linear.weight.nbytes for _, linear in whole.float8_linears() if linear.weight is not None]
    others = sum(one.nbytes for one in whole.parameters()) - sum(weights)

    def work(peers: Peers) -> tuple[int, int]:
        with Allocated(torch.bfloat16) as allocated:
            model, _ = trained(spec, fp8, folder, peers)
            peak = allocated.peak
            load_shared(model, peers, lambda model, rows: load_trained(model, folder, rows))  # of one worker's run
        assert allocated.peak == peak
        return allocated.now(), peak

    memory = run_team(3, work)
    assert sum(kept - others for kept, _ in memory) == sum(weights)
    for kept, peak in memory:
        assert kept - others <= sum(weights) / 2
        assert peak <= kept + 3 * max(weights) < 0.7 * (others + sum(weights))


def test_published_codes_of_a_frozen_model_are_shared(tmp_path: Path) -> None:
    """Scales that our quantiser would not make stay, on every worker; one worker's rows have a multiplier of 0."""
    spec = replace(TINY["llama"], hidden_size=256, intermediate_size=384, head_size=32, num_kv_heads=4)
    zero = "model.layers.0.mlp.up_proj.weight"

    def publish(tensors: dict[str, Tensor]) -> None:
        in_blocks(tensors)
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name] * 1.3
        tensors[zero][256:], tensors[zero + "_scale_inv"][2:] = 0, 0

    folder = changed(saved(spec, tmp_path), tmp_path, publish)
    tensors = load_file(folder / SINGLE)

    def work(peers: Peers) -> Decoder:
        return builder(spec, FP8["fp8_full"], folder, peers, LoraConfig(rank=4)).trainer_model()

    alone = work(ALONE)
    linears = dict(alone.float8_linears())
    assert torch.equal(linears["layers.0.mlp.down_proj"].scale, tensors[zero.replace("up", "down") + "_scale_inv"])
    assert not torch.equal(linears["layers.0.mlp.gate_up_proj"].scale[3:5], tensors[zero + "_scale_inv"][:2])
    for model in run_team(3, work):
        assert_loaded(model, alone, None)


def test_the_parts_of_a_tensor_parallel_model_read_their_rows(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_size": 64, "num_heads": 4, "num_kv_heads": 4}
    spec = replace(TINY["qwen3"], **wide, vocab_size=8192)
    folder = saved(spec, tmp_path)

    def work(peers: Peers) -> Loaded:
        loaded = trained(spec, FP8["fp8_full"], folder, peers)
        if peers.share.count > 1:
            assert_loaded(loaded[0], two[peers.group.rank][0], peers)
        return loaded

    _, alone = work(ALONE)
    two = run_grid(1, 2, work)
    four = run_grid(2, 2, work)
    for team, most in ((two, 0.55), (four, 0.35)):  # vectors are whole, and the rows are few blocks
        assert max(one.read_bytes for _, one in team) < most * alone.read_bytes


# ---------------------------------------------------------------- what is wrong


def _head_differs(tensors: dict[str, Tensor]) -> None:
    tensors[LM_HEAD] = tensors["model.embed_tokens.weight"].clone()
    tensors[LM_HEAD][0, 0] += 1


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda tensors: tensors.pop(UP_PROJ), "up_proj"),
    "shape": (lambda tensors: tensors.update({UP_PROJ: tensors[UP_PROJ][1:]}), "up_proj"),
    "extra": (lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}), "layers.9"),
    "not finite": (lambda tensors: tensors[DOWN_PROJ][-1, -1].fill_(torch.inf), "down_proj.weight' is not finite"),
    "another head": (_head_differs, "differs from the embedding"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_one_worker_finds_wrong_is_one_line_on_all(how: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """The rows of another worker may be right, and it must not wait for the first."""
    change, said = BROKEN[how]
    folder = changed(folders["tied"], tmp_path, change)

    def refusal(peers: Peers, **options: Any) -> str:
        with pytest.raises(UserError) as error:
            builder(SPECS["tied"], FP8["fp8"], folder, peers, **options).trainer_model()
        return str(error.value)

    began = time.monotonic()
    alone, lines = refusal(ALONE), run_team(2, refusal, deadline_seconds=600.0)
    assert said in alone and "\n" not in alone and time.monotonic() - began < 200
    assert {*lines, refusal(ALONE, trains=False)} == {alone}


def test_nobody_waits_for_a_worker_that_fails_in_loading() -> None:
    def work(peers: Peers) -> str:
        def load(model: Decoder, loading: Loading) -> None:
            if peers.share.rank == 1:
                raise MemoryError("no room")

        with pytest.raises((MemoryError, PeersLost)) as error:
            load_shared(Decoder(SPECS["tied"], precision_policy(SPECS["tied"], FP8["fp8"]), "train"), peers, load)
        return f"{type(error.value).__name__}: {error.value}"

    began = time.monotonic()
    waiting, failing = run_team(2, work, deadline_seconds=600.0)
    assert failing == "MemoryError: no room" and waiting.startswith("PeersLost: ") and "MemoryError" in waiting
    assert time.monotonic() - began < 200


def test_a_checkpoint_of_other_workers_is_read_by_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    spec, fp8 = SPECS["untied"], FP8["fp8"]
    parameters = {
        name: one.detach() for name, one in trained(spec, Fp8Config(), folders["untied"])[0].named_parameters()
    }
    path = write(tmp_path, whole_state("8bit", parameters), parameters, 3)
    (path / "config.json").write_text(json.dumps(hf_config(spec, "bfloat16")))
    whole, alone = trained(spec, fp8, path)
    of_one_worker = trained(spec, fp8, folders["untied"])[0]
    assert all(
        torch.equal(one, other) for one, other in zip(whole.parameters(), of_one_worker.parameters(), strict=True)
    )
    counts = [count for _, count in team_of(2, whole, lambda peers: trained(spec, fp8, path, peers))]
    assert max(one.read_bytes for one in counts) < 0.75 * alone.read_bytes
