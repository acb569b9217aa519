"""The records that travel through one step, in the order in which they are created.

    Task -> GenerationRequest -> Completion -> Turn -> Rollout -> RolloutGroup -> Sample -> PackedBatch -> PolicyUpdate

Each record is small, frozen and created in one place. Comments give each field's shape and the meaning of None. Nothing
here imports torch: records with tensors name the type for the type checker only.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from octetrl.fp8.kv_scales import KVScales


Message = Mapping[str, Any]  # role, content, and other keys that the chat template reads
Prompt = str | Sequence[Message]  # the user's message, or a conversation whose next answer is the policy's


@dataclass(frozen=True, slots=True)
class Task:
    """One problem, created by a taskset.

    Example: Task(id="chain_sum/17", prompt="3 + 4 =", answer="7")
    """

    id: str  # unique within the taskset, stable across resumes
    prompt: Prompt  # before any chat template
    answer: str | None = None  # the reference answer; None when the scorer needs none
    metadata: Mapping[str, Any] = field(default_factory=dict)  # data for the scorer
    environment: str = field(default="", kw_only=True)  # its name, in a run of several
    tools: Sequence[Any] = field(default=(), kw_only=True)  # schemas that the template writes besides the environment's
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # over the recipe's
    temperature: float | None = field(default=None, kw_only=True)  # of its training answers; None: the recipe's
    group_size: int | None = field(default=None, kw_only=True)  # number of its training answers; None: the recipe's

    def plain(self) -> Task:
        """A `Task` with these fields, each read once: those of a user's own class may compute, and draw random
        numbers, whenever they are read. What the policy sees is copied, so the caller's lists may change later."""
        prompt = self.prompt
        return Task(
            self.id,
            prompt if isinstance(prompt, str) else tuple(map(deepcopy, prompt)),
            self.answer,
            self.metadata,
            environment=self.environment,
            tools=tuple(map(deepcopy, self.tools)),
            chat_template_kwargs=deepcopy(self.chat_template_kwargs),
            temperature=self.temperature,
            group_size=self.group_size,
        )

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as messages."""
        return ({"role": "user", "content": self.prompt},) if isinstance(self.prompt, str) else tuple(self.prompt)

    @property
    def text(self) -> str:
        """The prompt as one text, for a judge or a reader: of a conversation each message below its role."""
        return self.prompt if isinstance(self.prompt, str) else "\n\n".join(map(_spoken, self.prompt))

    @property
    def problem(self) -> str:
        """What the policy sees of the task: the prompt's text, or canonical JSON. Equal for equal problems."""
        prompt = self.prompt if isinstance(self.prompt, str) else plain_prompt(self.prompt)
        if isinstance(prompt, str) and not self.tools and not self.chat_template_kwargs:
            return prompt
        seen = [prompt, self.tools, self.chat_template_kwargs]
        return json.dumps(seen, sort_keys=True, ensure_ascii=False, default=str)


def plain_prompt(messages: Sequence[Message]) -> Prompt:
    """The messages with content in parts as one text; a message of the user alone as its text."""
    plain = [dict(message) for message in messages]
    for message in plain:
        parts = message.get("content")
        if isinstance(parts, list | tuple) and all(isinstance(one, Mapping) and "text" in one for one in parts):
            message["content"] = "".join(str(one["text"]) for one in parts)
    alone = len(plain) == 1 and plain[0].keys() == {"role", "content"} and plain[0]["role"] == "user"
    return str(plain[0]["content"]) if alone else tuple(plain)


def _spoken(message: Message) -> str:
    calls = [json.dumps(call, ensure_ascii=False, default=str) for call in message.get("tool_calls") or ()]
    content = message.get("content")
    said = content if isinstance(content, str | None) else json.dumps(content, ensure_ascii=False, default=str)
    return "\n".join([f"{message['role']}:", *filter(None, [said]), *calls])


