"""What every metric means: the one table behind `octetrl metrics`, docs/metrics.md and the report.

A name may have parts in braces that stand for any word: `environment/{name}`, `time/{phase}/worker_{n}`. Plain names
come before patterns. `python -m octetrl.telemetry.glossary` prints the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from octetrl.config.limits import MISMATCH_LIMIT
from octetrl.telemetry.metrics import TRUNCATED_LIMIT, UNFINISHED_LIMIT
from octetrl.telemetry.step_line import NUMBERS


class Metric(NamedTuple):
    """One entry. `unit`: empty for a number without one. `look`: what a good or a bad value is, and what to do."""

    name: str
    unit: str
    meaning: str
    look: str = ""


SHARE, SECONDS, TOKENS, NATS = "share, 0 to 1", "s", "tokens", "nats"

METRICS: dict[str, tuple[Metric, ...]] = {
    "Learning": (
        Metric("reward/mean", "", "Mean reward of the step's rollouts.", "It should rise. Look at evaluation as well."),
        Metric("reward/std", "", "Standard deviation of the rewards.", "0: nothing to learn from."),
        Metric("reward/mean_error", "", "Standard error of the mean reward. Siblings do not count as independent."),
        Metric("reward/count", "rollouts", "Rollouts with a reward."),
        Metric("reward/penalty", "", "Mean length penalty (algorithm.overlong_buffer), 0 or less; not in reward/mean."),
        Metric(
            "reward/zero_variance_fraction", SHARE, "Groups whose siblings all have the same reward.",
            "They teach nothing. Near 1: tasks are learnt (high reward), too hard (low), or rewards never differ.",
        ),
        Metric("reward/component/{name}", "", "Mean of one term of the reward, before its weight."),
        Metric("reward/component_std/{name}", "", "Standard deviation of that term over the rollouts."),
        Metric("reward/component_zeros/{name}", SHARE, "Rollouts in which that term is 0."),
        Metric("agent/sampled_tokens", TOKENS, "Sampled tokens of an agent's rollout, trained or not."),
        Metric("agent/discarded_tokens", TOKENS, "Tokens of answers that no client has fetched: not trained on.",
               "Above 0: clients of agents give up before the answer; raise their time limits."),
        Metric("agent/constrained_tokens", TOKENS, "Tokens of answers under a grammar or of a judge: not trained on."),
        Metric("agent/engine_share", SHARE, "Share of an agent's time in which it waits for answers of the policy.",
               "Near 1 with rollouts out of time: raise environment.turns.agent_timeout_seconds."),
        Metric("agent/ignored_options", "", "Fields of an agent's requests that the recipe's sampling replaces."),
        Metric("agent/joined_retries", "", "Marked retries that got the answer of the request before."),
        Metric("agent/late_requests", "", "Requests that came after the end of their agent, since the step before."),
        Metric("agent/stragglers", "", "An agent's requests that still ran when it ended, which are cancelled."),
        Metric("environment/{name}", "", "Mean of what the environment measures, or `octetrl.log` records."),
        Metric("environments/{name}/reward", "", "Mean reward of this environment's rollouts, in a run with several."),
        Metric("environments/{name}/accuracy", SHARE, "Its rollouts whose reward is at least `evaluation.right_from`."),
        Metric("environments/{name}/share", SHARE, "Its share of the step's tasks.",
               "It follows the environments' weights."),
        Metric("environments/{name}/epoch", "", "Passes over its tasks."),
        Metric("environments/{name}/curriculum/{number}", "", "`curriculum/{number}` of one environment."),
        Metric("environments/{name}/zero_variance_fraction", SHARE, "Its groups whose rewards are all equal.",
               "Near 1: it teaches nothing."),
        Metric("environments/{name}/truncated_share", SHARE, "Its rollouts with an answer that reached its limit."),
        Metric("environments/{name}/unfinished_share", SHARE, "Its rollouts whose turns or context ran out."),
        Metric("environments/{name}/failure_share", SHARE, "Its drawn rollouts without a reward."),
        Metric("curriculum/resting_share", SHARE,
               "Tasks whose pass rate is outside of `environment.curriculum.pass_rate`, of those that have one.",
               "Near 1: the tasks are learnt, or too hard, and draws repeat the few others."),
        Metric("curriculum/pass_rate", SHARE, "Mean running pass rate of the tasks that were drawn."),
        Metric("curriculum/unseen", "tasks", "Tasks that were not drawn yet."),
        Metric("curriculum/{pool}", "tasks", "Tasks whose pass rate is below the window (hard), inside, or above it."),
        Metric("loss", "", "The objective's loss: its sum over the step, divided once.",
               "With policy gradients its value says little."),
        Metric("grad_norm", "", "Norm of the gradient before clipping.", "Sudden growth: lower the learning rate."),
        Metric("lr", "", "Learning rate of the step."),
        Metric("entropy", NATS, "Mean entropy of the policy over the trained tokens.",
               "Near 0: the policy always says the same (docs/collapse.md)."),
        Metric("kl", NATS, "Mean KL divergence from the reference model, estimated on the sampled tokens."),
        Metric("kl/scale", "", "Factor of the KL penalty in this step."),
        Metric("ratio/clip_fraction", SHARE, "Trained tokens whose ratio is clipped.",
               "Their gradient is removed, except with cispo. With sapo: the mean part of the gradient that its gate"
               " removes."),
        Metric("ratio/limited_fraction", SHARE, "Trained tokens whose ratio is outside of the clipping range."),
    ),
    "Evaluation on held-out tasks": (
        Metric("eval/accuracy", SHARE,
               "Held-out tasks that were solved; of held-out pairs those whose better answer is preferred.",
               "The figure to judge a run by."),
        Metric("eval/loss", "", "Mean loss of the held-out examples of `data`: over trained tokens, or pairs.",
               "It should fall. If it rises while `loss` falls, the run learns its examples by heart."),
        Metric("eval/margin", "", "Mean `preference/margin` of the held-out pairs."),
        Metric("eval/{name}/loss", "", "`eval/loss` of one of several sets of held-out examples."),
        Metric("eval/{name}/margin", "", "`eval/margin` of one of several sets of held-out pairs."),
        Metric("eval/environments/{name}/accuracy", SHARE,
               "`eval/accuracy` of one environment, in a run with several."),
        Metric("eval/environments/{name}/tasks", "tasks", "Number of its held-out tasks."),
        Metric("eval/environments/{name}/{number}", "", "Another `eval/` metric, over its held-out tasks."),
        Metric("eval/environments/{name}/component/{term}", "", "`eval/component/{term}` of its held-out tasks."),
        Metric("eval/component/{name}", "", "Mean of one term of the reward, before its weight, on the held-out tasks.",
               "Rewards with `only: evaluation` are here alone."),
        Metric("eval/{set}/accuracy", SHARE, "`eval/accuracy` of one evaluation set (`environment.eval_dataset`)."),
        Metric("eval/{set}/{number}", "", "Another `eval/` metric of one evaluation set."),
        Metric("eval/{set}/component/{name}", "", "`eval/component/{name}` of one evaluation set."),
        Metric("eval/mean_of_environments", SHARE, "Plain mean of the environments' accuracies.",
               "`eval/accuracy` counts every task once."),
        Metric("eval/accuracy_low", SHARE, "Lower end of its 95% interval over tasks."),
        Metric("eval/accuracy_high", SHARE, "Upper end of its 95% interval over tasks."),
        Metric("eval/reward_mean", "", "Mean reward of the held-out tasks."),
        Metric("eval/tasks", "tasks", "Number of held-out tasks."),
        Metric("eval/tokens_per_second", "tokens/s", "Speed of the evaluation's generation."),
        Metric("eval/pass_at_{k}", SHARE, "Probability that one of k answers is right."),
        Metric("eval/maj_at_{k}", SHARE, "Probability that the most frequent of k answers is right."),
        Metric("eval/truncated_share", SHARE, "Rollouts with an answer that reached its token limit.",
               f"Above {TRUNCATED_LIMIT:.0%}: raise evaluation.max_new_tokens."),
        Metric("eval/{statistic}_length", TOKENS, "Mean, percentile or maximum of the answers' lengths."),
        Metric("eval/{status}", "rollouts", "Held-out rollouts that ended with this status (docs/environments.md)."),
    ),
    "Rollout": (
        Metric("rollout/count", "rollouts", "Rollouts of the step."),
        Metric("rollout/staleness", "versions", "Mean age of the sampled tokens when they are trained on, in updates."),
        Metric("rollout/on_policy_share", SHARE, "Sampled tokens whose weights have had no update since."),
        Metric("rollout/too_old_groups", "groups",
               "Saved groups older than `cluster.max_staleness` after a resume; they are sampled again."),
        Metric("rollout/groups", "groups", "Groups that were sampled."),
        Metric("rollout/kept_groups", "groups", "Groups that are trained on."),
        Metric("rollout/refills", "", "Extra sampling rounds, because too few groups had different rewards."),
        Metric("rollout/moved_answers", "answers",
               "Answers that continued on another worker (`rollout.learn_beside_tail`)."),
        Metric("rollout/mean_length", TOKENS, "Mean number of sampled tokens of a rollout.",
               "Growth without reward: look at the answers."),
        Metric("rollout/max_length", TOKENS, "Largest number of sampled tokens of a rollout."),
        Metric("rollout/segments", "", "Mean number of samples of a rollout, where its history changed or branched.",
               "Each is prefilled and trained from its beginning."),
        Metric("rollout/truncated_share", SHARE, "Rollouts with an answer that reached its token limit.",
               f"Above {TRUNCATED_LIMIT:.0%}: raise rollout.max_new_tokens, unless answers should be as long as"
               " they can."),
        Metric("rollout/unfinished_share", SHARE, "Conversations that ran out of turns or context.",
               f"Above {UNFINISHED_LIMIT:.0%}: raise environment.turns.max_turns or model.context_length."),
        Metric("rollout/too_long_share", SHARE, "Rollouts that were not sampled, because the prompt exceeds its limit.",
               "Above 0: raise rollout.max_prompt_tokens."),
        Metric("rollout/failure_share", SHARE, "Rollouts without a reward.", "Above 0: the rollouts say why."),
        Metric("rollout/tokens_per_second", "tokens/s", "Sampled tokens a second, over the whole rollout."),
        Metric("rollout/prefilled_tokens", TOKENS, "Tokens put into the KV cache by prefill."),
        Metric("rollout/batch_occupancy", SHARE, "Mean share of engine.max_batch that decoded."),
        Metric("rollout/cache_occupancy", SHARE, "Largest share of the KV cache in use."),
        Metric("rollout/preemptions", "", "Sequences that lost their pages and were prefilled again.",
               "Above 0: the KV cache is small for the batch."),
        Metric("rollout/drafted_tokens", TOKENS, "Tokens that engine.speculation drafted."),
        Metric("rollout/accepted_tokens", TOKENS, "Drafted tokens that were right and are part of an answer.",
               "Far below the drafted ones: longer engine.speculation.ngrams, or fewer drafts."),
        Metric("rollout/forwards_saved", "", "Estimate of the decode forwards that drafts saved.",
               "The sum of accepted drafts / sequences in their forward; exact for one sequence."),
        Metric("rollout/non_finite_tokens", TOKENS, "Tokens that met a non-finite activation.", "Above 0: an error."),
        Metric("rollout/reward_restarts", "", "Reward processes that were replaced after a crash or a time-out."),
        Metric("rollout/fused", "0 or 1", "Whether the engine runs the fused forward."),
        Metric("rollout/captured", "0 or 1", "Whether decode steps are CUDA graphs, with cluster.tensor_parallel.",
               "0: slow; logs/worker_0.log has the reason."),
        Metric("rollout/in_flight", "rollouts", "Mean number of conversations in the engine."),
        Metric("rollout/with_environment", "rollouts", "Mean number of conversations that waited for an environment."),
        Metric("rollout/waiting_share", SHARE,
               "Share of the rollout in which every conversation waited for its environment."),
        Metric("rollout/abandoned_calls", "", "Calls of the environment that had not returned at the time-out."),
        Metric("rollout/{status}", "rollouts", "Rollouts that ended with this status (docs/environments.md).",
               "`rollout/truncated_share` is `rollout/truncated` divided by the number of rollouts."),
    ),
    "Engine against trainer": (
        Metric("mismatch/equal_fraction", SHARE, "Trained tokens whose log-probs are equal bit for bit.",
               "1: parity holds (docs/parity.md)."),
        Metric("mismatch/unequal_tokens", TOKENS, "Trained tokens whose log-probs differ, where parity is promised.",
               "Above 0 ends the run: `octetrl doctor RECIPE` names the op."),
        Metric("mismatch/tokens", TOKENS, "Trained tokens that were compared."),
        Metric("mismatch/token_mult_prob_error", "", "Mean over tokens of exp(absolute log-prob difference).",
               f"1: equal. Above {MISMATCH_LIMIT:g} (`mismatch.warn_above`): look at precision."
               " Stale tokens add the change of the policy."),
        Metric("mismatch/gen_kl", NATS, "KL divergence of the trainer's policy from the engine's (k3 estimate).",
               "0: equal."),
        Metric("mismatch/max_abs_diff", NATS, "Largest absolute difference, engine − trainer, of a token's log-prob."),
        Metric("mismatch/importance_ratio", "", "Mean of the trainer's probability over the engine's.", "Near 1."),
        Metric("mismatch/decile_{n}/token_mult_prob_error", "",
               "`mismatch/token_mult_prob_error` of a tenth of each sequence, its prompt included; 0: the first.",
               "Growth along it: look at the KV cache."),
        Metric("mismatch/decile_{n}/gen_kl", NATS, "`mismatch/gen_kl` of a tenth of each sequence."),
        Metric("mismatch/age_{n}/gen_kl", NATS, "`mismatch/gen_kl` of tokens sampled by weights n updates older."),
        Metric("mismatch/age_{n}/max_abs_diff", NATS, "Largest log-prob difference of these tokens.",
               "0 at age 0 if parity holds."),
        Metric("mismatch/age_{n}/tokens", TOKENS, "Number of these tokens."),
        Metric("correction/clip_fraction", SHARE, "Trained tokens that a correction of the mismatch changes."),
        Metric("correction/mean_weight", "", "Mean weight of the correction."),
        Metric("correction/mean_square_weight", "", "Mean squared weight of the correction."),
        Metric("correction/effective_sample_size", SHARE, "(mean weight)² / mean squared weight.",
               "1: all weights are equal."),
        Metric("correction/{kind}_fraction", SHARE, "Trained tokens that this kind of correction changes."),
        Metric("fp8/kv_saturation", SHARE, "K and V values clamped on their way into a calibrated FP8 cache.",
               "Above fp8.saturation_warn: raise fp8.calibration_margin."),
        Metric("fp8/gluon_fallbacks", "",
               "Gluon kernels (FP8 GEMMs, attention) that run as plain Triton, slower and with the same bits."),
    ),
    "Training": (
        Metric("train/tokens", TOKENS, "Tokens in the packed micro-batches, prompts included."),
        Metric("train/trained_tokens", TOKENS, "Tokens with a loss."),
        Metric("train/samples", "samples", "Samples of the step."),
        Metric("train/samples_without_trained_tokens", "samples", "Samples without any token to learn from."),
        Metric("train/pairs", "pairs", "Pairs of preferences."),
        Metric("train/micro_batches", "", "Micro-batches of the step."),
        Metric("train/beside_tail_share", SHARE, "Tokens whose training began before the last answer had ended.",
               "0: the tail is too short, or rewards come too late."),
        Metric("train/packing_efficiency", SHARE, "Share of the micro-batches' places that hold tokens."),
        Metric("train/updates", "", "Optimizer steps of the step."),
        Metric("train/skipped", "0 or 1", "1: no update, because no group had a learning signal."),
        Metric("train/non_finite_tokens", TOKENS, "Tokens with a non-finite activation.", "Above 0: an error."),
        Metric("train/tokens_per_second", "tokens/s", "Packed tokens a second, over the update.",
               "Each counts once, whatever `trainer.epochs`."),
        Metric("train/fused", "0 or 1", "Whether the trainer runs the fused forward."),
        Metric("gradients/rounding_error", "", "Error of BF16 gradient sums, relative to the gradient's norm."),
        Metric("publish/bytes", "B", "New weights that a worker received from the others."),
        Metric("publish/gb_per_second", "GB/s", "Speed of receiving these weights, on the slowest worker."),
        Metric("publish/link_gb_per_second", "GB/s", "Speed of the link between the workers, measured at their start.",
               "`publish/gb_per_second` far below it: the link is not the bottleneck."),
        Metric("publish/sent_gb", "GB", "Weights and scales sent to workers that only generate."),
        Metric("publish/sent_gb_per_second", "GB/s", "Speed at which they arrived at the slowest of these workers."),
        Metric("publish/policy_version", "", "Updates so far; the version of the weights that the engine has."),
        Metric("router/entropy", NATS, "Mean entropy of the router's choice of experts."),
        Metric("router/idle_experts", "experts", "Experts that no token chose."),
        Metric("router/load_max_over_mean", "", "Tokens of the busiest expert divided by the mean.", "1: balanced."),
        Metric("router/{name}", "", "A measurement of a mixture's routers."),
        Metric("value/loss", "", "Loss of the critic."),
        Metric("value/explained_variance", "", "Share of the returns' variance that the critic explains.",
               "1: perfect; below 0: worse than a constant."),
        Metric("value/grad_norm", "", "Norm of the critic's gradient."),
        Metric("value/gradients/rounding_error", "", "`gradients/rounding_error` of the critic."),
        Metric("value/lr", "", "Learning rate of the critic."),
        Metric("value/mean", "", "Mean value that the critic predicts."),
        Metric("value/return_mean", "", "Mean return that the critic should predict."),
        Metric("value/clip_fraction", SHARE, "Values whose loss is clipped."),
        Metric("preference/accuracy", SHARE, "Pairs whose better answer has the higher implicit reward."),
        Metric("preference/margin", "", "Mean difference of the implicit rewards of a pair."),
        Metric("preference/{which}_reward", "", "Mean implicit reward of the better or the worse answers."),
        Metric("preference/{which}_logprob", NATS, "Mean log-prob of the better or the worse answers.",
               "If both fall, lower the learning rate or raise preference_beta."),
        Metric("distill/log_ratio", NATS, "Mean log-ratio of policy over teacher on the sampled tokens.",
               "With `distillation: sampled` it is `kl`."),
        Metric("distill/policy_mass", SHARE, "The policy's probability of the tokens that are compared."),
        Metric("distill/teacher_mass", SHARE, "The teacher's probability of the tokens that are compared."),
        Metric("data/too_long", "samples", "Rows left out because they are too long."),
        Metric("data/tokens_across_borders", TOKENS,
               "Tokens with text of both template and answer; they are not trained on."),
        Metric("data/share/{source}", SHARE, "Part of the step's rows that came from this source."),
        Metric("data/epoch/{source}", "", "Passes over this source."),
    ),
    "Time and memory": (
        Metric("time/step", SECONDS, "The whole step, without evaluation and checkpoint."),
        Metric("time/rollout", SECONDS, "Generation and environments."),
        Metric("time/rollout_tail_share", SHARE,
               "Share of the decoding time in which less than half of the largest batch ran."),
        Metric("time/tail", SECONDS, "Part of `time/rollout`: one worker samples the last answers, the others train."),
        Metric("time/agent", SECONDS, "From the start to the end of an agent, as the mean of the step's rollouts.",
               "`agent/engine_share` of it is waiting for the policy."),
        Metric("time/reward", SECONDS, "Time that the step waited for rewards after generation."),
        Metric("time/reward_slowest", SECONDS, "The slowest call of the reward."),
        Metric("time/train", SECONDS, "Forward, backward and update."),
        Metric("time/optimizer", SECONDS, "Part of `time/train`: the optimizer's update of the weights."),
        Metric("time/requantize", SECONDS, "Part of `time/train`: quantising the new weights."),
        Metric("time/wait_for_batch", SECONDS, "Time that the step waited for its batch, which is generated ahead."),
        Metric("time/publish_pause", SECONDS, "Time without generation, while the engines took new weights."),
        Metric("time/wait_for_weights", SECONDS, "Time that generation waited for training or an evaluation."),
        Metric("time/send_weights", SECONDS, "After `time/publish`: sending weights to workers that only generate."),
        Metric("time/receive_weights", SECONDS, "Part of `time/send_weights`: until the slowest worker has them."),
        Metric("time/publish", SECONDS, "New weights and scales into the engine, read back and compared."),
        Metric("time/calibrate", SECONDS, "Measuring the scales of an FP8 KV cache."),
        Metric("time/capture", SECONDS, "Capturing CUDA graphs during the rollout."),
        Metric("time/checkpoint", SECONDS, "Copying the state for a checkpoint; the run waits for it."),
        Metric("time/evaluate", SECONDS, "Evaluation on held-out tasks."),
        Metric("time/wait_to_evaluate", SECONDS,
               "Time that the evaluation waited for the batch that is generated ahead."),
        Metric("time/{phase}/worker_{n}", SECONDS, "Time of one worker in this phase."),
        Metric("time/{phase}/slowest", "", "Number of the slowest worker in this phase."),
        Metric("time/{phase}", SECONDS, "Time of this phase of the step."),
        Metric("checkpoint/write_seconds", SECONDS, "Writing the last checkpoint, beside the next step."),
        Metric("checkpoint/gb_per_second", "GB/s", "Speed of that writing."),
        Metric("checkpoint/stored_step", "", "Step of the last checkpoint in `checkpoint.store`."),
        Metric("checkpoint/failed_uploads", "", "Checkpoints that could not be sent there so far."),
        Metric("checkpoint/upload_seconds", SECONDS, "Sending the last checkpoint there, beside the next steps."),
        Metric("checkpoint/upload_gb", "GB", "What of it was sent. The store had the rest."),
        Metric("memory/peak_gb", "GB", "Largest GPU memory of tensors in a phase of the step."),
        Metric("memory/{name}", "GB", "Memory of the GPU."),
    ),
}  # fmt: skip


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    entries = [metric for family in METRICS.values() for metric in family]
    entries.sort(key=lambda metric: metric.name.count("{"))
    return tuple((re.compile(re.sub(r"\\{\w+\\}", r"[^/]+", re.escape(entry.name))), entry) for entry in entries)


@cache
def explained(name: str) -> Metric | None:
    """The entry of a metric's name. None: the table has none."""
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


