"""Mixtures: every source has its share at every moment, and a resumed order is the order never interrupted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.config.schema import DataSource
from octetrl.data.conversations import Conversation, Dialogue, Preference
from octetrl.data.mixture import Mixture, Source, read_source
from octetrl.environments.tasks import EndlessOrder
from octetrl.system.errors import UserError
from tests.unit.data.letters import LetterTokens

EXAMPLES = [Conversation(f"q{index}", f"a{index}") for index in range(10)]


def source(name: str = "all", examples: list[Conversation] = EXAMPLES, weight: float = 1.0) -> Source:
    return Source(name, examples, [f"{name}:{number}" for number in range(1, len(examples) + 1)], weight)


def mixture_of(*sources: Source, seed: int = 0, **options: object) -> Mixture:
    return Mixture(sources or (source(),), LetterTokens(), seed=seed, context_length=6, **options)  # type: ignore[arg-type]


def of_letter(letter: str, count: int, weight: float) -> Source:
    return source(letter, [Conversation(letter, str(index)) for index in range(count)], weight)


def test_one_source_is_its_seeded_order() -> None:
    drawn = mixture_of(seed=5).next_batch(25)
    order = EndlessOrder(10, 5)
    assert drawn == [EXAMPLES[order[place]].tokenized(LetterTokens()).samples[0] for place in range(25)]


@settings(max_examples=40)
@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    batches=st.lists(st.integers(1, 30), min_size=1, max_size=6),
)
def test_every_source_has_its_share_at_every_moment(weights: list[float], batches: list[int]) -> None:
    names = "abcde"[: len(weights)]
    mixture = mixture_of(*(of_letter(*each) for each in zip(names, range(3, 8), weights, strict=False)))
    drawn = []
    for size in batches:
        batch = mixture.next_batch(size)
        drawn += [chr(sample.token_ids[0]) for sample in batch]
        for name, weight in zip(names, weights, strict=True):
            in_batch = [chr(sample.token_ids[0]) for sample in batch].count(name)
            assert mixture.metrics[f"data/share/{name}"] == pytest.approx(in_batch / size)
            assert abs(drawn.count(name) - len(drawn) * weight / sum(weights)) <= len(weights) - 1 + 1e-6


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99), batch=st.integers(1, 40))
def test_every_prompt_of_a_source_is_drawn_equally_often(sizes: list[int], seed: int, batch: int) -> None:
    """At every moment its prompts were drawn as often as each other, or once more."""
    sources = [of_letter(letter, size, 1.0 + size) for letter, size in zip("abcd", sizes, strict=False)]
    mixture, counts = mixture_of(*sources, seed=seed), [Counter[int]() for _ in sizes]
    for sample in (sample for _ in range(3) for sample in mixture.next_batch(batch)):
        number = sample.token_ids[0] - ord("a")
        counts[number][sample.token_ids[2]] += 1
        drawn = [*counts[number].values(), *[0] * (sizes[number] - len(counts[number]))]
        assert len(drawn) == sizes[number] and max(drawn) - min(drawn) <= 1


@pytest.mark.parametrize("cut", [0, 1, 13, 39])
def test_a_resumed_mixture_is_the_one_never_interrupted(cut: int) -> None:
    def made() -> Mixture:
        return mixture_of(of_letter("a", 4, 0.3), of_letter("b", 7, 0.5), of_letter("c", 5, 0.2))

    whole = made().next_batch(40)
    killed, resumed = made(), made()
    if cut:
        killed.next_batch(cut)
    resumed.restore(json.loads(json.dumps(killed.state())))
    assert resumed.next_batch(40 - cut) == whole[cut:]


def test_other_examples_weights_or_seeds_are_not_resumed() -> None:
    state = mixture_of(of_letter("a", 4, 1.0), of_letter("b", 4, 1.0)).state()
    others = (
        mixture_of(of_letter("a", 4, 1.0), of_letter("b", 5, 1.0)),
        mixture_of(of_letter("a", 4, 1.0), of_letter("b", 4, 2.0)),
        mixture_of(of_letter("a", 4, 1.0), of_letter("b", 4, 1.0), seed=1),
    )
    for other in others:
        with pytest.raises(UserError, match="differ from the checkpoint's"):
            other.restore(state)


def test_the_same_tokens_with_another_loss_mask_are_not_resumed() -> None:
    turns = ({"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}) * 2
    every, last = (
        Mixture([Source("d", [Dialogue(turns, learn_from=first)], ["d:1"])], LetterTokens(), seed=0) for first in (0, 2)
    )
    with pytest.raises(UserError, match="differ from the checkpoint's"):
        last.restore(every.state())


def test_each_source_is_shuffled_by_a_seed_of_its_own() -> None:
    drawn = mixture_of(of_letter("a", 10, 1.0), of_letter("b", 10, 1.0), seed=5).next_batch(20)
    order_of = {name: [s.token_ids[2] for s in drawn if chr(s.token_ids[0]) == name] for name in "ab"}
    assert sorted(order_of["a"]) == sorted(order_of["b"]) and order_of["a"] != order_of["b"]


def test_pairs_stay_together_and_are_numbered_apart() -> None:
    pair = Preference(Conversation("q", "g"), Conversation("q", "b"))
    batch = Mixture([Source("p", [pair], ["p:1"])], LetterTokens(), seed=0).next_batch(3)
    assert [(sample.pair, sample.chosen) for sample in batch] == [
        (number, chosen) for number in range(3) for chosen in (True, False)
    ]


def test_what_is_too_long_is_refused_or_dropped_and_counted() -> None:
    examples = [Conversation("q", "a"), Conversation("question", "")]
    with pytest.raises(UserError, match=r"all:2: 10 tokens, but model\.context_length is 6"):
        mixture_of(source(examples=examples))
    mixture = mixture_of(source(examples=examples), too_long="drop")
    mixture.next_batch(3)
    assert mixture.metrics["data/too_long"] == 1.0 and mixture.metrics["data/epoch/all"] == 3.0
    with pytest.raises(UserError, match=r"'all' has no rows to train on \(1 rows"):
        mixture_of(source(examples=examples[1:]), too_long="drop")


def test_held_out_rows_that_are_trained_on_too_are_counted() -> None:
    other = Conversation("q0", "b")
    mixture = mixture_of(held_out={"some": source(examples=[*EXAMPLES[:3], other]), "none": source(examples=[other])})
    assert mixture.trained_too == {"some": 3, "none": 0}


def test_all_bad_rows_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n' + '{"prompt": "p"}\n' * 12)
    with pytest.raises(UserError) as caught:
        read_source("c", DataSource(path=str(path)), "conversations")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("12 invalid rows") and "c.jsonl:2: no 'answer'" in lines[1] and lines[-1] == "  and 2 more"
    assert len(lines) == 12


def test_columns_have_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"question": "p", "solution": "a"}\n')
    config = DataSource(path=str(path), columns={"prompt": "question", "answer": "solution"}, weight=2.0)
    read = read_source("c", config, "conversations")
    assert (list(read.examples), list(read.places), read.weight) == ([Conversation("p", "a")], [f"{path}:1"], 2.0)
