"""Statistics of a step's rollouts for the metrics, and a file with every rollout of a step.

`rollouts/step_NNNNNN.jsonl` has one line per rollout, siblings together:

    task_id prompt answer sibling status reward penalty answered detail trace policy_version finish_reason
    prompt_token_ids                 of the first turn
    text                             what the model said; of several turns a line each, without the replies
    token_ids logprobs               sampled tokens of all completions, concatenated
    environment                      only in a run of several: its name
    policy_versions                  only if weights changed meanwhile: (token, version) where each version begins
    components metrics               only for environments that have them: each reward, unweighted, and their metrics
    turns                            only if the environment replied: prompt_token_ids, text, num_tokens and replies
                                     (role, text) of each turn

`evaluations/step_NNNNNN.jsonl` has the same lines for the held-out tasks, after the steps that were evaluated.

Any text is read back exactly as it was written. Half of a surrogate pair, which UTF-8 cannot encode, is written as its
JSON escape (system/text.py). The file is written under another name, synced and renamed, so it is always complete. A
resumed run first removes the files after its checkpoint's step and then writes them again. The folder then equals that
of an uninterrupted run.
"""

from __future__ import annotations

import errno
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octetrl.records import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, differ
from octetrl.system.errors import UserError
from octetrl.system.replaced_file import replaced_file
from octetrl.system.text import ESCAPE
from octetrl.telemetry.failures import Failures

ROLLOUTS, EVALUATIONS = "rollouts", "evaluations"  # folders of a run: of its steps, and of the held-out tasks
SHARES = {
    "rollout/truncated_share": RolloutStatus.TRUNCATED,
    "rollout/unfinished_share": RolloutStatus.UNFINISHED,
    "rollout/too_long_share": RolloutStatus.PROMPT_TOO_LONG,
}


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Compute rewards (over rollouts with a reward), lengths in tokens, and counts of statuses other than success.

    `reward/penalty` is the mean length penalty. `reward/mean` does not include it.
    `reward/mean_error` is the standard error of the mean with groups as independent: siblings have a prompt in common.
    `reward/zero_variance_fraction` is the share of groups whose siblings all got the same reward: they teach nothing.
    Rewards that differ by rounding alone are the same, and groups with a single reward do not count.
    `SHARES` are shares of all rollouts, each of one status. `reward/component/*` are the parts of the rewards,
    unweighted. `environment/*` are metrics of environments.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [generated_tokens(rollout) for rollout in rollouts if rollout.turns]
    metrics: dict[str, float] = {"rollout/count": len(rollouts), "reward/count": len(rewards)}
    for status in RolloutStatus:
        if status is not RolloutStatus.SCORED:
            metrics[f"rollout/{status.value}"] = sum(rollout.status is status for rollout in rollouts)
    metrics["rollout/failure_share"] = Failures.among(groups).share
    if rollouts:
        for share, status in SHARES.items():
            metrics[share] = metrics[f"rollout/{status.value}"] / len(rollouts)
    if rewards:
        metrics["reward/mean"] = statistics.fmean(rewards)
        metrics["reward/std"] = statistics.pstdev(rewards)
        metrics["reward/penalty"] = statistics.fmean(one.penalty for group in groups for one in group.scored)
        metrics |= equal_rewards("reward", groups) | _mean_error(groups, metrics["reward/mean"])
    if lengths:
        metrics["rollout/mean_length"] = statistics.fmean(lengths)
        metrics["rollout/max_length"] = max(lengths)
    metrics |= _means("reward/component", [rollout.components for rollout in rollouts])
    return metrics | _means("environment", [rollout.metrics for rollout in rollouts])


def _mean_error(groups: Sequence[RolloutGroup], mean: float) -> dict[str, float]:
    """From the sums of each group's deviations; nothing of a single group."""
    given = [group.rewards for group in groups if group.rewards]
    if len(given) < 2:
        return {}
    squares = math.fsum(math.fsum(reward - mean for reward in rewards) ** 2 for rewards in given)
    count = sum(map(len, given))
    return {"reward/mean_error": math.sqrt(squares * len(given) / (len(given) - 1)) / count}


