"""Training data of supervised steps: examples from one or several sources, mixed by weight, in a resumable order.

The next example comes from the source that is furthest below its share; nothing is random. Within a source the order is
seeded and endless. environments/tasks.py has both. The numbers of examples taken are the position in the mixture.

Examples longer than the model's context are refused, or with `too_long: drop` left out and counted. All examples are
tokenized when the run starts, also those that are held out: of sources of their own, or drawn from the sources that are
trained on.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, Protocol

from octetrl.config.schema import DataSource, HeldOutSource
from octetrl.data.conversations import Tokenized, TurnTokens, read_conversation, read_preference, refuse_padded_end
from octetrl.data.rows import find_value, read_rows, without_padding
from octetrl.environments.tasks import EndlessOrder, furthest_behind, shares_of
from octetrl.records import Sample
from octetrl.system.errors import UserError
from octetrl.system.text import TextTooLong, to_utf8

SHOWN = 10  # largest number of invalid rows in one message
Kind = Literal["conversations", "preferences"]


class Example(Protocol):
    """A conversation or a preference pair."""

    def tokenized(self, chat: TurnTokens, /) -> Tokenized: ...


_READERS: dict[Kind, Callable[[Mapping[str, Any], str], Example]] = {
    "conversations": read_conversation,
    "preferences": read_preference,
}


@dataclass(frozen=True, slots=True)
class Source:
    """Examples of one source, with their places in the files."""

    name: str  # in metrics
    examples: Sequence[Example]
    places: Sequence[str]
    weight: float = 1.0


def read_source(name: str, config: HeldOutSource, kind: Kind) -> Source:
    """Read all examples of one source. Raises UserError with a line for each of the first ten invalid rows."""
    examples, places, problems = [], [], []
    for row in read_rows(config.path, split=config.split, subset=config.subset):
        record = _with_columns(without_padding(row.record) if row.is_padded else row.record, config.columns)
        try:
            examples.append(_READERS[kind](record, row.where))
            places.append(row.where)
        except UserError as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise UserError("\n  ".join([f"{config.path}: {len(problems)} invalid rows", *problems[:SHOWN], *more]))
    return Source(name, examples, places, config.weight if isinstance(config, DataSource) else 1.0)


def steps_of(epochs: float, examples: int, batch_size: int) -> int:
    """The steps of this many passes over the examples, rounded up. In floats 1.1 passes over 100 would be above 110."""
    return max(1, math.ceil(Fraction(str(epochs)) * examples / batch_size))


def hold_out(sources: Sequence[Source], number: int, seed: int) -> tuple[list[Source], Source]:
    """The sources without `number` examples of them, chosen at random, and without equal ones; and those examples."""
    total = sum(len(source.examples) for source in sources)
    if number >= total:
        raise UserError(f"data.eval_size: {number:,} of {total:,} examples are held out, so none is left; lower it")
    rows = [(source, *row) for source in sources for row in zip(source.examples, source.places, strict=True)]
    chosen = sorted(random.Random(f"held out/{seed}").sample(range(total), number))
    held_out = Source("eval_size", [rows[place][1] for place in chosen], [rows[place][2] for place in chosen])
    equal = {repr(example) for example in held_out.examples}
    kept = []
    for source in sources:
        left = [row for row in zip(source.examples, source.places, strict=True) if repr(row[0]) not in equal]
        if not left:
            raise UserError(f"data.eval_size: all examples of '{source.name}' are held out; lower it")
        kept.append(replace(source, examples=[row[0] for row in left], places=[row[1] for row in left]))
    return kept, held_out


def _with_columns(record: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """The record with our keys. A column that a row lacks is left out, because a file may mix several forms."""
    renamed = dict(record)
    for ours, theirs in columns.items():
        with contextlib.suppress(KeyError):
            renamed[ours] = find_value(record, theirs)
    return renamed


def _digest(source: Source) -> str:
    digest = hashlib.sha256()
    for example in source.examples:
        digest.update(to_utf8(repr(example)))
    return digest.hexdigest()[:16]


def _numbered(items: Sequence[Tokenized], first: int = 0) -> list[Sample]:
    """The samples of the items; those of a pair have its number."""
    return [
        sample if sample.pair is None else replace(sample, pair=number)
        for number, item in enumerate(items, first)
        for sample in item.samples
    ]


@dataclass(slots=True)
class _Queue:
    """The tokenized examples of one source, in an endless order."""

    name: str
    items: Sequence[Tokenized]
    order: EndlessOrder
    taken: int = 0


class Mixture:
    """Samples of `sources`, mixed by weight, in a seeded endless order.

    context_length: largest length of a sample, in tokens. None: no limit.
    too_long: whether to refuse longer samples or drop them. pad_token_id: with which no sample may end. held_out:
    sources that are only measured, by name. eval_size: examples of `sources` that are.
    Raises UserError if a source has no rows to train on, or if a row is too long and refused.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        chat: TurnTokens,
        *,
        seed: int,
        context_length: int | None = None,
        too_long: Literal["refuse", "drop"] = "refuse",
        pad_token_id: int | None = None,
        held_out: Mapping[str, Source] | None = None,
        eval_size: int = 0,
    ) -> None:
        if not sources:
            raise UserError("data.sources: there are no rows to train on")
        self._shares = shares_of([source.weight for source in sources])
        self._seed, self._dropped, self._across_borders = seed, 0, 0
        self._queues = []
        self.digests = {source.name: _digest(source) for source in sources}  # digest of all rows, by source
        self.eval_digests = {name: _digest(source) for name, source in (held_out or {}).items()}
        trained = {repr(example) for source in sources for example in source.examples} if held_out else set()
        self.trained_too = {  # held-out examples that are trained on, by set
            name: sum(repr(example) in trained for example in source.examples)
            for name, source in (held_out or {}).items()
        }
        if eval_size:
            sources, taken = hold_out(sources, eval_size, seed)
            held_out = {"": taken}
        for number, source in enumerate(sources):
            items = self._fitting(source, chat, context_length, too_long, pad_token_id)
            self._queues.append(_Queue(source.name, items, EndlessOrder(len(items), seed + number)))
        self.num_examples = sum(len(queue.items) for queue in self._queues)
        self.held_out = {  # samples that are only measured, by name
            name: _numbered(self._fitting(source, chat, context_length, too_long, pad_token_id))
            for name, source in (held_out or {}).items()
        }
        self.metrics: Mapping[str, float] = {}  # those of the last batch

    def next_batch(self, n: int) -> list[Sample]:
        """Return the samples of the next `n` examples: one for each conversation (or for each of its answers), two for
        each pair.

        A source may start a new epoch inside a batch."""
        samples: list[Sample] = []
        before = self._taken
        for _ in range(n):
            number, queue = sum(self._taken), self._queues[furthest_behind(self._shares, self._taken)]
            drawn = queue.items[queue.order[queue.taken]]
            queue.taken += 1
            samples += _numbered([drawn], number)
        self.metrics = {
            "data/too_long": float(self._dropped),
            "data/tokens_across_borders": float(self._across_borders),
        }
        for queue, earlier in zip(self._queues, before, strict=True):
            self.metrics |= {
                f"data/share/{queue.name}": (queue.taken - earlier) / n,
                f"data/epoch/{queue.name}": queue.taken / len(queue.items),
            }
        return samples

    def state(self) -> dict[str, Any]:
        """Return the position in the order, as JSON."""
        return {"taken": self._taken, "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any], *, has_changed: bool = False) -> None:
        """Continue from a `state()`. Raises UserError if it is from other examples, weights or another seed, unless
        `has_changed` says that this is meant."""
        if state["fingerprint"] != self._fingerprint and not has_changed:
            raise UserError(
                "data.sources: the sources, the tokenizer or the seed differ from the checkpoint's;"
                " resume with the same ones, or start a new run from its weights"
            )
        for queue, taken in zip(self._queues, state["taken"], strict=True):
            queue.taken = taken

    @property
    def _taken(self) -> list[int]:
        return [queue.taken for queue in self._queues]

    def _fitting(
        self,
        source: Source,
        chat: TurnTokens,
        context_length: int | None,
        too_long: Literal["refuse", "drop"],
        pad_token_id: int | None,
    ) -> list[Tokenized]:
        """The tokenized examples that fit into the context."""
        items = []
        for example, place in zip(source.examples, source.places, strict=True):
            try:
                item = example.tokenized(chat)
                refuse_padded_end(item, pad_token_id)
                length = item.longest
                excess = f"{length} tokens" if context_length is not None and length > context_length else None
            except TextTooLong as error:  # the text's length alone shows it
                excess = str(error)
            except UserError as error:
                raise UserError(f"{place}: {error}") from error
            if excess is None:
                self._across_borders += item.across_borders
                items.append(item)
            elif too_long == "drop":
                self._dropped += 1
            else:
                raise UserError(
                    f"{place}: {excess}, but model.context_length is {context_length};"
                    f" raise it, shorten the row, or set data.too_long: drop"
                )
        if not items:
            raise UserError(
                f"data.sources: '{source.name}' has no rows to train on"
                f" ({len(source.examples)} rows, all longer than model.context_length {context_length})"
            )
        return items

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self._seed, self._shares)).encode())
        for queue in self._queues:
            for item in queue.items:
                for sample in item.samples:
                    digest.update(repr((sample.token_ids, sample.loss_mask)).encode())
        return digest.hexdigest()
