"""DAPO (arXiv 2503.14476): four changes to GRPO, for long answers. Its loss is GRPO's; what differs are defaults.

    clip-higher        clip_low 0.2, clip_high 0.28: rare tokens may grow more than they may shrink
    token-level loss   token_weighting: token
    dynamic sampling   groups whose rewards are all equal are left out, and further prompts are drawn until the batch is
                       full (rollout/collect.py), at most `max_refills` further times
    soft overlong      0 up to L = max_new_tokens - buffer, then linearly down to -1 at max_new_tokens and for whatever
                       was cut there: added to the reward before advantages, not before "are they all equal?"

`overlong_buffer` is a share of max_new_tokens: 0.2, the paper's 4,096 of 20,480. With equal clips, no refills and no
buffer it is GRPO.
"""

from __future__ import annotations


def soft_overlong_penalty(length: int, *, limit: int, buffer: float, was_cut: bool) -> float:
    """From 0 to -1. `length` tokens were generated of at most `limit`; `buffer` is the last share of them."""
    if was_cut:
        return -1.0
    room = buffer * limit
    return -min(max(length - (limit - room), 0.0) / room, 1.0) if room else 0.0
