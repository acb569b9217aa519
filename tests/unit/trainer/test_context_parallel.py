"""Workers that share micro-batches, against one worker: equal bits of log-probs, loss, gradients of activations, and
codes of wgrad's operands; gradients of weights up to the order of sums."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.config.objective_settings import AlgorithmConfig
from octetrl.config.schema import OptimizerConfig, TrainerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.fp8.policy import precision_policy
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_packed import attention_packed_forward_reference
from octetrl.kernels.rows.silu_mul import silu_mul_backward_reference, silu_mul_reference
from octetrl.layers import linear
from octetrl.models import training_forward
from octetrl.models.blocks.attention import training as attention_training
from octetrl.models.blocks.mlp import training as mlp_training
from octetrl.models.decoder import Decoder, RunLayer
from octetrl.records import PackedBatch, PolicyUpdate, Sample
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer import activation_checkpoint
from octetrl.trainer.context_parallel import ContextTrainer
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.peers import ALONE, Peers, PeersLost
from octetrl.trainer.trainer import Trainer
from octetrl.trainer.without_update import held_out_sums
from octetrl.workers.assignment import Costs, deal
from tests.objectives import objective
from tests.parity.shapes import MODELS
from tests.parity.sides import PRECISIONS
from tests.team import run_team
from tests.unit.trainer.same_state import joined

BF16, FLOAT32 = torch.bfloat16, torch.float32
CODES = threading.local()  # `made`: of this thread's worker, in the order of its backward
OF_ROUNDING = 6e-3  # each worker rounds its part of a weight's gradient to BF16, one worker only the whole


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = linear._TOKEN_QUANTIZERS["emulated"]

    def record(*arguments: Any) -> Quantized:
        CODES.made.append(quantize(*arguments))
        return CODES.made[-1]

    monkeypatch.setitem(linear._TOKEN_QUANTIZERS, "emulated", record)


class Trained(NamedTuple):
    update: PolicyUpdate
    activations: list[Tensor]  # gradients of the residual stream, after the layers and before them
    codes: list[Quantized]
    gradients: dict[str, Tensor]  # of owned rows, clipped


def drawn(spec: ModelSpec, lengths: Sequence[int], *, prompt: float = 0.4) -> list[Sample]:
    draw, samples = random.Random(len(lengths)), []
    for number, length in enumerate(lengths):
        mask = tuple(place >= max(1, int(prompt * length)) for place in range(length))
        logprobs = tuple(draw.uniform(-4.8, -4.2) if trained else 0.0 for trained in mask)
        tokens = tuple(draw.randrange(spec.vocab_size) for _ in range(length))
        samples.append(Sample(tokens, mask, logprobs, draw.uniform(-2, 2), 0, group=number // 2))
    return samples


def in_pairs(samples: Sequence[Sample]) -> list[Sample]:
    return [
        replace(one, generator_logprobs=None, policy_version=None, group=None, pair=at // 2, chosen=at % 2 == 0)
        for at, one in enumerate(samples)
    ]


def trainer_of(
    peers: Peers, spec: ModelSpec, precision: str, dtype: torch.dtype, algorithm: AlgorithmConfig, **config: Any
) -> Trainer:
    policy = precision_policy(spec, PRECISIONS[precision])
    models = [Decoder(spec, policy, "train", dtype=dtype) for _ in range(2 if algorithm.keeps_reference else 1)]
    for model in models:
        model.random_init(3)
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=1e9)
    return (Trainer if peers is ALONE else ContextTrainer)(
        models[0],
        config=TrainerConfig(optimizer=optimizer, tokens_per_micro_batch=4096, **config),
        algorithm=build_algorithm(algorithm),
        temperature=0.9,
        total_steps=9,
        reference=models[1] if algorithm.keeps_reference else None,
        collect_kv_amax=policy.kv_mode == "calibrated",
        seed=5,
        peers=peers,
    )


def trained(peers: Peers, parts: Sequence[PackedBatch], *model: Any, **config: Any) -> Trained:
    CODES.made, activations = [], list[Tensor]()
    trainer = trainer_of(peers, *model, **config)
    for module in (trainer.model.embedding, *trainer.model.layers):
        module.register_forward_hook(lambda _, __, out: _kept(out, activations))
    mode, spec = trainer.model.policy.kv_mode, trainer.model.spec
    scale_LS = torch.full((spec.num_layers, spec.num_cache_scales), 0.02) if mode == "calibrated" else None
    update = trainer.train(parts[peers.share.rank], KVReplay(mode, scale_LS), None)
    gradients = {slot.name: slot.gradient.clone() for slot in trainer.optimizer.slots}
    return Trained(update, activations, CODES.made, gradients)


def _kept(out: Tensor, activations: list[Tensor]) -> None:
    if out.requires_grad:
        out.register_hook(activations.append)


def dealt(batch: PackedBatch, count: int, *groups: int) -> list[PackedBatch]:
    return deal(batch, count, Costs(1.0, 1.0, groups or (count,)))


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest distance of a gradient, relative to its norm."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - one).norm() / one.norm()) for name, one in expected.items() if one.any())


def assert_equal_metrics(team: Sequence[Trained], alone: Trained, rounding: float) -> None:
    want = alone.update.metrics
    for one in team:
        assert one.update.metrics.keys() == want.keys()
        for name, value in want.items():
            if not name.startswith(("time/", "train/tokens_per")):
                within = rounding if name == "grad_norm" else 1e-5
                assert one.update.metrics[name] == pytest.approx(value, rel=within, abs=1e-6), name


@pytest.mark.parametrize(
    ("family", "precision", "count", "dtype", "name", "config"),
    [
        ("qwen3", "fp8", 2, BF16, "grpo", {}),
        ("llama", "fp8_full", 2, BF16, "dpo", {}),
        ("qwen2.5", "bf16", 2, BF16, "gspo", {}),
        ("qwen3", "fp8_full", 4, FLOAT32, "grpo", {}),
        ("direct", "bf16", 2, BF16, "cispo", {}),
        ("low_rank", "fp8_full", 4, FLOAT32, "grpo", {}),
        ("softmax", "fp8_full", 2, FLOAT32, "grpo", {"router": {"balance_loss": 1.0, "z_loss": 0.1}}),
        ("gpt-oss", "fp8_full", 2, BF16, "rloo", {}),
    ],
)
def test_a_shared_micro_batch_trains_as_on_one_worker(
    family: str, precision: str, count: int, dtype: torch.dtype, name: str, config: dict[str, Any]
) -> None:
    """The first prompt is so long that the first worker has no trained token. With more workers than KV heads parts of
    dK and dV are added in another order than one worker's, so a gradient of an activation may be rounded otherwise."""
    spec = replace(MODELS[family], num_layers=2 if family == "gpt-oss" else 1)
    config = {"activation_checkpointing": "none", **config}
    samples = drawn(spec, (190, 70, 40, 10) if count == 2 else (200, 90, 70, 40), prompt=0.7)
    batch = pack(in_pairs(samples) if name == "dpo" else samples, PackingLayout(4096), "token")
    parts = dealt(batch, count)
    model = spec, precision, dtype, objective(name=name, **({"kl_coefficient": 0.1} if name == "gspo" else {}))
    alone = trained(ALONE, [batch], *model, **config)
    team = run_team(count, lambda peers: trained(peers, parts, *model, **config))
    sums_heads = spec.num_kv_heads % count > 0
    for one in team:
        assert one.update.metrics["loss"] == alone.update.metrics["loss"]
        assert (one.update.logprobs is None) == (alone.update.logprobs is None)
        if one.update.logprobs is not None and alone.update.logprobs is not None:
            assert torch.equal(one.update.logprobs.trainer_N, alone.update.logprobs.trainer_N)
        if alone.update.kv_amax_LS is not None:
            assert torch.equal(one.update.kv_amax_LS, alone.update.kv_amax_LS)
    for whole, *own in zip(alone.activations, *(one.activations for one in team), strict=True):
        assert sorted(map(len, own)) == ([128, 182] if count == 2 else [16, 128, 128, 128])
        if sums_heads:
            torch.testing.assert_close(torch.cat(own), whole, rtol=0, atol=2e-5 * float(whole.abs().max()))
        else:
            assert torch.equal(torch.cat(own), whole)
    for whole, *own in zip(alone.codes, *(one.codes for one in team), strict=True):
        codes = torch.cat([one.codes for one in own], 1)
        differ = int((codes.float() != whole.codes.float()).sum())
        assert differ <= (codes.numel() >> 10 if sums_heads else 0)
        assert sums_heads or torch.equal(torch.cat([one.scale for one in own], 1), whole.scale)
    rounding = 2e-5 if dtype == FLOAT32 and not sums_heads else OF_ROUNDING
    assert apart(joined(one.gradients for one in team), alone.gradients) < rounding
    assert_equal_metrics(team, alone, rounding)


