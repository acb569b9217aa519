"""A few rollouts as text, for TensorBoard: the answers with the lowest, the middle and the highest reward."""

from __future__ import annotations

from collections.abc import Sequence

from octetrl.records import Rollout, RolloutGroup
from octetrl.system.text import counted, escaped

LETTERS = 2_000  # of a prompt or an answer; the middle of a longer one is left out


def sample_texts(groups: Sequence[RolloutGroup]) -> str:
    """Markdown, with all texts as code. Empty if no rollout has a reward."""
    scored = [rollout for group in groups for rollout in group.scored]
    scored.sort(key=lambda rollout: rollout.reward or 0.0)
    if not scored:
        return ""
    places = dict.fromkeys((len(scored) - 1, len(scored) // 2, 0))  # each once
    return "\n\n".join(_shown(scored[place]) for place in places)


def _shown(rollout: Rollout) -> str:
    size = counted(sum(len(turn.completion.token_ids) for turn in rollout.turns), "token")
    title = f"**reward {rollout.reward:.3f}**, {rollout.status.value}, {size}, task {rollout.task.id}"
    said = "\n\n".join(f"{by}:\n\n{as_code(text)}" for by, text in said_in(rollout))
    reference = "" if rollout.task.answer is None else f"\n\nreference answer:\n\n{as_code(rollout.task.answer)}"
    return f"{title}\n\n{as_code(rollout.task.prompt)}\n\n{said}{reference}\n\n---"


def said_in(rollout: Rollout) -> list[tuple[str, str]]:
    """What was said after the prompt, in order: who (`answer`, or the role of a reply) and the text."""
    said: list[tuple[str, str]] = []
    for turn in rollout.turns:
        said += [("answer", turn.completion.text), *((reply.role, reply.text) for reply in turn.replies)]
    return said


def as_code(text: str) -> str:
    """Indented, so that nothing of it is read as Markdown."""
    if len(text) > LETTERS:
        half = LETTERS // 2
        text = f"{text[:half]}\n[... {len(text) - LETTERS:,} letters ...]\n{text[-half:]}"
    return "\n".join(f"    {line}" for line in escaped(text).splitlines() or [""])