def equal_rewards(family: str, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """`FAMILY/zero_variance_fraction`, if any group has two rewards."""
    several = [group.rewards for group in groups if len(group.rewards) > 1]
    if not several:
        return {}
    return {f"{family}/zero_variance_fraction": statistics.fmean(not differ(rewards) for rewards in several)}


def _means(family: str, measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name's values, over the rollouts that have it."""
    names = dict.fromkeys(name for one in measured for name in one)
    return {f"{family}/{name}": statistics.fmean(one[name] for one in measured if name in one) for name in names}


OWN_NAME = re.compile(r"step_(?P<step>\d{6,})\.jsonl(?P<partial>\.partial)?")  # others are the user's


class RolloutFiles:
    """Writes the rollouts of each step to a file in `folder`.

    resumed_step: step of the checkpoint that the run resumes from, 0 for a new run. Its files of later steps are
    removed, and those that were not written to the end.
    """

    def __init__(self, folder: Path, resumed_step: int = 0) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            name = OWN_NAME.fullmatch(path.name)
            if name is not None and (name["partial"] or int(name["step"]) > resumed_step):
                path.unlink()

    def write(self, step: int, groups: Iterable[RolloutGroup]) -> Path:
        """Write `step_NNNNNN.jsonl` and return its path. Raises UserError if it can't be written."""
        try:
            return write_rollouts(self.folder, step, groups)
        except OSError as error:
            raise not_written(self.folder, error) from error


def write_rollouts(folder: Path, step: int, groups: Iterable[RolloutGroup]) -> Path:
    """Write `step_NNNNNN.jsonl` and return its path. Raises OSError, and then leaves the file as it was."""
    path = folder / f"step_{step:06d}.jsonl"
    with replaced_file(path, errors=ESCAPE) as file:
        for group in groups:
            for sibling, rollout in enumerate(group.rollouts):
                line = json.dumps(_as_json(rollout, sibling), ensure_ascii=False, allow_nan=False)
                file.write(line + "\n")
    return path


def not_written(path: Path, error: OSError) -> UserError:
    """What to say if a file of the run can't be written: the disk is full or broken, or the folder is gone."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"no space left to write '{path}': free some, then continue with --resume")
    return UserError(
        f"can't write '{path}' ({error.strerror}): see that the folder is there and the disk works, then continue with"
        " --resume"
    )


def generated_tokens(rollout: Rollout) -> int:
    return sum(len(turn.completion.token_ids) for turn in rollout.turns)


def _as_json(rollout: Rollout, sibling: int) -> dict[str, Any]:
    completions = [turn.completion for turn in rollout.turns]
    last = completions[-1] if completions else None
    fields: dict[str, Any] = {
        "task_id": rollout.task.id,
        "prompt": rollout.task.prompt,
        "answer": rollout.task.answer,
        "sibling": sibling,
        "status": rollout.status.value,
        "reward": rollout.reward,
        "penalty": rollout.penalty,
        "answered": rollout.answered,
        "detail": rollout.detail,
        "trace": rollout.trace,
        "text": rollout.text,
        "policy_version": last.policy_version if last else None,
        "finish_reason": FinishReason(last.finish_reason).value if last else None,
        "prompt_token_ids": list(rollout.turns[0].prompt_token_ids) if rollout.turns else [],
        "token_ids": [token for completion in completions for token in completion.token_ids],
        "logprobs": [logprob for completion in completions for logprob in completion.logprobs],
    }
    if rollout.task.environment:
        fields["environment"] = rollout.task.environment
    begins = _version_begins(completions)
    if len(begins) > 1:
        fields["policy_versions"] = begins
    for name in ("components", "metrics"):
        if getattr(rollout, name):
            fields[name] = dict(getattr(rollout, name))
    if len(rollout.turns) > 1 or any(turn.replies for turn in rollout.turns):
        fields["turns"] = [
            {
                "prompt_token_ids": list(turn.prompt_token_ids),
                "num_tokens": len(turn.completion.token_ids),
                "text": turn.completion.text,
                "replies": [{"role": reply.role, "text": reply.text} for reply in turn.replies],
            }
            for turn in rollout.turns
        ]
    return fields


def _version_begins(completions: Iterable[Completion]) -> list[tuple[int, int]]:
    """(token, policy version) where another version begins to sample; tokens of all completions, concatenated."""
    begins: list[tuple[int, int]] = []
    first = 0
    for completion in completions:
        for token, version in ((0, completion.policy_version), *completion.updates):
            if not begins or begins[-1][1] != version:
                begins.append((first + token, version))
        first += len(completion.token_ids)
    return begins
