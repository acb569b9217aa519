"""Decide which groups and answers are left out of training. The caller counts them.

- A group whose rewards are all equal up to rounding (spread.py) has advantages of zero. It costs a forward and a
  backward and teaches nothing (DAPO's dynamic sampling, arXiv 2503.14476). A group with fewer than two rewards has no
  baseline and is left out too.
- The reward of an answer that was truncated at `max_new_tokens`, or of a conversation at its last turn, reports its
  length more than its quality. With `overlong: mask` it counts in its siblings' baseline but is not trained on (DAPO's
  overlong filtering).
"""

from __future__ import annotations

from octetrl.records import Rollout, RolloutGroup, differ


def has_reward(group: RolloutGroup) -> bool:
    return len(group.rewards) > 0


def has_baseline(group: RolloutGroup) -> bool:
    return len(group.rewards) >= 2


def has_variance(group: RolloutGroup) -> bool:
    return differ(group.rewards)


def is_not_overlong(rollout: Rollout) -> bool:
    return not rollout.status.is_cut_off
