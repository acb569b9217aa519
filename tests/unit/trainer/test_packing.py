"""Packing: every token once, budgets kept, the fields of a micro-batch worked out by hand."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.records import MicroBatch, PackedBatch, Sample
from octetrl.trainer.packing import PackingLayout, pack, pack_for_calibration


def sample(length: int, first: int = 0, trained: int = 2, **changes: object) -> Sample:
    mask = tuple(position >= length - trained for position in range(length))
    fields = {"generator_logprobs": (-0.5,) * length, "advantage": float(first), "policy_version": 3}
    return Sample(tuple(range(first, first + length)), mask, **(fields | changes))


def micro_batches(batch: PackedBatch) -> list[MicroBatch]:
    return [micro_batch for minibatch in batch.minibatches for micro_batch in minibatch]


def test_fields_by_hand() -> None:
    long = Sample((10, 11, 12, 13), (False, True, False, True), (0.0, -1.0, 0.0, -3.0), 0.5, 7)
    short = Sample((20, 21, 22), (False, False, True), (0.0, 0.0, -5.0), -2.0, 7)
    batch = pack([short, long], PackingLayout(16), "sequence")
    (micro_batch,) = micro_batches(batch)
    assert batch.loss_denominators == (2.0,) and batch.policy_version == 7
    assert micro_batch.token_ids_T.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert micro_batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert micro_batch.cu_seqlens_B1.tolist() == [0, 4, 7] and micro_batch.cu_seqlens_B1.dtype == torch.int32
    assert micro_batch.max_seqlen == 4
    assert micro_batch.predictor_N.tolist() == [0, 2, 5]
    assert micro_batch.targets_N.tolist() == [11, 13, 22]
    assert micro_batch.weights_N.tolist() == [0.5, 0.5, 1.0]
    assert micro_batch.advantages_N.tolist() == [0.5, 0.5, -2.0]
    assert micro_batch.generator_logprobs_N is not None
    assert micro_batch.generator_logprobs_N.tolist() == [-1.0, -3.0, -5.0]
    assert micro_batch.sequence_N.tolist() == [0, 0, 1]
    assert micro_batch.target_positions_N.tolist() == [1, 3, 2]
    assert micro_batch.sequence_lengths_N.tolist() == [4, 4, 3]


def test_dtypes_of_all_fields() -> None:
    changes = {"pair": 0, "group": 1, "temperature": 0.5}
    pair = [sample(5, chosen=one == 0, cut_off=one == 0, policy_version=one, **changes) for one in range(2)]
    (micro_batch,) = micro_batches(pack(pair, PackingLayout(16), "token"))
    found = {field.name: getattr(micro_batch, field.name) for field in fields(micro_batch)}
    assert type(found.pop("max_seqlen")) is int
    assert (found.pop("shared"), found.pop("reports")) == (None, True)
    float32s = ("weights_N", "advantages_N", "generator_logprobs_N", "temperatures_N")
    others = {"cu_seqlens_B1": torch.int32}
    expected = others | dict.fromkeys(float32s, torch.float32) | dict.fromkeys(("chosen_N", "cut_off_N"), torch.bool)
    assert {name: one.dtype for name, one in found.items()} == {name: expected.get(name, torch.int64) for name in found}


@pytest.mark.parametrize(
    ("weighting", "weights"), [("sequence", [0.25, 0.25, 0.5]), (8, [0.125] * 3), ("token", [1.0] * 3)]
)
def test_a_rollout_weighs_the_same_in_one_segment_or_several(weighting: Any, weights: list[float]) -> None:
    """Of a rollout of 1 + 3 trained tokens in two segments, and one of 2 tokens."""
    segments = [sample(5, 0, trained=1, rollout=0), sample(6, 10, trained=3, rollout=0), sample(7, 20, rollout=1)]
    batch = pack(segments, PackingLayout(32), weighting)
    (micro_batch,) = micro_batches(batch)
    found = {
        int(token) // 10: float(one) for token, one in zip(micro_batch.targets_N, micro_batch.weights_N, strict=True)
    }
    assert [found[number] for number in range(3)] == weights
    assert batch.loss_denominators == (6.0 if weighting == "token" else 2.0,)


@settings(max_examples=30)
@given(segments=st.lists(st.integers(1, 3), min_size=1, max_size=8), minibatches=st.integers(1, 4))
def test_the_segments_of_a_rollout_share_a_minibatch(segments: list[int], minibatches: int) -> None:
    samples = [sample(4, 100 * one, rollout=one) for one, count in enumerate(segments) for _ in range(count)]
    batch = pack(samples, PackingLayout(8, minibatches), "sequence")
    parts = [{int(t) // 100 for m in part for t in m.targets_N} for part in batch.minibatches]
    assert sum(map(len, parts)) == len(segments)
    assert [len(part) for part in parts] == [int(one) for one in batch.loss_denominators]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_first_fit_decreasing() -> None:
    batch = pack([sample(n) for n in (3, 9, 4, 6, 7)], PackingLayout(13), "token")
    assert [m.cu_seqlens_B1.diff().tolist() for m in micro_batches(batch)] == [[9, 4], [7, 6], [3]]
    assert batch.metrics["train/packing_efficiency"] == pytest.approx(29 / 39)


def test_neighbours_in_length_share_where_attention_pads() -> None:
    batch = pack([sample(n) for n in (3, 12, 3, 12, 3)], PackingLayout(16, padded_attention=True), "token")
    assert [m.cu_seqlens_B1.diff().tolist() for m in micro_batches(batch)] == [[12], [12, 3], [3, 3]]


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=20),
    budget=st.integers(2, 50),
    minibatches=st.integers(1, 4),
    padded=st.booleans(),
)
def test_every_sample_once_and_no_budget_broken(
    lengths: list[int], budget: int, minibatches: int, padded: bool
) -> None:
    samples = [sample(length, first=100 * i, trained=1) for i, length in enumerate(lengths)]
    batch = pack(samples, PackingLayout(budget, minibatches, padded), "token")
    firsts = []
    for micro_batch in micro_batches(batch):
        tokens = micro_batch.token_ids_T.numel()
        assert tokens <= budget or micro_batch.cu_seqlens_B1.numel() == 2
        firsts += [int(micro_batch.token_ids_T[start]) for start in micro_batch.cu_seqlens_B1[:-1].tolist()]
    assert sorted(firsts) == [100 * i for i in range(len(lengths))]
    assert len(batch.minibatches) == min(minibatches, len(lengths)) and all(batch.minibatches)
    assert sum(batch.loss_denominators) == len(lengths)


def test_minibatches_keep_the_order_and_count_for_themselves() -> None:
    samples = [sample(6, first=100 * i, trained=i + 1) for i in range(4)]
    batch = pack(samples, PackingLayout(64, minibatches=2), "token")
    assert batch.loss_denominators == (3.0, 7.0)
    assert sorted(batch.minibatches[0][0].advantages_N.unique().tolist()) == [0.0, 100.0]


def test_samples_without_trained_tokens_are_left_out_and_counted() -> None:
    """With them the other half of a pair; the others keep their numbers in the batch."""
    batch = pack([sample(5), sample(5, trained=0), sample(4)], PackingLayout(64), "sequence")
    assert batch.loss_denominators == (2.0,) and micro_batches(batch)[0].sample_N.tolist() == [0, 0, 2, 2]
    assert batch.metrics["train/samples"] == 2 and batch.metrics["train/samples_without_trained_tokens"] == 1
    assert batch.metrics["train/tokens"] == 9 and batch.metrics["train/trained_tokens"] == 4
    whole, (chosen, rejected) = pairs_of([(4, 4)]), pairs_of([(4, 4), (5, 6)])[2:]
    untrained = Sample(rejected.token_ids, (False,) * 6, None, 1.0, 3, pair=1, chosen=False)
    batch = pack([*whole, chosen, untrained], PackingLayout(64), "sequence")
    assert batch.loss_denominators == (2.0,) and batch.metrics["train/samples_without_trained_tokens"] == 2
    for nothing in ([], [sample(5, trained=0)]):
        batch = pack(nothing, PackingLayout(64), "token")
        assert batch.minibatches == () and batch.loss_denominators == () and batch.policy_version is None


def pairs_of(lengths: list[tuple[int, int]]) -> list[Sample]:
    return [
        sample(length, first=1000 * number + 100 * place, pair=number, chosen=place == 0, generator_logprobs=None)
        for number, both in enumerate(lengths)
        for place, length in enumerate(both)
    ]


@settings(max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(3, 30), st.integers(3, 30)), min_size=1, max_size=12),
    budget=st.integers(6, 70),
    minibatches=st.integers(1, 4),
    padded=st.booleans(),
)
def test_a_pair_shares_a_micro_batch_side_by_side(
    lengths: list[tuple[int, int]], budget: int, minibatches: int, padded: bool
) -> None:
    batch = pack(pairs_of(lengths), PackingLayout(budget, minibatches, padded), "sequence")
    seen = []
    for micro_batch in micro_batches(batch):
        assert micro_batch.chosen_N is not None
        firsts = micro_batch.token_ids_T[micro_batch.cu_seqlens_B1[:-1].long()].tolist()
        assert [first // 100 % 10 for first in firsts] == [0, 1] * (len(firsts) // 2)
        assert all(a // 1000 == b // 1000 for a, b in zip(firsts[0::2], firsts[1::2], strict=True))
        assert torch.equal(micro_batch.chosen_N, micro_batch.sequence_N % 2 == 0)
        seen += [first // 1000 for first in firsts[0::2]]
    assert sorted(seen) == list(range(len(lengths)))
    assert sum(batch.loss_denominators) == 2 * len(lengths)


def test_groups_follow_their_samples_and_are_all_given_or_none() -> None:
    samples = [sample(length, first=100 * length, group=length % 3) for length in (9, 4, 6, 5, 8)]
    for micro_batch in micro_batches(pack(samples, PackingLayout(14, minibatches=2), "token")):
        assert micro_batch.group_N is not None
        assert micro_batch.group_N.tolist() == [samples[int(i)].group for i in micro_batch.sample_N]
    assert all(one.group_N is None for one in micro_batches(pack([sample(5)], PackingLayout(14), "token")))
    with pytest.raises(AssertionError, match="with and without a group"):
        pack([*samples, sample(5)], PackingLayout(1000), "token")


def test_a_batchs_version_is_the_oldest_and_supervised_samples_have_none() -> None:
    samples = [sample(5, policy_version=version) for version in (4, 2, 3)]
    assert pack(samples, PackingLayout(64), "token").policy_version == 2
    batch = pack([sample(5, generator_logprobs=None, policy_version=None)], PackingLayout(64), "token")
    assert micro_batches(batch)[0].generator_logprobs_N is None and batch.policy_version is None


def test_samples_that_are_wrong_are_refused() -> None:
    layout = PackingLayout(64, precision_digest="aaaa")
    pack([sample(5, precision_digest="aaaa")], layout, "token")
    for wrong, error, told in (
        (sample(5, precision_digest="bbbb"), RuntimeError, r"bbbb.*aaaa"),
        (sample(5, generator_logprobs=(-0.5,) * 4), AssertionError, "as long as its tokens"),
        (Sample((1, 2), (True, True), None, 1.0, None), AssertionError, "first token"),
    ):
        with pytest.raises(error, match=told):
            pack([wrong], layout, "token")


def test_calibration_packs_have_nothing_to_train_on() -> None:
    (micro_batch,) = pack_for_calibration([[1, 2, 3], [], [4]], PackingLayout(8))
    assert micro_batch.token_ids_T.tolist() == [1, 2, 3, 4] and micro_batch.predictor_N.numel() == 0


def test_with_by_version_a_micro_batch_has_samples_that_one_version_ended() -> None:
    of_two = sample(5, policy_version=2, token_versions=(2, 2, 2, 2, 3))
    samples = [sample(6, policy_version=2), sample(4, policy_version=3), of_two, sample(3, policy_version=2)]
    layout = PackingLayout(64, by_version=True)
    micro = micro_batches(pack(samples, layout, "token"))
    assert [sorted(set(one.sample_N.tolist())) for one in micro] == [[0, 3], [1, 2]]
    assert [one.versions_N.tolist() for one in micro if one.versions_N is not None] == [[2, 2, 2, 2], [2, 3, 3, 3]]
    assert len(micro_batches(pack(samples, PackingLayout(64), "token"))) == 1
    (whole,) = micro_batches(pack(samples[:1], layout, "token"))
    assert whole.versions_N is None


@pytest.mark.parametrize("other", [{"policy_version": 3}, {"token_versions": (2, 2, 2, 3)}], ids=["sample", "token"])
def test_a_micro_batch_of_one_version_has_versions_if_another_of_its_batch_needs_them(other: dict[str, object]) -> None:
    """Metrics join the versions of all trained tokens of a batch."""
    samples = [sample(6, policy_version=2), sample(4, **{"policy_version": 2, **other})]
    first, second = micro_batches(pack(samples, PackingLayout(64, by_version=True), "token"))
    assert first.versions_N is not None and second.versions_N is not None
    assert first.versions_N.tolist() == [2, 2] and 3 in second.versions_N.tolist()
