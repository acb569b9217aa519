"""DAPO (arXiv 2503.14476): four changes to GRPO for long answers. The loss is GRPO's; the defaults differ.

    clip-higher        clip_low 0.2, clip_high 0.28: rare tokens may grow more than they may shrink
    token-level loss   token_weighting: token
    dynamic sampling   groups whose rewards are all equal are left out; new prompts are sampled until the batch is full
                       (rollout/collect.py), at most `max_refills` times
    soft overlong      a length penalty: 0 up to max_new_tokens - buffer, then linear down to -1 at max_new_tokens, and
                       -1 for truncated answers. It is added to the reward before advantages are computed. The test
                       for equal rewards does not see it

`overlong_buffer` is a share of max_new_tokens: 0.2, which is the paper's 4,096 of 20,480. With equal clips, no refills
and no buffer DAPO is GRPO.
"""

from __future__ import annotations


def soft_overlong_penalty(length: int, *, limit: int, buffer: float, was_cut: bool) -> float:
    """The length penalty, from 0 to -1.

    `length`: generated tokens. `limit`: the maximum. `buffer`: share of `limit` in which the penalty grows. `was_cut`:
    the answer was truncated.
    """
    if was_cut:
        return -1.0
    room = buffer * limit
    return -min(max(length - (limit - room), 0.0) / room, 1.0) if room else 0.0
