"""The trainer over a real (tiny) decoder: its gradient against plain autograd, and all that must not change it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.config.schema import OptimizerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.layers.context import PackedContext
from octetrl.models.decoder import Decoder
from octetrl.records import (
    Completion,
    FinishReason,
    PackedBatch,
    PolicyUpdate,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Sample,
    Task,
    Turn,
)
from octetrl.rollout.samples import to_samples
from octetrl.system.errors import UserError
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack
from octetrl.trainer.prepared import TrainerState
from octetrl.trainer.trainer import Trainer
from octetrl.trainer.without_update import observe_kv
from tests.objectives import objective
from tests.unit.trainer.tiny_trainer import BF16, FP8, random_samples, supervised, tiny_decoder, tiny_trainer

NO_REPLAY = KVReplay()
DYNAMIC = KVReplay(kv_mode="dynamic")


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {slot.name: slot.gradient.clone() for slot in trainer.optimizer.slots}


def train(trainer: Trainer, samples: list[Sample], kv: KVReplay = NO_REPLAY) -> PolicyUpdate:
    return trainer.train(pack(samples, trainer.layout, trainer.algorithm.token_weighting), kv, None)


def logprobs_of(model: Decoder, sample: Sample) -> Tensor:
    """One sequence alone, through torch's own log_softmax: float32 [trained tokens]."""
    ids = torch.tensor(sample.token_ids)
    context = PackedContext(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
    logits = (model(ids, torch.arange(len(ids)), context) @ model.lm_head_weight.t()).float()
    trained = torch.tensor(sample.loss_mask).nonzero().squeeze(1)
    return logits.log_softmax(-1)[trained - 1, ids[trained]]


@pytest.mark.parametrize("weighting", ["token", "sequence"])
def test_gradient_is_that_of_the_plain_formula(weighting: str) -> None:
    samples = random_samples(5)
    trainer = tiny_trainer(tiny_decoder(dtype=torch.float32), objective(token_weighting=weighting))
    model = tiny_decoder(dtype=torch.float32)
    losses = []
    for sample in samples:
        generator = torch.tensor([g for g, m in zip(sample.generator_logprobs, sample.loss_mask, strict=True) if m])
        logprobs = logprobs_of(model, sample)
        loss = -sample.advantage * (logprobs.detach() - generator).exp().clamp(max=2.0) * logprobs
        losses.append(loss.mean() if weighting == "sequence" else loss)
    torch.stack(losses).mean().backward() if weighting == "sequence" else torch.cat(losses).mean().backward()
    train(trainer, samples)
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("fp8", "kv"), [(BF16, NO_REPLAY), (FP8, DYNAMIC)])
def test_activation_checkpointing_changes_no_bit(fp8: object, kv: KVReplay) -> None:
    results = []
    for mode, layers in (("none", None), ("layer", None), ("layer", 1)):
        keeps: dict[str, Any] = {"activation_checkpointing": mode, "checkpointed_layers": layers}
        trainer = tiny_trainer(tiny_decoder(fp8), **keeps, collect_kv_amax=True)
        update = train(trainer, random_samples(4), kv)
        results.append((update.metrics["loss"], gradients(trainer), update.kv_amax_LS))
    plain, *others = results
    for checkpointed in others:
        assert plain[0] == checkpointed[0] and torch.equal(plain[2], checkpointed[2])
        for name, gradient in plain[1].items():
            assert torch.equal(gradient, checkpointed[1][name]), name


