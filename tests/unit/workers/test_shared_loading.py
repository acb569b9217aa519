"""Several workers load one model: each reads and quantises some rows, and all have the bits of one worker."""

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

from octetrl.config.schema import Fp8Config, LoraConfig, ModelConfig, Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.fp8.quantize import quantize_weight_reference
from octetrl.layers.weight_memory import LoadCount, Loading
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import hf_config, load_weights, save_weights
from octetrl.models.peft_adapters import begin_adapters
from octetrl.models.weight_files import LM_HEAD, SINGLE
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.system.errors import UserError
from octetrl.trainer.peers import ALONE, Peers, PeersLost
from octetrl.trainer.sharded_state import load_shared
from octetrl.trainer.shared_weights import keep_owned_rows
from octetrl.workers.models import ModelBuilder
from tests.grid import run_grid
from tests.objectives import objective
from tests.parity.shapes import TINY
from tests.parity.sides import PRECISIONS
from tests.team import run_team

CPU = torch.device("cpu")
FP8 = {**PRECISIONS, "fp8_rollout": Fp8Config(rollout=True)}
# Blocks of 128 rows that end inside of q, k and gate; a short last block; and experts of 40 rows.
ODD: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 200, "vocab_size": 301}
SPECS = {
    "untied": replace(TINY["llama"], **ODD),
    "tied": replace(TINY["llama"], **ODD, tied_embeddings=True),
    "mla-moe": spec_from_config(
        preset_config("tiny-mla-moe") | {"num_hidden_layers": 2, "moe_intermediate_size": 40, "vocab_size": 301}
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model in BF16, and with the linears in FP8 blocks of every tensor, the last of which are not whole."""
    made = {}
    for kind, spec in SPECS.items():
        model = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
        model.random_init(7)
        made[kind] = tmp_path_factory.mktemp(kind)
        save_weights(model, made[kind])
        made[f"{kind} in FP8"] = in_fp8(made[kind], tmp_path_factory.mktemp(kind))
    return made


def in_fp8(folder: Path, out: Path) -> Path:
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / SINGLE).items():
        tensors[name] = tensor
        if "_proj" in name and tensor.dim() == 2:
            tensors[name], tensors[name + "_scale_inv"] = quantize_weight_reference(tensor)
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return out


def built(
    spec: ModelSpec, fp8: Fp8Config, folder: Path, peers: Peers, lora: LoraConfig | None = None, **options: Any
) -> ModelBuilder:
    model = ModelConfig(path=str(folder), lora=lora)

    def fill(model: Decoder, loading: Loading) -> None:
        load_weights(model, folder, loading=loading)
        begin_adapters(model, 1)

    recipe = Recipe(model=model, algorithm=objective(), fp8=fp8)
    part = spec.cut(TensorCut(peers.group.rank, peers.group.size))
    return ModelBuilder(recipe, part, precision_policy(spec, fp8), CPU, fill, peers, **options)


def held(model: Decoder) -> dict[str, Tensor]:
    """Codes, scales, and weights that are not FP8."""
    linears = dict(model.float8_linears())
    others = (one for one in model.named_parameters() if one[0].removesuffix(".weight") not in linears)
    found = {name: one.detach() for name, one in others}
    for name, linear in linears.items():
        linear.check_codes()
        found |= {f"{name}.codes": linear.codes.view(torch.uint8), f"{name}.scale": linear.scale}
    return found


def assert_same(models: list[Decoder], alone: Decoder) -> None:
    expected = held(alone)
    for model in models:
        found = held(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], one) for name, one in expected.items())


def shared_of(alone: LoadCount, folder: Path) -> int:
    """Bytes that every worker reads: vectors, and all scales of a tensor of codes."""
    tensors = load_file(folder / SINGLE)
    assert alone.read_bytes == sum(one.nbytes for one in tensors.values()), "one worker reads each tensor once"
    return sum(one.nbytes for name, one in tensors.items() if one.dim() == 1 or name.endswith("_scale_inv"))


@pytest.mark.parametrize("in_blocks", ["", " in FP8"])
@pytest.mark.parametrize(
    ("kind", "precision", "count"),
    [
        ("untied", "fp8_full", 3),
        ("untied", "bf16", 2),
        ("tied", "fp8", 2),
        ("tied", "fp8_rollout", 3),
        ("mla-moe", "fp8_full", 2),
        ("mla-moe", "bf16", 3),
    ],
)
def test_each_row_of_a_matrix_is_read_by_one_worker(
    kind: str, precision: str, count: int, in_blocks: str, folders: dict[str, Path]
) -> None:
    spec, fp8, folder = SPECS[kind], FP8[precision], folders[kind + in_blocks]
    alone = built(spec, fp8, folder, ALONE)
    expected = alone.trainer_model()

    def work(peers: Peers) -> tuple[Decoder, LoadCount]:
        mine = built(spec, fp8, folder, peers)
        return mine.trainer_model(), mine.count

    models, counts = zip(*run_team(count, work), strict=True)
    assert_same(list(models), expected)
    read = [one.read_bytes for one in counts]
    shared = shared_of(alone.count, folder)
    assert max(read) < (0.75 if count == 2 else 0.6) * alone.count.read_bytes, "no worker reads everything"
    assert sum(one.quantized_bytes for one in counts) == alone.count.quantized_bytes
    if not in_blocks:
        assert sum(read) == alone.count.read_bytes + (count - 1) * shared
        return
    # a block at the border of two workers' rows, where ours begin inside of the folder's, is read by both
    borders = sum(128 * layout.in_features * 2 for _, layout in spec.linears()) * (count - 1)
    # a stacked or fused weight may read the scales of a tensor for each worker that has rows of it
    assert sum(read) <= alone.count.read_bytes + (count - 1) * shared + borders


@pytest.mark.parametrize("kind", ["lora", "lora in FP8", "reference", "not updated"])
def test_models_that_nobody_updates_are_shared_too(kind: str, folders: dict[str, Path]) -> None:
    spec, fp8 = SPECS["untied"], FP8["fp8_full"]
    folder = folders["untied in FP8" if kind.endswith("FP8") else "untied"]
    lora = LoraConfig(rank=4) if kind.startswith("lora") else None

    def work(peers: Peers) -> tuple[Decoder, LoadCount]:
        mine = built(spec, fp8, folder, peers, lora, trains=kind != "not updated")
        model = mine._first_policy(Decoder(spec, mine.policy, "train", device="meta")) if kind == "reference" else None
        return model or mine.trainer_model(), mine.count

    expected, alone = work(ALONE)
    models, counts = zip(*run_team(2, work), strict=True)
    assert_same(list(models), expected)
    assert all(linear.weight is None for model in models for _, linear in model.float8_linears())
    assert max(one.read_bytes for one in counts) < 0.75 * alone.read_bytes
    assert sum(one.quantized_bytes for one in counts) == alone.quantized_bytes


def test_published_codes_of_a_frozen_model_are_shared(tmp_path: Path) -> None:
    """Scales that our quantiser would not make stay, on every worker; one worker's rows have a multiplier of 0."""
    spec = replace(TINY["llama"], hidden_size=256, intermediate_size=384, head_size=32, num_kv_heads=4)
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
    model.random_init(7)
    save_weights(model, tmp_path)
    tensors = load_file(in_fp8(tmp_path, tmp_path) / SINGLE)
    tensors = {name: one * 1.3 if name.endswith("_scale_inv") else one.clone() for name, one in tensors.items()}
    zero = "model.layers.0.mlp.up_proj.weight"
    tensors[zero][256:], tensors[zero + "_scale_inv"][2:] = 0, 0
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})

    def work(peers: Peers) -> Decoder:
        return built(spec, FP8["fp8_full"], tmp_path, peers, LoraConfig(rank=4)).trainer_model()

    alone = work(ALONE)
    linears = dict(alone.float8_linears())
    assert torch.equal(linears["layers.0.mlp.down_proj"].scale, tensors[zero.replace("up", "down") + "_scale_inv"])
    assert not torch.equal(linears["layers.0.mlp.gate_up_proj"].scale[3:5], tensors[zero + "_scale_inv"][:2])
    assert_same(run_team(3, work), alone)


