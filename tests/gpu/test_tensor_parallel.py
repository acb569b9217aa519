"""Two workers that share a model by rows on a GPU, against one that has it whole.

One pair of processes computes all cases: on GPUs of their own, over their memory and NCCL, with captured decode steps;
or on the only GPU over gloo. Runs on Ray are in test_two_gpus.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.config.schema import LoraConfig, TrainerConfig
from octetrl.fp8.choose_backend import choose_backend
from octetrl.fp8.policy import precision_policy
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm, bf16_gemm_straight
from octetrl.kernels.gemm.fp8_gemm import fp8_gemm
from octetrl.kernels.gemm.linear_logprobs import lm_head_logits
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from octetrl.kernels.rows.gather_from_peers import PeerMemory, gather_from_peers
from octetrl.models.decoder import Decoder
from octetrl.models.tensor_rows import cut_rows_of, pieces_of
from octetrl.shapes.model_cuts import why_not_cut
from octetrl.shapes.spec import ModelSpec
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack
from octetrl.trainer.peers import ALONE, Peers, join_store, serve_store
from octetrl.trainer.shards import Share
from octetrl.trainer.tensor_peers import connect_grid
from octetrl.trainer.trainer import Trainer
from octetrl.trainer.without_update import accumulate_gradients
from tests.objectives import objective
from tests.parity.shapes import FULL, TINY
from tests.parity.short_run import ShortRun, assert_equal_in_every_step, assert_learned, short_run
from tests.parity.sides import PRECISIONS, draw_weights
from tests.required import missing
from tests.unit.trainer.tiny_trainer import random_samples, supervised

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("a shared model")]
SIZE, DEADLINE_SECONDS = 2, 120.0
REPLAYS = 200
SMALL: dict[str, ModelSpec] = {
    family: replace(
        spec,
        num_heads=4,
        num_kv_heads=2,
        head_size=128,
        hidden_size=512,
        intermediate_size=1024,
        vocab_size=16_424,  # five chunks, so the shares differ
    )
    for family, spec in TINY.items()
}


class Case(NamedTuple):
    """One run. `steps`: the first has equal weights, the second those of an update whose sums have another order."""

    spec: ModelSpec
    precision: str
    steps: int = 2
    lora: LoraConfig | None = None


CASES = {
    "llama bf16": Case(SMALL["llama"], "bf16"),
    "llama fp8": Case(SMALL["llama"], "fp8"),
    "qwen3 fp8_full": Case(SMALL["qwen3"], "fp8_full"),
    "qwen3 fp8_dynamic": Case(SMALL["qwen3"], "fp8_dynamic", 1),
    "biases bf16": Case(replace(SMALL["llama"], qkv_bias=True, o_bias=True), "bf16", 1),
    "qwen2.5 fp8_full": Case(SMALL["qwen2.5"], "fp8_full"),
    "qwen3 fp8_full lora": Case(SMALL["qwen3"], "fp8_full", lora=LoraConfig(rank=8)),
    "qwen3-8b bf16": Case(FULL["qwen3"], "bf16", 1),  # two layers of its widths: tuned GEMMs, a large vocabulary
    "qwen3-8b fp8_full": Case(FULL["qwen3"], "fp8_full", 1),
}
TOLERANCES = {"bf16": 0.01, "fp8": 0.03}  # of a gradient's norm; 0.0014 and 0.0037 with the emulation of a CPU


class Shared(NamedTuple):
    """The runs of one worker, by case, and its gradients, by precision and parameter. `gathered`: the number of gathers
    through the GPUs' memory that were compared; 0 on one GPU."""

    runs: Mapping[str, ShortRun]
    gradients: Mapping[str, Mapping[str, Tensor]]
    gathered: int = 0


