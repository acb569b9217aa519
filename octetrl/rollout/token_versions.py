"""The policy version that sampled each token, where weights changed while an answer was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from octetrl.records import Completion, Sample, Turn


def versions_by_token(completion: Completion) -> list[int]:
    """Of each token of the completion."""
    version, start, found = completion.policy_version, 0, []
    for begin, next_version in completion.updates:
        found += [version] * (begin - start)
        version, start = next_version, begin
    return found + [version] * (len(completion.token_ids) - start)


def versions_of_turns(turns: Sequence[Turn]) -> tuple[int, tuple[int, ...] | None]:
    """The oldest version that sampled a token of a conversation, and that of each of its tokens; tokens of a prompt
    have the version of the first token after them. None instead if one version sampled all."""
    found: list[int] = []
    for turn in turns:
        found += [turn.completion.policy_version] * len(turn.prompt_token_ids)
        found += versions_by_token(turn.completion)
    oldest = min(found)
    return oldest, None if oldest == max(found) else tuple(found)


def versions_of(sample: Sample) -> Sequence[int]:
    """Of each token of a sample that an engine sampled."""
    assert sample.policy_version is not None, "no engine sampled it"
    return sample.token_versions or tuple(repeat(sample.policy_version, len(sample.token_ids)))
