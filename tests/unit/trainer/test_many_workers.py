"""One update by several workers, against the same update by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.objective_settings import AlgorithmConfig
from octetrl.config.schema import CriticConfig, OptimizerConfig, TrainerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.fp8.policy import precision_policy
from octetrl.layers.many_linears import LinearRows, quantize_rows
from octetrl.models.decoder import Decoder
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import PackedBatch, PolicyUpdate, Sample
from octetrl.trainer.critic import Critic
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.prepared import TrainerState
from octetrl.trainer.shards import GradientMode
from octetrl.trainer.trainer import Trainer
from tests.objectives import objective
from tests.team import run_team, share_of
from tests.unit.trainer.same_state import NORM, Step, assert_one_update, copy_of, joined, owned_part, step_of
from tests.unit.trainer.tiny_trainer import BF16, FP8, SPEC, random_samples, supervised

# Rows in several blocks, the last of them short; columns that are no multiple of 128.
ODD = replace(SPEC, hidden_size=72, intermediate_size=200, num_heads=3, head_size=24, vocab_size=301)


LR = 3e-3


class Run(NamedTuple):
    updates: list[PolicyUpdate]
    weights: Mapping[str, Tensor]
    codes: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]  # owned rows, of the last step
    steps: list[Step]

    @property
    def losses(self) -> list[float]:
        return [update.metrics["loss"] for update in self.updates]


def trained(
    peers: Peers,
    batches: Sequence[PackedBatch],
    algorithm: AlgorithmConfig,
    *,
    fp8: Fp8Config = BF16,
    tied: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    reference: bool = False,
    states: Sequence[TrainerState] | None = None,
    share: Callable[[PackedBatch, Peers], PackedBatch] = share_of,
    **config: object,
) -> Run:
    """`states`: of one worker, from which the updates begin; None: from those of this run. `share`: a worker's
    micro-batches."""
    spec = replace(ODD, tied_embeddings=tied, num_layers=1 if dtype == torch.float32 else 2)

    def model() -> Decoder:
        model = Decoder(spec, precision_policy(spec, fp8), "train", dtype=dtype)
        model.random_init(3)
        return model

    settings = {"optimizer": OptimizerConfig(lr=LR, max_grad_norm=0.5), "tokens_per_micro_batch": 40} | config
    trainer = Trainer(
        model(),
        config=TrainerConfig(**settings),
        algorithm=build_algorithm(algorithm),
        temperature=1.0,
        total_steps=100,
        reference=model() if reference else None,
        critic=_critic(peers, fp8) if algorithm.name == "ppo" else None,
        collect_kv_amax=fp8 == FP8,
        seed=5,
        peers=peers,
    )
    kv = KVReplay("dynamic") if fp8 == FP8 else KVReplay()
    steps = []
    for number, batch in enumerate(batches):
        if states is not None:
            trainer.load_state(owned_part(states[number], trainer.state(), trainer))
        before = copy_of(trainer.state())
        steps.append(step_of(trainer, before, trainer.train(share(batch, peers), kv, None)))
    linears = {name: linear for name, linear in trainer.model.float8_linears()}
    if peers.share.count > 1:
        assert not any(linear.has_weight for linear in linears.values())
    whole = {name: one.detach() for name, one in trainer.model.named_parameters() if one.untyped_storage().nbytes()}
    codes = {name: linear.codes.view(torch.uint8) for name, linear in linears.items()}
    gradients = {slot.name: slot.gradient for slot in trainer.optimizer.slots}
    return Run([step.update for step in steps], whole, codes, gradients, steps)


def _critic(peers: Peers, fp8: Fp8Config) -> Critic:
    model = ScalarDecoder(ODD, precision_policy(ODD, fp8))
    model.random_init(4)
    return Critic(model, CriticConfig(), TrainerConfig(), total_steps=100, seed=3, peers=peers)


def batches(count: int, *, sft: bool, samples: int = 6, **layout: object) -> list[PackedBatch]:
    drawn = [random_samples(samples, seed % 4) for seed in range(count)]
    chosen: list[list[Sample]] = [supervised(one) if sft else one for one in drawn]
    plan = PackingLayout(tokens_per_micro_batch=40, padded_attention=True, **layout)  # type: ignore[arg-type]
    return [pack(one, plan, "token") for one in chosen]


def assert_equal_everywhere(runs: Sequence[Run]) -> None:
    """Weights, codes and metrics are the same on every worker."""
    for other in runs[1:]:
        assert other.losses == runs[0].losses
        for mine, theirs in ((runs[0].weights, other.weights), (runs[0].codes, other.codes)):
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("fp8", "tied", "gradients", "counts", "dtype"),
    [
        (BF16, False, "local", (2, 4), torch.float32),
        (BF16, True, "sharded", (3,), torch.bfloat16),
        (FP8, False, "sharded", (2, 4), torch.float32),
        (FP8, True, "local", (2,), torch.bfloat16),
    ],
)
def test_sft_updates_as_one_worker_does_and_repeats_every_bit(
    fp8: Fp8Config, tied: bool, gradients: GradientMode, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """With four workers and three micro-batches, one worker has none."""
    given = batches(6, sft=True)

    def work(peers: Peers, states: Sequence[TrainerState] | None = None) -> Run:
        return trained(peers, given, objective(name="sft"), fp8=fp8, tied=tied, dtype=dtype, states=states)

    alone = work(ALONE)
    assert alone.losses[4] < 0.9 * alone.losses[0]
    states = [step.before for step in alone.steps]
    for count in counts:
        runs = run_team(count, partial(work, states=states), gradients=gradients)
        assert_equal_everywhere(runs)
        for step, *of_workers in zip(alone.steps, *(run.steps for run in runs), strict=True):
            assert_one_update(step, of_workers, LR)
    runs, again = (run_team(counts[0], work, gradients=gradients) for _ in range(2))
    assert runs[0].losses[4] < 0.9 * runs[0].losses[0]
    assert_equal_everywhere([*runs, *again])


def owned(step: Step) -> dict[str, Tensor]:
    """Gradients, masters, and the moments before the step."""
    moments = {name: one for name, one in step.before.optimizer.items() if one.dim()}
    return step.gradients | {f"master after {name}": one for name, one in step.masters.items()} | moments


def test_groups_of_owners_update_as_all_workers_do() -> None:
    """A sum of two micro-batches has one order, here over both groups, so that all bits are equal. The norm adds
    squares by owner."""
    given, unclipped = batches(2, sft=False), OptimizerConfig(lr=LR, max_grad_norm=1e9)

    def second_and_third(batch: PackedBatch, peers: Peers) -> PackedBatch:
        own = {1: slice(0, 1), 2: slice(1, 2)}.get(peers.share.rank, slice(0))
        return replace(batch, minibatches=tuple(minibatch[own] for minibatch in batch.minibatches))

    def work(peers: Peers) -> Run:
        return trained(peers, given, objective(name="grpo"), fp8=FP8, share=second_and_third, optimizer=unclipped)

    whole = run_team(4, work)
    modes: tuple[GradientMode, ...] = ("local", "sharded")
    for groups in (run_team(4, work, gradients=mode, owners=2) for mode in modes):
        assert_equal_everywhere([*whole, *groups])
        for number in range(len(given)):
            want, got = ([run.steps[number] for run in runs] for runs in (whole, groups))
            for mine, theirs in zip(got, want, strict=True):
                assert mine.update.logprobs is not None and theirs.update.logprobs is not None
                assert torch.equal(mine.update.logprobs.trainer_N, theirs.update.logprobs.trainer_N)
                assert mine.update.metrics["grad_norm"] == pytest.approx(theirs.update.metrics["grad_norm"], rel=NORM)
            expected = joined(map(owned, want))
            for group in (got[:2], got[2:]):
                found = joined(map(owned, group))
                assert found.keys() == expected.keys()
                assert all(torch.equal(one, expected[name]) for name, one in found.items())


@pytest.mark.parametrize("gradients", ["local", "sharded"])
@pytest.mark.parametrize("name", ["grpo", "reinforce_pp", "ppo"])
def test_one_update_of_a_policy(name: str, gradients: GradientMode) -> None:
    """Gradients, clipped by one norm; what depends on the whole batch; metrics; log-probs; amax of K and V."""
    changes = {"corrections": ("tis", "self_normalize")} if name == "grpo" else {"kl_in": "reward"}
    algorithm = objective(name=name, kl_coefficient=0.1, **changes)
    given = batches(1, sft=False)

    def work(peers: Peers) -> Run:
        return trained(peers, given, algorithm, fp8=FP8, reference=True)

    alone, runs = work(ALONE), run_team(3, work, gradients=gradients)
    assert_equal_everywhere(runs)
    want, got = alone.updates[0], runs[0].updates[0]
    for key, value in want.metrics.items():
        if not key.startswith(("time/", "train/tokens_per")):
            assert got.metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    assert want.kv_amax_LS is not None and want.logprobs is not None
    for run in runs:
        amax_LS, logprobs = run.updates[0].kv_amax_LS, run.updates[0].logprobs
        assert amax_LS is not None and torch.equal(amax_LS, want.kv_amax_LS)
        assert logprobs is not None
        assert sorted(logprobs.trainer_N.tolist()) == sorted(want.logprobs.trainer_N.tolist())
    together = joined(run.gradients for run in runs)
    assert together.keys() == alone.gradients.keys()
    for key, gradient in alone.gradients.items():
        torch.testing.assert_close(together[key], gradient, rtol=2e-5, atol=2e-6 * float(gradient.abs().max()))


def test_a_number_that_is_not_finite_on_one_worker_stops_all_before_they_update() -> None:
    (good, bad) = batches(2, sft=False)
    broken = replace(bad.minibatches[0][1], advantages_N=torch.full_like(bad.minibatches[0][1].advantages_N, math.inf))
    bad = replace(bad, minibatches=((bad.minibatches[0][0], broken, *bad.minibatches[0][2:]),))

    def work(peers: Peers) -> tuple[str, list[Tensor]]:
        trainer = _trainer(peers, BF16, "grpo")
        model = trainer.model
        trainer.train(share_of(good, peers), KVReplay(), None)
        before = [one.detach().clone() for one in model.parameters()]
        with pytest.raises(NonFiniteError) as error:
            trainer.train(share_of(bad, peers), KVReplay(), None)
        assert trainer.weights_are_whole and trainer.policy_version == 1
        assert all(map(torch.equal, before, model.parameters()))
        trainer.train(share_of(good, peers), KVReplay(), None)
        return str(error.value), before

    results = run_team(2, work)
    message = results[0][0]
    assert all(text == message for text, _ in results)
    assert "micro-batch 1 of 2 of worker 1 " in message and "the advantage of sample" in message, message


def test_codes_of_a_weight_that_is_not_finite_are_used_by_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where quantising reports nothing and leaves NaN in the scales, which all workers receive."""

    def quantize(parts: Mapping[str, LinearRows]) -> None:
        quantize_rows(parts)
        for name, part in parts.items():
            if name == "layers.0.mlp.gate_up_proj.weight" and part.first > 0:  # rows of the second worker alone
                part.linear.scale[-1, 0] = torch.nan

    monkeypatch.setattr("octetrl.trainer.shared_weights.quantize_rows", quantize)
    (batch,) = batches(1, sft=True)

    def work(peers: Peers) -> str:
        trainer = _trainer(peers)
        with pytest.raises(NonFiniteError) as error:
            trainer.train(share_of(batch, peers), KVReplay(), None)
        for _, linear in trainer.model.float8_linears():
            with pytest.raises(RuntimeError, match="codes are stale"):
                linear(torch.zeros(1, linear.in_features, dtype=torch.bfloat16))
        return str(error.value)

    assert run_team(2, work) == ["layers.0.mlp.gate_up_proj.weight is not finite"] * 2