@pytest.mark.parametrize(
    ("family", "precision", "checkpointing"),
    [("qwen3", "fp8_full", "attention"), ("gpt-oss", "bf16", "none"), ("low_rank", "fp8_full", "layer")],
)
def test_the_fused_forms_of_a_gpu_share_too(
    family: str, precision: str, checkpointing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by the kernels' references."""

    def fused(_: Decoder, keep: training_forward.Keep) -> RunLayer:
        return partial(training_forward._run_layer, keep=keep)

    monkeypatch.setattr(activation_checkpoint, "fused_layer_runner", fused)
    monkeypatch.setattr(attention_training, "attention_packed_forward_triton", attention_packed_forward_reference)
    monkeypatch.setattr(mlp_training, "silu_mul_triton", silu_mul_reference)
    monkeypatch.setattr(mlp_training, "silu_mul_backward_triton", silu_mul_backward_reference)
    spec = replace(MODELS[family], num_layers=1)
    batch = pack(drawn(spec, (190, 70, 40, 10)), PackingLayout(4096), "token")
    parts, model = dealt(batch, 2), (spec, precision, BF16, objective())
    alone = trained(ALONE, [batch], *model, activation_checkpointing=checkpointing)
    team = run_team(2, lambda peers: trained(peers, parts, *model, activation_checkpointing=checkpointing))
    (whole,), owns = alone.activations, [one.activations for one in team]
    assert torch.equal(torch.cat([own for (own,) in owns]), whole)
    assert team[0].update.metrics["loss"] == alone.update.metrics["loss"]
    assert apart(joined(one.gradients for one in team), alone.gradients) < OF_ROUNDING


LONG = (300, 100, 90, 80, 60, 50, 40)  # the first is a micro-batch of its own, and costs more than all others


@pytest.mark.parametrize(("gradients", "name"), [("local", "reinforce_pp"), ("sharded", "grpo")])
def test_a_group_beside_workers_alone_trains_as_one_worker_and_repeats_its_bits(gradients: Any, name: str) -> None:
    spec = replace(MODELS["qwen3"], num_layers=1)
    algorithm = objective(name=name, kl_coefficient=0.1, **({"kl_in": "reward"} if name == "reinforce_pp" else {}))
    batch = pack(drawn(spec, LONG), PackingLayout(128), "token")
    parts = dealt(batch, 4, 1, 2, 4)
    shared = [{one.shared.rows[-1] for one in part.minibatches[0] if one.shared} for part in parts]
    assert shared == [{300}, {300}, set(), set()]
    model = spec, "fp8_full", FLOAT32, algorithm

    def work(peers: Peers) -> Trained:
        return trained(peers, parts, *model)

    alone = trained(ALONE, [batch], *model)
    team, again = (run_team(4, work, gradients=gradients) for _ in range(2))
    assert_equal_metrics(team, alone, 2e-5)
    found, repeated = (joined(one.gradients for one in each) for each in (team, again))
    assert all(torch.equal(one, repeated[name]) for name, one in found.items())
    assert apart(found, alone.gradients) < 2e-5
    got, want = ([one.update.logprobs for one in each] for each in (team, [alone]))
    assert got[0] is not None and want[0] is not None
    assert sorted(got[0].trainer_N.tolist()) == sorted(want[0].trainer_N.tolist())


def test_losses_of_held_out_samples_have_the_bits_of_one_worker() -> None:
    spec = MODELS["llama"]
    batch = pack([replace(one, generator_logprobs=None) for one in drawn(spec, LONG)], PackingLayout(128), "token")
    parts = dealt(batch, 2, 1, 2)
    assert any(one.shared for one in parts[0].minibatches[0])

    def measured(peers: Peers, parts: Sequence[PackedBatch]) -> list[Any]:
        trainer = trainer_of(peers, spec, "bf16", BF16, objective(name="sft"))
        return held_out_sums(trainer, parts[peers.share.rank], KVReplay())

    of_workers = run_team(2, lambda peers: measured(peers, parts))
    alone = measured(ALONE, [batch])
    assert sorted(one["loss"] for part in of_workers for one in part) == sorted(one["loss"] for one in alone)


def test_a_number_that_is_not_finite_stops_all_and_a_lost_member_is_named() -> None:
    spec = MODELS["qwen3"]
    batch = pack(drawn(spec, (300, 60)), PackingLayout(4096), "token")
    (one,) = batch.minibatches[0]
    broken = replace(batch, minibatches=((replace(one, advantages_N=one.advantages_N / 0),),))
    parts = dealt(broken, 2)

    def refused(peers: Peers) -> str:
        with pytest.raises(NonFiniteError) as error:
            trained(peers, parts, spec, "bf16", BF16, objective())
        return str(error.value)

    texts = run_team(2, refused)
    assert texts[0] == texts[1] and "the advantage of sample" in texts[0]

    def lost(peers: Peers) -> None:
        trainer = trainer_of(peers, spec, "bf16", BF16, objective())
        if peers.share.rank == 0:
            trainer.train(parts[0], KVReplay(), None)
        trainer.model.layers[1].register_forward_pre_hook(_dies)
        with pytest.raises(ZeroDivisionError):
            trainer.train(parts[1], KVReplay(), None)

    with pytest.raises(PeersLost, match="worker 0 of 2, phase 'context parallel'"):
        run_team(2, lost, deadline_seconds=2.0)


def _dies(*_: Any) -> None:
    raise ZeroDivisionError