_OF_USERS = ("reward/component/", "environment/")


def own_metrics(names: Iterable[str]) -> dict[str, str]:
    """The metrics of the user's own code among `names`, with their titles: terms of the reward, measurements of an
    environment, and what an objective of their own returns."""
    found = {name: name for name in names if name.startswith(_OF_USERS) or (name != "step" and not explained(name))}
    return {name: title.replace(_OF_USERS[0], "reward: ").removeprefix(_OF_USERS[1]) for name, title in found.items()}


_PAGE = """# Metrics

To look one up in the terminal:

```bash
octetrl metrics
octetrl metrics mismatch
```

A run writes one line a step to `metrics.jsonl`, with these names. A metric that a step does not measure is
missing in its line; it is never 0 instead. Parts in braces stand for any word. This page is made from the
table in `octetrl/telemetry/glossary.py`; a test checks that
every metric of a run is in it.

## On the console

Each step is one line, with as many of these numbers as fit the terminal, and in a pipe 120 columns. At the
bottom of a terminal are the phases that run now, with the time left. With several workers, each has a line
there. In a pipe, a phase of more than a minute writes one line a minute. The field `logging.console` changes
this. Numbers that are 0 in a healthy run appear once they have been above 0. Terms of the reward and the
metrics of your own code have a line below.

| in the line | metric |
|---|---|
{numbers}
| stale, apart | 1 − `rollout/on_policy_share`, `mismatch/token_mult_prob_error` − 1 |
| waiting for rewards | `time/reward`, as a share of `time/step`, above 10% |
| seconds | `time/step` |
"""


def page() -> str:
    """The site's page of metrics."""
    text = _PAGE.format(numbers="\n".join(f"| {number.label} | `{number.metric}` |" for number in NUMBERS))
    for family, metrics in METRICS.items():
        rows = [f"| `{m.name}` | {m.unit} | {m.meaning}{f' {m.look}' if m.look else ''} |" for m in metrics]
        rows = [re.sub(r"docs/((\w+)\.md)", r"[\2](\1)", row) for row in rows]
        text += "\n".join(["", f"## {family}", "", "| metric | unit | what it is |", "|---|---|---|", *rows, ""])
    return text
