"""Reward functions of TRL's form, as its users write them."""

from __future__ import annotations

import asyncio

from octetrl.environments.trl_rewards import TrlRewards


def accuracy(prompts, completions, answer, **columns):  # type: ignore[no-untyped-def]
    assert len(prompts) == len(completions) == len(answer)
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def by_column(completions, answer):  # type: ignore[no-untyped-def]
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def of_task(task, completions):  # type: ignore[no-untyped-def]
    raise AssertionError("it has the form (task, text)")


def levels(prompts, completions, level):  # type: ignore[no-untyped-def]
    return [None if one is None else float(one) for one in level]


async def polite(completions, **columns):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return ["please" in text for text in completions]


def of_messages(prompts, completions, **columns):  # type: ignore[no-untyped-def]
    return [
        len(prompt[-1]["content"]) + len(text[0]["content"]) for prompt, text in zip(prompts, completions, strict=True)
    ]


def of_ids(prompts, completions, completion_ids):  # type: ignore[no-untyped-def]
    return [len(ids) for ids in completion_ids]


def a_number(prompts, completions, **columns):  # type: ignore[no-untyped-def]
    return 1.0


def two(prompts, completions, **columns):  # type: ignore[no-untyped-def]
    return [1.0, 2.0]


both = TrlRewards([accuracy, polite], weights=[1.0, 0.25])