def run_case(case: Case, device: str, peers: Peers) -> ShortRun:
    options = {"answers": 24, "tokens_per_micro_batch": 256, "releases": True}
    run = short_run(case.spec, case.precision, device, case.steps, peers=peers, lora=case.lora, **options)  # type: ignore[arg-type]
    run.weights = {} if case.lora is None else run.weights  # a large model's take long to send
    run.initial = run.initial if run.weights else {}
    return run


def gradients_of(precision: str, device: str, peers: Peers) -> dict[str, Tensor]:
    """The gradient sums of one batch, on the CPU."""
    spec = SMALL["qwen3"]
    model = Decoder(
        spec.cut(TensorCut(peers.group.rank, peers.group.size)),
        precision_policy(spec, PRECISIONS[precision]),
        "train",
        device=device,
        backend=choose_backend(device),
        group=peers.group,
    )
    draw_weights(model, 3)
    trainer = Trainer(
        model,
        config=TrainerConfig(tokens_per_micro_batch=256),
        algorithm=build_algorithm(objective(name="sft")),
        temperature=1.0,
        total_steps=9,
        peers=peers,
    )
    samples = supervised(random_samples(24, longest=90))
    accumulate_gradients(trainer, pack(samples, trainer.layout, "token"), KVReplay())
    trainer.optimizer.gradients.finish()
    return {slot.name: slot.gradient.float().cpu() for slot in trainer.optimizer.slots}


def all_of(device: str, peers: Peers) -> Shared:
    gathered = 0 if peers.group.memory is None else compared_gathers(peers.group.memory)
    runs = {name: run_case(case, device, peers) for name, case in CASES.items()}
    return Shared(runs, {precision: gradients_of(precision, device, peers) for precision in TOLERANCES}, gathered)


def compared_gathers(memory: PeerMemory) -> int:
    """Gathers of different shapes one after another in a captured graph, replayed with other values each time."""
    shapes = [(1, 64), (256, 2048), (17, 512), (3, 4096), (256, 6144), (64, 40_000), (130, 128), (5, 1024)]
    parts = [torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in shapes]
    flat = torch.zeros(7 * 44, dtype=torch.int32, device="cuda")

    def gathered() -> list[Tensor]:
        return [one for part in parts for one in gather_from_peers(memory, part, flat_F=flat)]

    def values(rank: int, replay: int) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(100 * replay + rank)
        drawn = [torch.randint(0, 1 << 30, one.shape, generator=generator, device="cuda") for one in (*parts, flat)]
        return [one.int() for one in drawn]

    gathered()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gathered()
    for replay in range(REPLAYS):
        of_all = [values(rank, replay) for rank in range(memory.count)]
        for target, value in zip((*parts, flat), of_all[memory.rank], strict=True):
            target.copy_(value)
        graph.replay()
        flats = torch.cat([one[-1] for one in of_all])
        for at in range(len(parts)):
            whole = torch.cat([one[at] for one in of_all], dim=1)
            assert torch.equal(found[2 * at], whole) and torch.equal(found[2 * at + 1], flats), (replay, shapes[at])
    assert not memory.has_failed
    return REPLAYS * len(parts)


def on_one_gpu(rank: int, address: str, over_nccl: bool, folder: Path) -> None:
    """The process of one worker."""
    if over_nccl:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    where = torch.device("cuda", 0) if over_nccl else torch.device("cpu")
    peers = connect_grid(join_store(address), Share(rank, SIZE), SIZE, where, deadline_seconds=DEADLINE_SECONDS)
    torch.save(all_of("cuda", peers), folder / f"{rank}.pt")
    peers.agree(None, "the end")
    peers.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[Shared]:
    """Of both workers."""
    folder = tmp_path_factory.mktemp("shared")
    store, address = serve_store("127.0.0.1")
    over_nccl = torch.cuda.device_count() >= SIZE
    torch.multiprocessing.spawn(on_one_gpu, (address, over_nccl, folder), nprocs=SIZE)
    assert store is not None
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


