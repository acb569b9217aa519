"""What `octetrl bench train` trains on: full micro-batches of sequences with random tokens and drawn lengths.

The first tokens of a sequence are its prompt. The last `trained_share` of them are trained on, with random advantages
and the log-probs of a uniform distribution.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from octetrl.bench.workload import LengthRange
from octetrl.records import PackedBatch, Sample
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.packing import PackingLayout, pack


@dataclass(frozen=True, slots=True)
class Mix:
    """The lengths of a micro-batch's sequences: uniform in a span, or lognormal with this mean."""

    span: LengthRange | None
    mean: int = 2048
    sigma: float = 0.7

    def __str__(self) -> str:
        return str(self.span) if self.span is not None else f"lognormal {self.mean} {self.sigma:g}"

    def draw(self, rng: random.Random, tokens: int, max_positions: int) -> list[int]:
        """Lengths that add up to `tokens`; the last is cut. Each is at least 2, because a trained token has a
        predecessor."""
        lengths: list[int] = []
        left = tokens
        while left:
            if self.span is not None:
                length = rng.randint(self.span.shortest, self.span.longest)
            else:
                length = round(rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma))
            length = min(max(2, length), max_positions, left)
            if left - length == 1:  # nothing could be learnt from the one token left
                length += 1 if length == 2 else -1
            lengths.append(length)
            left -= length
        return lengths


@dataclass(frozen=True, slots=True)
class Work:
    """The micro-batches of a step, their lengths, and the number of trained tokens."""

    batch: PackedBatch
    lengths: tuple[int, ...]  # of every sequence
    trained_tokens: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def draw_work(
    mix: Mix, micro_batches: int, trained_share: float, layout: PackingLayout, spec: ModelSpec, seed: int
) -> Work:
    """Draw the micro-batches from the seed; they are the same for every precision."""
    rng = random.Random(seed)
    packed, lengths = [], []
    for _ in range(micro_batches):
        drawn = mix.draw(rng, layout.tokens_per_micro_batch, spec.max_positions)
        samples = [_sample(rng, length, trained_share, spec.vocab_size) for length in drawn]
        packed.append(pack(samples, layout, "token"))
        lengths += drawn
    batch = PackedBatch(
        minibatches=(tuple(one for part in packed for minibatch in part.minibatches for one in minibatch),),
        loss_denominators=(sum(part.loss_denominators[0] for part in packed),),
        policy_version=0,
    )
    assert len(batch.minibatches[0]) == micro_batches, "a full micro-batch was packed into several"
    trained = sum(one.targets_N.numel() for one in batch.minibatches[0])
    return Work(batch, tuple(lengths), trained)


def _sample(rng: random.Random, length: int, trained_share: float, vocab_size: int) -> Sample:
    trained = min(max(1, round(length * trained_share)), length - 1)
    untrained = length - trained
    logprob = -math.log(vocab_size)  # of an untrained model, about
    return Sample(
        token_ids=tuple(rng.choices(range(vocab_size), k=length)),
        loss_mask=(False,) * untrained + (True,) * trained,
        generator_logprobs=(0.0,) * untrained + (logprob,) * trained,
        advantage=rng.gauss(0.0, 1.0),
        policy_version=0,
    )