@pytest.mark.parametrize("checkpointing", ["none", "layer"])
def test_codes_that_are_made_anew_change_no_bit(checkpointing: str) -> None:
    results = []
    for weight_codes in ("kept", "remade"):
        config: dict[str, Any] = {"activation_checkpointing": checkpointing, "weight_codes": weight_codes}
        trainer = tiny_trainer(tiny_decoder(FP8), **config, minibatches=2, epochs=2)
        held: list[bool] = []
        projection = trainer.model.layers[0].attention.qkv_proj
        projection.register_forward_hook(lambda linear, *_, held=held: held.append(linear.has_codes))
        update = train(trainer, random_samples(4), DYNAMIC)
        assert all(linear.has_codes for _, linear in trainer.model.float8_linears())
        prepared = 2  # two micro-batches' log-probs before any update, by the codes that are there
        assert held[:prepared] == [True] * prepared and set(held[prepared:]) == {weight_codes == "kept"}
        codes = [linear.codes.view(torch.uint8) for _, linear in trainer.model.float8_linears()]
        results.append((update.metrics["loss"], [*trainer.state().weights.values(), *codes]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize(
    ("error", "advantage"),
    [(KeyboardInterrupt, 1.0), (torch.OutOfMemoryError, 1.0), (NonFiniteError, 1.0), (NonFiniteError, math.nan)],
)
def test_a_broken_off_update_brings_the_codes_back(
    error: type[BaseException], advantage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the norm of gradients, or by a sample, that is not finite."""
    trainer, reached = tiny_trainer(tiny_decoder(FP8), weight_codes="remade"), []
    samples = random_samples(2)
    samples[0] = replace(samples[0], advantage=advantage)
    clip = trainer.optimizer.clip_gradients

    def break_off(*_: object) -> Tensor:
        reached.append(all(linear.has_codes for _, linear in trainer.model.float8_linears()))
        if error is NonFiniteError:  # which the trainer raises itself
            return clip() if math.isnan(advantage) else torch.tensor(math.nan)
        raise error

    monkeypatch.setattr(trainer.optimizer, "clip_gradients", break_off)
    with pytest.raises(error):
        train(trainer, samples)
    assert reached == [False] and all(linear.has_codes for _, linear in trainer.model.float8_linears())


def test_only_the_first_layers_run_again() -> None:
    forwards: list[int] = []
    trainer = tiny_trainer(tiny_decoder(), activation_checkpointing="layer", checkpointed_layers=1)
    for index, layer in enumerate(trainer.model.layers):
        layer.attention.register_forward_hook(lambda *_, index=index: forwards.append(index))
    train(trainer, random_samples(2))
    count = len(trainer.model.layers)
    assert count > 1 and sorted(forwards) == sorted([*range(count), 0])


@pytest.mark.parametrize(("fp8", "kv"), [(BF16, NO_REPLAY), (FP8, DYNAMIC)])
def test_training_reduces_a_toy_loss(fp8: object, kv: KVReplay) -> None:
    trainer = tiny_trainer(tiny_decoder(fp8), objective(name="sft"))
    samples = supervised(random_samples(6))
    updates = [train(trainer, samples, kv) for _ in range(8)]
    losses = [update.metrics["loss"] for update in updates]
    assert losses[0] == pytest.approx(math.log(40), rel=0.2) and losses[-1] < 0.7 * losses[0]
    assert updates[-1].logprobs is None  # no engine drew these


def test_grpo_makes_the_better_answers_likelier() -> None:
    trainer = tiny_trainer()
    samples = [s for s in random_samples(8)]
    before = [logprobs_of(trainer.model, sample).sum().item() for sample in samples]
    train(trainer, samples)
    after = [logprobs_of(trainer.model, sample).sum().item() for sample in samples]
    gain = sum(s.advantage * (a - b) for s, a, b in zip(samples, after, before, strict=True))
    assert gain > 0


def test_first_pass_logprobs_are_those_before_any_update() -> None:
    samples = random_samples(6)
    model = tiny_decoder()
    expected = sorted(value for sample in samples for value in logprobs_of(model, sample).tolist())
    for minibatches, epochs in ((1, 1), (2, 1), (1, 2)):
        trainer = tiny_trainer(minibatches=minibatches, epochs=epochs)
        update = train(trainer, samples)
        assert update.metrics["train/updates"] == minibatches * epochs == trainer.optimizer.step_count
        logprobs = update.logprobs
        assert logprobs is not None and update.policy_version == 1
        assert sorted(logprobs.trainer_N.tolist()) == pytest.approx(expected, abs=0.02)
        generated = sorted(
            value for s in samples for value, mask in zip(s.generator_logprobs, s.loss_mask, strict=True) if mask
        )
        assert sorted(logprobs.generator_N.tolist()) == pytest.approx(generated)
        assert logprobs.target_positions_N.max() < logprobs.sequence_lengths_N.max()


def test_several_updates_take_their_ratio_against_the_first_pass() -> None:
    """The second epoch's ratio has left 1, so with a clip of width 0 about half of the tokens are clipped."""
    algorithm = objective(clip_low=0.0, clip_high=0.0)
    assert train(tiny_trainer(algorithm=algorithm), random_samples(4)).metrics["ratio/clip_fraction"] == 0.0
    twice = train(tiny_trainer(algorithm=algorithm, epochs=2), random_samples(4)).metrics["ratio/clip_fraction"]
    assert 0.15 < twice <= 0.5  # the mean of 0 and of what is clipped in the second


def group_of(*answers: tuple[int, float, RolloutStatus]) -> RolloutGroup:
    """Siblings by their number of tokens, reward and status."""
    task, rollouts = Task("t", "p"), []
    for length, reward, status in answers:
        completion = Completion((3,) * length, (-1.0,) * length, "", FinishReason.STOP, 0, "")
        rollouts.append(Rollout(task, (Turn((1, 2), completion),), status, reward))
    return RolloutGroup(task, tuple(rollouts))


def loss_of_groups(groups: list[RolloutGroup], **choices: object) -> tuple[float, int]:
    """Loss and trained tokens of the update that a recipe's objective makes of a step's groups. On-policy the ratio is
    1, so a token's loss is its negative advantage."""
    algorithm = objective(normalize_advantages=False, corrections=(), **choices)
    trainer = tiny_trainer(algorithm=algorithm)
    samples = [replace(one, precision_digest=None) for one in to_samples(groups, trainer.algorithm)]
    update = train(trainer, samples)
    assert update.logprobs is not None
    return update.metrics["loss"], len(update.logprobs.trainer_N)


@pytest.mark.parametrize("weighting", ["token", "sequence", "constant"])
def test_token_weighting_reaches_the_update(weighting: str) -> None:
    scored = RolloutStatus.SCORED
    groups = [group_of((2, 1.0, scored), (6, 0.0, scored), (4, 0.5, scored))]
    lengths, advantages = (2, 6, 4), (0.5, -0.5, 0.0)
    weights = {"token": [1 / 12] * 3, "sequence": [1 / length / 3 for length in lengths], "constant": [1 / 9 / 3] * 3}
    expected = -sum(a * n * w for a, n, w in zip(advantages, lengths, weights[weighting], strict=True))
    loss, tokens = loss_of_groups(groups, token_weighting=weighting, constant_length=9)
    assert loss == pytest.approx(expected, abs=1e-6) and tokens == 12


def test_overlong_mask_reaches_the_update() -> None:
    """What was cut off counts in the baseline, and is in neither the loss nor its denominator."""
    scored, cut = RolloutStatus.SCORED, RolloutStatus.TRUNCATED
    groups = [group_of((2, 1.0, scored), (7, 0.0, cut), (4, 0.5, scored))]
    masked, kept = (loss_of_groups(groups, token_weighting="token", overlong=way) for way in ("mask", "keep"))
    assert masked == (pytest.approx(-(0.5 * 2) / 6), 6) and kept == (pytest.approx(-(0.5 * 2 - 0.5 * 7) / 13), 13)


def test_stale_samples_are_not_on_policy() -> None:
    """The exact ratio of 1 cannot be clipped; the ratio to a generator half as sure can."""
    samples = [Sample(s.token_ids, s.loss_mask, tuple(-8.0 for _ in s.token_ids), 1.0, 0) for s in random_samples(4)]
    trainer = tiny_trainer()
    assert train(trainer, samples).metrics["ratio/clip_fraction"] == 0.0
    assert train(trainer, samples).metrics["ratio/clip_fraction"] == 1.0  # drawn by version 0, trained by 1


def test_reference_kl_starts_at_zero_and_grows() -> None:
    algorithm = objective(kl_coefficient=0.1)
    trainer = tiny_trainer(algorithm=algorithm, reference=tiny_decoder())
    first, second = (train(trainer, random_samples(4)).metrics["kl"] for _ in range(2))
    assert first == 0.0 and second > 0.0


def test_kv_amax_of_the_training_forward_is_that_of_a_forward_alone() -> None:
    samples = random_samples(5)
    trainer = tiny_trainer(collect_kv_amax=True)
    from_tokens = observe_kv(trainer, [sample.token_ids for sample in samples])
    batch = pack(samples, trainer.layout, "token")
    from_batch = observe_kv(trainer, batch)
    fused = trainer.train(batch, NO_REPLAY, None).kv_amax_LS
    assert fused is not None and fused.shape == (2, 2) and (fused > 0).all()
    assert torch.equal(from_tokens, fused) and torch.equal(from_batch, fused)
    assert tiny_trainer().train(batch, NO_REPLAY, None).kv_amax_LS is None, "only where it is asked for"


def test_an_empty_batch_changes_nothing() -> None:
    trainer = tiny_trainer()
    before = {name: tensor.clone() for name, tensor in trainer.state().weights.items()}
    update = trainer.train(PackedBatch((), (), None), NO_REPLAY, None)
    assert update == PolicyUpdate(0, {"train/skipped": 1.0})
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state().weights.items())


def test_a_loss_that_is_not_finite_names_the_micro_batch_and_steps_nothing() -> None:
    trainer = tiny_trainer(tokens_per_micro_batch=16)
    samples = random_samples(3, longest=10)
    bad = Sample((1, 2, 3), (False, True, True), (0.0, -3.0, -3.0), math.inf, 0)
    before = {name: tensor.clone() for name, tensor in trainer.state().weights.items()}
    with pytest.raises(NonFiniteError, match=r"micro-batch \d of \d .* nothing was updated"):
        train(trainer, [*samples, bad])
    assert trainer.optimizer.step_count == 0 and trainer.policy_version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state().weights.items())
    assert math.isfinite(train(trainer, samples).metrics["loss"])


def test_a_gradient_that_is_not_finite_names_the_tensor() -> None:
    trainer = tiny_trainer()
    trainer.model.get_parameter("layers.1.mlp.down_proj.weight").register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(NonFiniteError, match=r"micro-batch 1 of .*'layers\.1\.mlp\.down_proj\.weight' \(1 in all\)"):
        train(trainer, random_samples(3))


def test_tokens_that_met_a_non_finite_activation_are_counted() -> None:
    def overflow(module: torch.nn.Module, inputs: object, output_TE: torch.Tensor) -> torch.Tensor:
        return output_TE.index_fill(0, torch.tensor([1, 3]), torch.inf)

    trainer = tiny_trainer()
    assert train(trainer, random_samples(3)).metrics["train/non_finite_tokens"] == 0
    trainer.model.layers[-1].mlp.register_forward_hook(overflow)
    with pytest.raises(NonFiniteError, match="tokens with non-finite activations: 2:"):
        train(trainer, random_samples(3))


def test_another_precision_table_is_refused() -> None:
    trainer = tiny_trainer()
    batch = pack(random_samples(2), trainer.layout, "token")
    with pytest.raises(RuntimeError, match="precision table"):
        trainer.train(batch, NO_REPLAY, tiny_decoder(FP8).policy.digest)
    trainer.train(batch, NO_REPLAY, trainer.model.policy.digest)


@pytest.mark.parametrize("master", ["float32", "stochastic_rounding"])
def test_a_resumed_trainer_equals_one_never_stopped(master: str) -> None:
    """Weights, optimizer, schedule and rounding, bit for bit."""
    optimizer = OptimizerConfig(lr=1e-2, master=master, warmup_steps=2, decay="cosine", weight_decay=0.01)

    def run(trainer: Trainer, steps: range) -> list[dict[str, float]]:
        metrics = []
        for step in steps:
            samples = random_samples(4, seed=step, policy_version=trainer.policy_version)
            metrics.append(dict(train(trainer, samples, DYNAMIC).metrics))
        return [{name: value for name, value in one.items() if not name.endswith("second") and "time/" not in name}
                for one in metrics]  # fmt: skip

    straight = tiny_trainer(tiny_decoder(FP8), optimizer=optimizer, total_steps=4)
    expected = run(straight, range(4))
    stopped = tiny_trainer(tiny_decoder(FP8), optimizer=optimizer, total_steps=4)
    run(stopped, range(2))
    saved = stopped.state()
    copies = ({name: tensor.clone() for name, tensor in part.items()} for part in (saved.weights, saved.optimizer))
    resumed = tiny_trainer(tiny_decoder(FP8, seed=9), optimizer=optimizer, total_steps=4)
    resumed.load_state(TrainerState(*copies, saved.policy_version))
    assert run(resumed, range(2, 4)) == expected[2:]
    for name, tensor in straight.state().weights.items():
        assert torch.equal(tensor, resumed.state().weights[name]), name


def test_the_state_of_another_model_is_refused() -> None:
    trainer = tiny_trainer()
    state = trainer.state()
    weights = {name: tensor for name, tensor in state.weights.items() if name != "norm.weight"}
    with pytest.raises(UserError, match=r"'norm\.weight' is missing"):
        trainer.load_state(TrainerState(weights, state.optimizer, 3))