@pytest.mark.parametrize("name", CASES)
def test_log_probs_are_those_of_one_gpu(name: str, shared: list[Shared]) -> None:
    """Tokens and log-probs of the first step are those of one GPU to the bit. Engine and trainer agree in all steps."""
    case = CASES[name]
    assert why_not_cut(case.spec, SIZE) is None
    alone = run_case(case._replace(steps=1), "cuda", ALONE)
    assert_equal_in_every_step(alone)
    first, second = (one.runs[name] for one in shared)
    for run in (first, second):
        assert_equal_in_every_step(run)
        assert len(run.metrics) == case.steps
        assert run.tokens == first.tokens and run.logprobs == first.logprobs
    assert first.tokens[: len(alone.tokens)] == alone.tokens
    assert first.logprobs[: len(alone.logprobs)] == alone.logprobs
    assert first.metrics[0]["loss"] == pytest.approx(alone.metrics[0]["loss"], rel=1e-5)
    assert first.metrics[0]["grad_norm"] == pytest.approx(alone.metrics[0]["grad_norm"], rel=0.02)
    if case.lora is not None:
        assert_learned(first)


def test_parts_travel_through_the_memory_of_the_gpus(shared: list[Shared]) -> None:
    if torch.cuda.device_count() < SIZE:
        missing("two-gpus", "fewer than two GPUs are visible")
    assert all(one.gathered >= REPLAYS for one in shared)


@pytest.mark.parametrize("precision", TOLERANCES)
def test_gradients_are_those_of_one_gpu_to_rounding(precision: str, shared: list[Shared]) -> None:
    """A gradient of activations is the sum of the workers' partial products, rounded to BF16 behind each linear; in FP8
    the next linear quantises it, which a rounding may turn to the neighbouring code."""
    alone = gradients_of(precision, "cuda", ALONE)
    assert_near(alone, [one.gradients[precision] for one in shared], TOLERANCES[precision])


def assert_near(alone: Mapping[str, Tensor], parts: list[Mapping[str, Tensor]], tolerance: float) -> None:
    for rank, gradients in enumerate(parts):
        assert gradients.keys() == alone.keys()
        cut = cut_rows_of(SMALL["qwen3"].cut(TensorCut(rank, SIZE)))
        for name, gradient in gradients.items():
            pieces = pieces_of(cut.get(name), 0, gradient.shape[0])
            whole = torch.cat([alone[name][one.whole : one.whole + one.rows] for one in pieces])
            error = float((gradient - whole).norm() / whole.norm())
            assert error < tolerance, f"{name} of worker {rank}: {error:.4f}"


@pytest.mark.parametrize("num_rows", [1, 16, 100, 700, 2048])
def test_a_product_with_some_rows_of_a_weight_has_the_bits_of_the_whole(num_rows: int) -> None:
    """Qwen3-8B's qkv and down projections and the first half of its lm_head."""
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(rows: int, columns: int) -> Tensor:
        values = torch.randn(rows, columns, device="cuda", generator=generator, dtype=torch.bfloat16)
        return values * columns**-0.5

    for rows, columns in ((6144, 4096), (4096, 12_288)):
        weight, x = drawn(rows, columns), drawn(num_rows, columns)
        half = slice(rows // 2, rows)
        assert torch.equal(bf16_gemm_straight(x, weight[half]), bf16_gemm(x, weight)[:, half])
        x8, whole, part = quantize_activation(x), quantize_weight(weight), quantize_weight(weight[half].contiguous())
        assert torch.equal(fp8_gemm(x8, part), fp8_gemm(x8, whole)[:, half])
    for vocab_size in (151_936, SMALL["qwen3"].vocab_size):
        head, hidden = drawn(vocab_size, 4096), drawn(num_rows, 4096)
        own = TensorCut(0, SIZE).vocabulary(vocab_size)
        ours = bf16_gemm_straight(hidden, head[own.start : own.stop], torch.float32)
        assert torch.equal(ours, lm_head_logits(hidden, head)[:, own.start : own.stop])