@dataclass(frozen=True, slots=True)
class LogitOptions:
    """Options of one request; the defaults change and report nothing.

    Example: LogitOptions(frequency_penalty=0.5, num_top=5)
    """

    min_new_tokens: int = 0  # no stop token is sampled before
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, added to its logit
    grammar: str | None = None  # that the answer must match (engine/grammars.py)
    num_top: int = 0  # number of likeliest tokens reported with each token
    prompt_logprobs: bool = False  # log-probs of the prompt's tokens; the prompt is prefilled even if pages have it

    @property
    def edits(self) -> bool:
        """Whether it changes what is sampled."""
        return bool(
            self.min_new_tokens > 0
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.grammar is not None
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Log-probs belong to the distribution after `temperature` and before top-k,
    top-p and min-p.

    Example: SamplingParams(max_new_tokens=256, temperature=0.7, stop=("\\n\\n",))
    """

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0  # keeps tokens with p >= min_p * max(p)
    stop: tuple[str, ...] = ()  # stop strings; the text ends before the match, the tokens after it
    stop_token_ids: tuple[int, ...] = ()  # besides the tokenizer's EOS
    ignore_eos: bool = False  # benchmarks only
    logits: LogitOptions | None = None  # the server's: penalties, grammars, further log-probs; None in training


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and its number of siblings. Sibling `i` is seeded only by (seed, i), so its tokens do not depend on the
    other requests in the batch.

    Example: GenerationRequest("0:chain_sum/17", (31, 7, 2), SamplingParams(max_new_tokens=64), num_siblings=8, seed=5)
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_siblings: int = 1
    seed: int = 0
    expected_tokens: int | None = None
    """Expected length of its completions, for example that of the last time. The longest start first. None: not known.
    It changes the order of computation, never the result."""
    first_sibling: int = 0  # number of its first sibling, so that several workers can draw one request's siblings
    answer_limits: tuple[int, ...] = ()  # by number of the sibling, at most max_new_tokens; empty: max_new_tokens
    continues: tuple[str, int] | None = None
    """Request and sibling that drew the beginning of the prompt: its pages may be found there. None: a new prompt. It
    changes where the request runs, never the result."""
    said: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
    """Tokens and log-probs that its only sibling has sampled on another worker, where it stopped; it continues here."""


@dataclass(frozen=True, slots=True)
class EarlierAnswer:
    """What the model said to a prompt in an earlier step. Drafts are made from it; no result depends on it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: Sequence[int]  # an array takes a tenth of a tuple's memory


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_new_tokens or the context limit
    FAILED = "failed"  # a server gave no answer (engine.backend: openai)


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of the engine.

    Example: Completion((55, 2), (-0.1, -0.02), "7", FinishReason.STOP, policy_version=3, precision_digest="c1ab...")
    """

    token_ids: tuple[int, ...]  # with the stop token, without the prompt
    logprobs: tuple[float, ...]  # float32 log-prob of each token, same length
    text: str  # decoded, stop string removed
    finish_reason: FinishReason
    policy_version: int  # optimizer steps before the weights that sampled it; with `updates`, its first token
    precision_digest: str  # which tensors were FP8 (fp8/policy.py); must equal the trainer's
    updates: tuple[tuple[int, int], ...] = ()  # (n, version): sampled by that version from token n on, not by the first
    detail: str | None = None  # why it FAILED; then it has neither tokens nor text


Top = tuple[tuple[int, float], ...]  # token id and log-prob of the likeliest tokens, likeliest first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probs of a prompt's tokens without the first, which has none."""

    logprobs: tuple[float, ...]
    tops: tuple[Top, ...]  # empty if not asked for


@dataclass(frozen=True, slots=True)
class EventDetails:
    """What an event has beside its tokens, for a request with options.

    Example: EventDetails(tops=(((31, -0.2), (7, -1.9)),))
    """

    tops: tuple[Top, ...] = ()  # of each of the event's tokens
    prompt: PromptLogprobs | None = None  # with the first event
    failure: str | None = None  # why the grammar could no longer be followed


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """New tokens of one sibling in an open session, or its whole completion (rollout/backend.py).

    Example: SessionEvent("0:chain_sum/17", sibling=2, token_ids=(31, 7), logprobs=(-0.2, -1.1), completion=None)
    """

    request_id: str
    sibling: int
    token_ids: tuple[int, ...]  # since the last of this sibling's events
    logprobs: tuple[float, ...]  # of these tokens, same length
    completion: Completion | None  # complete, with the last event; None: it continues
    details: EventDetails | None = None  # for a request with `SamplingParams.logits`


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """Progress of a session after a forward.

    Example: GenerationProgress(done=3, running=5, waiting=8, generated_tokens=812, seconds=1.5)
    """

    done: int  # completions
    running: int
    waiting: int
    generated_tokens: int
    seconds: float

    @property
    def total(self) -> int:
        return self.done + self.running + self.waiting

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0


OnProgress = Callable[[GenerationProgress], None]
OnCompletions = Callable[[Sequence[tuple[int, int, Completion]]], bool | None]
"""Called after every forward, mostly with an empty list: completions that ended, each with the place of its request in
the list of requests, and its sibling. Returns True to be called again soon, although no forward may have ended."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A message of the environment.

    Example: Reply("user", "Higher.")
    """

    role: str  # user or tool
    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A completion and the environment's replies to it. `prompt_token_ids` are the new tokens before the completion:
    the whole prompt in the first turn and in a fork, the tokens of the last replies in other turns.

    Example: Turn((31, 7, 2), completion, (Reply("user", "Higher."),))
    """

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    replies: tuple[Reply, ...] = ()  # empty: the environment ended it. The last turn's are not tokenized
    is_fork: bool = False  # its prompt does not continue the tokens of the turn before: it begins a segment


class RolloutStatus(StrEnum):
    """How a rollout ended. Only SCORED, TRUNCATED and UNFINISHED rollouts have a reward."""

    SCORED = "scored"
    TRUNCATED = "truncated"  # an answer reached max_new_tokens; it is scored
    UNFINISHED = "unfinished"  # turns or context ran out before its end; it is scored
    REWARD_ERROR = "reward_error"  # the reward function raised, or returned no finite number
    REWARD_TIMEOUT = "reward_timeout"  # ended after reward_timeout_seconds
    REWARD_CRASH = "reward_crash"  # its process exited, crashed or was killed
    REWARD_MEMORY = "reward_memory"  # it ran out of memory, or was ended past reward_memory_mib
    TOOL_ERROR = "tool_error"  # a tool raised or hung, and the recipe ends such a rollout
    AGENT_ERROR = "agent_error"  # an environment's agent raised, or made no call
    BOX_ERROR = "box_error"  # a box did not start, or was lost with what the agent had done in it
    ENVIRONMENT_ERROR = "environment_error"  # its start, reply or finish raised, or returned no valid reply
    ENVIRONMENT_TIMEOUT = "environment_timeout"  # one of them returned nothing in reply_timeout_seconds
    GENERATION_ERROR = "generation_error"  # a server gave no answer, after all retries
    PROMPT_TOO_LONG = "prompt_too_long"  # never generated

    @property
    def has_reward(self) -> bool:
        return self is RolloutStatus.SCORED or self.is_cut_off

    @property
    def is_cut_off(self) -> bool:  # by a limit, and not by the policy or the environment
        return self in (RolloutStatus.TRUNCATED, RolloutStatus.UNFINISHED)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled conversation with its reward, created by `collect_groups`.

    Example: Rollout(task, (Turn((31, 7, 2), completion),), RolloutStatus.SCORED, reward=1.0, answered="7")
    """

    task: Task
    turns: tuple[Turn, ...]  # empty when the prompt was too long
    status: RolloutStatus
    reward: float | None  # None unless status.has_reward
    detail: str | None = None  # text of the error, if there was one
    trace: str | None = None  # traceback of the error
    answered: str | None = None  # the answer that the scorer read, equal for equal answers; None: not given
    penalty: float = 0.0  # added to the reward for its length, 0 or less
    components: Mapping[str, float] = field(default_factory=dict)  # terms of the reward, before their weights
    metrics: Mapping[str, float] = field(default_factory=dict)  # other measurements of its environment
    result: str | None = None  # text that an agent returned; scored in place of the last answer
    calls: Sequence[Mapping[str, Any]] = ()
    """An agent's calls in the order of their answers, as plain data: the number of the call that each continues
    (`parent`), the `messages` since then, and its `turn`; of one that is not trained on its `text`, and its number of
    tokens as `discarded` or `constrained`."""

    @property
    def segments(self) -> tuple[tuple[Turn, ...], ...]:
        """The turns of each token sequence, which is one sample: all turns, unless the history was changed
        (`rollout.history`). Every completion is in one segment."""
        starts = [number for number, turn in enumerate(self.turns) if number == 0 or turn.is_fork]
        return tuple(self.turns[start:end] for start, end in pairwise([*starts, len(self.turns)]))

    @property
    def text(self) -> str:
        """What the model said: the texts of its completions, in lines of their own. Replies are in `turns`."""
        return "\n".join(turn.completion.text for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The `group_size` siblings of one task. Advantages are relative to the rollouts that have a reward.

    Example: RolloutGroup(task, (right, wrong))
    """

    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def scored(self) -> tuple[Rollout, ...]:
        return tuple(rollout for rollout in self.rollouts if rollout.reward is not None)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(rollout.reward for rollout in self.rollouts if rollout.reward is not None)

    @property
    def penalized_rewards(self) -> tuple[float, ...]:
        """Rewards plus length penalties. Advantages are computed from these."""
        return tuple(rollout.reward + rollout.penalty for rollout in self.rollouts if rollout.reward is not None)


REWARD_ROUNDINGS = 16  # of float64 rewards that count as equal: algorithms/spread.py gives the reasons


def has_spread(low: float, high: float, eps: float = sys.float_info.epsilon, roundings: int = REWARD_ROUNDINGS) -> bool:
    """Whether values between `low` and `high` differ by more than rounding. Values that are not finite always do."""
    if low == high:
        return False
    size = max(abs(low), abs(high))
    return not (math.isfinite(size) and high - low <= roundings * eps * size)


def differ(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ by more than rounding. Fewer than two rewards do not."""
    return len(rewards) > 1 and has_spread(min(rewards), max(rewards))


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence for training, created by `to_samples` (RL) or by `data/` (SFT, preferences).

    `loss_mask[t]` says whether token t is trained on. `generator_logprobs[t]` is its log-prob in the engine. Both have
    the length of `token_ids`. Position 0 is never trained on.

    Example: Sample((31, 7, 55), (False, False, True), (0.0, 0.0, -0.1), advantage=1.2, policy_version=3)
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    generator_logprobs: tuple[float, ...] | None  # 0.0 where loss_mask is False; None for SFT
    advantage: float  # of every trained token; 1.0 for SFT
    policy_version: int | None  # of the weights that sampled it, the oldest of several; None for SFT
    precision_digest: str | None = None  # of the engine that sampled it; None for SFT
    token_versions: tuple[int, ...] | None = None  # of each token (a prompt's: its answer's); None: policy_version
    pair: int | None = None  # number of a preference pair: chosen and rejected are neighbours with the same number
    chosen: bool = True  # the better of its pair
    group: int | None = None  # number of the group of siblings within a step; None for SFT and preferences
    rollout: int | None = None  # number of its rollout within a step, shared by its segments; None: a sample of its own
    cut_off: bool = False  # a limit ended it (`RolloutStatus.is_cut_off`)
    temperature: float | None = None  # that it was sampled at; None: the trainer's


@dataclass(frozen=True, slots=True)
class SharedBy:
    """The workers that train on one micro-batch together. Each has the tokens between two of `rows`, and the trained
    tokens between two of `trained`, which are predicted from them. Example: SharedBy(2, (0, 256, 300), (0, 90, 131))
    """

    first: int  # rank of the first worker; the others follow
    rows: tuple[int, ...]
    trained: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A pack of whole sequences, end to end, created by `pack`. T tokens, B sequences, N trained tokens.

    Row n of the trained tokens is predicted from the hidden state at `predictor_N[n]` (the token before it).

    Example, two sequences of 3 and 2 tokens with 1 trained token each: MicroBatch(token_ids_T=[31, 7, 55, 31, 9],
    positions_T=[0, 1, 2, 0, 1], cu_seqlens_B1=[0, 3, 5], max_seqlen=3, predictor_N=[1, 3], targets_N=[55, 9],
    weights_N=[1.0, 1.0], advantages_N=[1.2, -0.4], generator_logprobs_N=[-0.1, -2.3], sequence_N=[0, 1],
    sample_N=[4, 0], target_positions_N=[2, 1], sequence_lengths_N=[3, 2]), each list a tensor.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each sequence
    cu_seqlens_B1: Tensor  # int32, [0, ..., T]
    max_seqlen: int
    predictor_N: Tensor  # int64 index into T
    targets_N: Tensor  # int64 token ids
    weights_N: Tensor  # float32: from the token weighting; the loss is sum(weights * loss) / loss_denominator
    advantages_N: Tensor  # float32
    generator_logprobs_N: Tensor | None  # float32; None for SFT
    sequence_N: Tensor  # int64, ascending: index into the B sequences
    sample_N: Tensor  # int64: index into the samples that `pack` received
    target_positions_N: Tensor  # int64: position of the target in its sequence
    sequence_lengths_N: Tensor  # int64: length of its sequence
    chosen_N: Tensor | None = None  # bool: of the better sequence of its pair; None without pairs
    group_N: Tensor | None = None  # int64: group of siblings of its sequence; None without groups
    versions_N: Tensor | None = None  # int64: policy version that sampled the target; None: one for the batch
    cut_off_N: Tensor | None = None  # bool: the last trained token of a sample that is cut off; None: none is
    temperatures_N: Tensor | None = None  # float32; None: all have the trainer's
    shared: SharedBy | None = None  # None: one worker has all its tokens
    reports: bool = True  # whether the worker counts its loss and metrics; of those that share it the first does


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """All micro-batches of one optimizer step (or of several: `minibatches`), created by `pack`.

    Example: PackedBatch(((first, second), (third,)), loss_denominators=(812.0, 790.0), policy_version=3)
    """

    minibatches: tuple[tuple[MicroBatch, ...], ...]  # one optimizer step each
    loss_denominators: tuple[float, ...]  # one per minibatch: the only division in the project
    policy_version: int | None  # of the weights that sampled it; None for SFT
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None  # of the run, from 1; None: that of the trainer's next update


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probs of a batch's N trained tokens by engine and trainer, on the CPU. The trainer's precede any update.

    Example, each list a tensor: TokenLogprobs([-0.1], [-0.1], target_positions_N=[2], sequence_lengths_N=[3])
    """

    generator_N: Tensor  # float32
    trainer_N: Tensor  # float32
    target_positions_N: Tensor  # int64
    sequence_lengths_N: Tensor  # int64
    versions_N: Tensor | None = None  # int64: policy version that sampled each; None: one for the batch


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """The result of `train`, created by the trainer. The worker computes metrics and KV scales from log-probs and amax.

    Example: PolicyUpdate(policy_version=4, metrics={"loss": 0.02, "grad_norm": 0.31})
    """

    policy_version: int  # after the update
    metrics: Mapping[str, float]
    logprobs: TokenLogprobs | None = None  # None: not sampled by an engine, or no update
    kv_amax_LS: Tensor | None = None  # largest magnitude for each scale of the KV cache, float32; None: not collected


@dataclass(frozen=True, slots=True)
class WeightSet:
    """All weights of one policy version, created by a worker for its rollout backend (engine/weights.py).

    Live tensors of the trainer, not copies: valid until its next update. Names are those of the decoder's parameters
    and of its linears.

    Example: WeightSet(4, {"norm.weight": weight}, codes={"layers.0.attention.qkv_proj": (codes, scale)})
    """

    policy_version: int
    tensors: Mapping[str, Tensor]  # by parameter; BF16, or float32 in a float32 model
    codes: Mapping[str, tuple[Tensor, Tensor]]  # by FP8 linear: E4M3 [N, K] and float32 multipliers [N/128, K/128]
    kv_scales: KVScales | None = None  # of a calibrated cache


@dataclass(frozen=True, slots=True)
class Published:
    """The result of `publish`, created by the worker after it has read weights and scales back from the engine.

    Example: Published(4, weights_digest="9f02c1d86b7e44aa", metrics={"publish/policy_version": 4.0})
    """

    policy_version: int
    weights_digest: str  # of the weights that the engine holds (engine/weights.py)
    metrics: Mapping[str, float]


METRIC_NAME = re.compile(r"[a-z0-9_.-]+(/[a-z0-9_.-]+)*")


def joined(*mappings: Mapping[str, float]) -> dict[str, float]:
    """One mapping of several: times add up, of peaks of memory the largest counts. AssertionError: another name is
    repeated, or a value is no number."""
    found: dict[str, float] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            assert METRIC_NAME.fullmatch(name), f"metric name {name!r} is not family/name in lower case"
            assert isinstance(value, int | float), f"metric {name!r} is a {type(value).__name__}, not a number"
            if name in found and name.startswith("time/"):
                value += found[name]
            elif name in found and name.startswith("memory/"):
                value = max(value, found[name])
            else:
                assert name not in found, f"metric {name!r} is reported twice"
            found[name] = value
    return found


def worker_times(name: str, seconds: Sequence[float], first: int = 0) -> dict[str, float]:
    """`NAME/worker_N` of several workers. first: number of the worker that `seconds` begins with."""
    return {f"{name}/worker_{worker}": value for worker, value in enumerate(seconds, first)}
