"""The trainer on a Hopper GPU: FP8 tensor cores, KV replay, masters and checkpoints of device tensors."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import OptimizerConfig, TrainerConfig
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.records import Sample
from octetrl.trainer.checkpoint import load
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack
from octetrl.trainer.prepared import TrainerState
from octetrl.trainer.trainer import Trainer
from octetrl.trainer.without_update import accumulate_gradients
from tests.objectives import objective
from tests.saved_checkpoint import save_checkpoint
from tests.tiny_spec import TINY_SPEC

pytestmark = pytest.mark.gpu

SPEC = replace(TINY_SPEC, hidden_size=256, intermediate_size=512, head_size=64, vocab_size=1000, max_positions=512)
BF16 = Fp8Config()
FP8 = Fp8Config(rollout=True, train=True, kv_cache="dynamic")
MODES = pytest.mark.parametrize(
    ("fp8", "kv"), [(BF16, KVReplay()), (FP8, KVReplay(kv_mode="dynamic"))], ids=["bf16", "fp8"]
)


def make_trainer(fp8: Fp8Config, *, seed: int = 0, algorithm: str = "grpo", **config: object) -> Trainer:
    backend = "scaled_mm" if fp8.train else "emulated"
    model = Decoder(SPEC, precision_policy(SPEC, fp8), "train", device="cuda", backend=backend)
    model.random_init(seed)
    optimizer = OptimizerConfig(lr=3e-3, max_grad_norm=1e9, master=str(config.pop("master", "float32")))
    return Trainer(
        model,
        config=TrainerConfig(optimizer=optimizer, **{"tokens_per_micro_batch": 1024} | config),
        algorithm=build_algorithm(objective(name=algorithm)),
        temperature=1.0,
        total_steps=10,
        collect_kv_amax=True,
    )


def make_samples(count: int, *, supervised: bool = False) -> list[Sample]:
    draw = random.Random(0)
    samples = []
    for _ in range(count):
        length = draw.randint(20, 200)
        tokens, mask = tuple(draw.randrange(50) for _ in range(length)), (False,) * 4 + (True,) * (length - 4)
        logprobs = None if supervised else (-6.9,) * length
        advantage = 1.0 if supervised else draw.uniform(-1, 1)
        samples.append(Sample(tokens, mask, logprobs, advantage, None if supervised else 0))
    return samples


def train(trainer: Trainer, samples: list[Sample], kv: KVReplay) -> dict[str, float]:
    return dict(trainer.train(pack(samples, trainer.layout, "token"), kv, None).metrics)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {slot.name: slot.gradient.clone() for slot in trainer.optimizer.slots}


@MODES
def test_training_reduces_the_loss(fp8: Fp8Config, kv: KVReplay) -> None:
    trainer = make_trainer(fp8, algorithm="sft")
    samples = make_samples(16, supervised=True)
    losses = [train(trainer, samples, kv)["loss"] for _ in range(10)]
    assert losses[-1] < 0.75 * losses[0]


@MODES
def test_activation_checkpointing_changes_no_bit(fp8: Fp8Config, kv: KVReplay) -> None:
    results = []
    for mode, layers in (("none", None), ("layer", None), ("attention", 1)):
        trainer = make_trainer(fp8, activation_checkpointing=mode, checkpointed_layers=layers)
        train(trainer, make_samples(12), kv)
        results.append(gradients(trainer))
    for name, gradient in results[0].items():
        assert all(torch.equal(gradient, result[name]) for result in results[1:]), name


@pytest.mark.parametrize("checkpointing", ["none", "attention", "layer"])
def test_codes_made_anew_change_no_bit_and_take_no_memory(checkpointing: str) -> None:
    results, held = [], []
    for weight_codes in ("kept", "remade"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        trainer = make_trainer(FP8, activation_checkpointing=checkpointing, weight_codes=weight_codes)
        accumulate_gradients(trainer, pack(make_samples(12), trainer.layout, "token"), KVReplay(kv_mode="dynamic"))
        held.append(torch.cuda.memory_allocated() - before)
        trainer.model.requantize()
        codes = {name: linear.codes.view(torch.uint8).clone() for name, linear in trainer.model.float8_linears()}
        results.append(gradients(trainer) | codes)
        del trainer
    tables = 1 << 14  # bytes of kernels/table.py, which are kept
    freed = 2 * sum(one.numel() for one in codes.values())
    assert held[0] - held[1] >= freed - tables, "both orientations are freed"
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


def test_packing_changes_the_gradient_by_rounding_alone() -> None:
    results = []
    for budget in (256, 4096):
        trainer = make_trainer(BF16, tokens_per_micro_batch=budget)
        train(trainer, make_samples(12), KVReplay())
        results.append(gradients(trainer))
    for name, gradient in results[0].items():
        assert (gradient - results[1][name]).norm() < 0.02 * gradient.norm(), name


@pytest.mark.parametrize("master", ["float32", "stochastic_rounding"])
def test_a_saved_trainer_comes_back_bit_for_bit(tmp_path: Path, master: str) -> None:
    trainer, kv = make_trainer(FP8, master=master), KVReplay(kv_mode="dynamic")
    train(trainer, make_samples(6), kv)
    state = trainer.state()
    path = save_checkpoint(
        tmp_path, 1, {"weights.safetensors": state.weights, "optimizer.safetensors": state.optimizer}
    )
    restored, saved = make_trainer(FP8, seed=7, master=master), load(path)
    restored.load_state(TrainerState(saved.tensors("weights.safetensors"), saved.tensors("optimizer.safetensors"), 1))
    for part in ("weights", "optimizer"):
        for name, tensor in getattr(trainer.state(), part).items():
            assert torch.equal(tensor, getattr(restored.state(), part)[name]), name
    assert restored.policy_version == trainer.policy_version == 1
    samples = make_samples(6)
    assert train(trainer, samples, kv)["loss"] == train(restored, samples, kv)["loss"]


def test_amax_of_k_and_v_is_observed_on_the_device() -> None:
    trainer = make_trainer(FP8)
    batch = pack(make_samples(4), trainer.layout, "token")
    amax_LS = trainer.train(batch, KVReplay(kv_mode="dynamic"), None).kv_amax_LS
    assert amax_LS is not None and amax_LS.is_cuda and (amax_LS > 0).all()