def test_the_parts_of_a_tensor_parallel_model_read_their_rows(tmp_path: Path) -> None:
    spec = replace(TINY["qwen3"], hidden_size=256, intermediate_size=512, head_size=64, num_heads=4, num_kv_heads=4)
    spec = replace(spec, vocab_size=8192)
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
    model.random_init(7)
    save_weights(model, tmp_path)

    def work(peers: Peers) -> tuple[Decoder, LoadCount]:
        mine = built(spec, FP8["fp8_full"], tmp_path, peers)
        return mine.trainer_model(), mine.count

    _, alone = work(ALONE)
    two, four = run_grid(1, 2, work), run_grid(2, 2, work)
    for rank in range(2):
        assert_same([four[rank][0], four[2 + rank][0]], two[rank][0])
    for team, most in ((two, 0.55), (four, 0.35)):  # vectors are whole, and the rows are few blocks
        assert max(one.read_bytes for _, one in team) < most * alone.read_bytes


def _changed(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = {name: one.clone() for name, one in load_file(folder / SINGLE).items()}
    change(tensors)
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return out


def _not_finite(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] = torch.inf


def _head_differs(tensors: dict[str, Tensor]) -> None:
    tensors[LM_HEAD] = tensors["model.embed_tokens.weight"].clone()
    tensors[LM_HEAD][0, 0] += 1


@pytest.mark.parametrize(
    ("change", "said"),
    [(_not_finite, "down_proj.weight' is not finite everywhere"), (_head_differs, "differs from the embedding")],
)
def test_what_one_worker_finds_wrong_ends_all_with_its_line(
    change: Callable[[dict[str, Tensor]], None], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The rows of another worker are right, and it must not wait for the first."""
    folder = _changed(folders["tied"], tmp_path, change)

    def work(peers: Peers) -> str:
        with pytest.raises(UserError) as error:
            built(SPECS["tied"], FP8["fp8"], folder, peers).trainer_model()
        return str(error.value)

    began = time.monotonic()
    alone, lines = work(ALONE), run_team(2, work, deadline_seconds=600.0)
    assert said in alone and lines == [alone, alone] and time.monotonic() - began < 200


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
    assert failing == "MemoryError: no room"
    assert waiting == "PeersLost: a worker failed in loading: MemoryError: no room"
    assert time.monotonic() - began < 200


def test_a_checkpoint_of_other_workers_is_read_by_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    from tests.unit.trainer.test_sharded_state import whole_state, write

    spec, fp8 = SPECS["untied"], FP8["fp8"]
    alone = built(spec, Fp8Config(), folders["untied"], ALONE).trainer_model()
    parameters = {name: one.detach() for name, one in alone.named_parameters()}
    path = write(tmp_path, whole_state("8bit", parameters), parameters, 3)
    (path / "config.json").write_text(json.dumps(hf_config(spec, "bfloat16")))

    def work(peers: Peers) -> tuple[Decoder, LoadCount]:
        mine = built(spec, fp8, path, peers)
        return mine.trainer_model(), mine.count

    expected, count = work(ALONE)
    assert_same([expected], built(spec, fp8, folders["untied"], ALONE).trainer_model())
    models, counts = zip(*run_team(2, work), strict=True)
    assert_same(list(models), expected)
    assert max(one.read_bytes for one in counts) < 0.75 * count.read_bytes


def test_random_weights_are_quantised_by_their_owners(folders: dict[str, Path]) -> None:
    from octetrl.workers.build import fill_weights

    spec, fp8 = SPECS["mla-moe"], FP8["fp8"]
    recipe = Recipe(model=ModelConfig(preset="tiny", init="random"), algorithm=objective(), fp8=fp8, seed=3)

    def work(peers: Peers) -> tuple[Decoder, LoadCount]:
        count = LoadCount()
        model = Decoder(spec, precision_policy(spec, fp8), "train", fp8_weights=peers.share.count == 1)
        keep_owned_rows(model, peers)
        load_shared(model, peers, lambda one, rows: fill_weights(one, recipe, rows), count)
        return model, count

    expected, alone = work(ALONE)
    models, counts = zip(*run_team(2, work), strict=True)
    assert_same(list(models), expected)
    assert sum(one.quantized_bytes for one in counts) == alone.quantized_bytes > 0
    assert sum(one.read_bytes for one in counts) == 0