def test_the_state_of_owned_rows_restores_every_bit() -> None:
    given = batches(4, sft=True)

    def work(peers: Peers) -> None:
        straight, resumed = (_trainer(peers) for _ in range(2))
        for batch in given[:2]:
            straight.train(share_of(batch, peers), KVReplay(), None)
        state = straight.state()
        weights, optimizer = (
            {key: one.clone() for key, one in part.items()} for part in (state.weights, state.optimizer)
        )
        resumed.load_state(TrainerState(weights, optimizer, state.policy_version))
        for trainer in (straight, resumed):
            for batch in given[2:]:
                trainer.train(share_of(batch, peers), KVReplay(), None)
        linears = zip(straight.model.float8_linears(), resumed.model.float8_linears(), strict=True)
        for (name, one), (_, other) in linears:
            assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8)), name
        for key, tensor in straight.state().weights.items():
            assert torch.equal(tensor, resumed.state().weights[key]), key

    run_team(2, work)


def _trainer(peers: Peers, fp8: Fp8Config = FP8, name: str = "sft") -> Trainer:
    model = Decoder(ODD, precision_policy(ODD, fp8), "train")
    model.random_init(3)
    return Trainer(
        model,
        config=TrainerConfig(tokens_per_micro_batch=40, optimizer=OptimizerConfig(master="stochastic_rounding")),
        algorithm=build_algorithm(objective(name=name)),
        temperature=1.0,
        total_steps=9,
        peers=peers,
    )
