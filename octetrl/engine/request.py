"""The state of a request in generation: one `RequestGroup`, its `RunningSequence`s, and the `Prefix` they share.

A sequence is ready to decode when all its tokens except the last are in the cache. The last token is the query of the
next forward, and its logits give the next token. A prompt's last token is therefore never prefilled. Siblings need no
logits from one another. A preempted sequence is restored by prefilling the tokens it had. The cost is one query per
completion that a prefill could have answered.

While a sequence decodes, its newest tokens exist only on the device, because the host launches forwards ahead of their
results. The sequence's length follows from the number of forwards (`length`). The transcript gets its tokens when their
results are read (transcript.py). `token_ids` gets them when the sequence leaves the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octetrl.engine.stopping import Decode, Stopping
from octetrl.records import Completion, FinishReason, GenerationRequest

if TYPE_CHECKING:
    from octetrl.engine.draft_rows import DraftRows
    from octetrl.engine.logit_options import SequenceLogits
    from octetrl.engine.prompt_scores import PromptScores

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt without its last token, in pages that all siblings read. The group is one owner of each page."""

    token_ids: tuple[int, ...]
    pages: list[int]
    num_cached: int = 0
    prompt_scores: PromptScores | None = None  # the group's
    weights: int = 0  # which of the session's weights its pages begin with

    @property
    def num_to_cache(self) -> int:
        return len(self.token_ids)

    @property
    def is_cached(self) -> bool:
        return self.num_cached == len(self.token_ids)


@dataclass(slots=True, eq=False)
class RequestGroup:
    """One request. `prefix` is None before its first sibling runs, after pages ran out, and if nothing is shared."""

    request: GenerationRequest
    index: int  # among the requests of this session
    limit: int  # largest number of tokens of prompt and completion together, of any sibling
    num_unfinished: int
    num_running: int = 0
    prefix: Prefix | None = None
    streams: bool = False  # its tokens are reported as they are read
    prompt_scores: PromptScores | None = None  # None: nobody wants the log-probs of its prompt

    def limit_of(self, sibling: int) -> int:
        """Largest number of tokens of prompt and completion of one sibling."""
        limits = self.request.answer_limits
        return min(self.limit, len(self.request.prompt_token_ids) + limits[sibling]) if limits else self.limit

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def shares_prefix(self) -> bool:
        return self.request.num_siblings > 1 and len(self.request.prompt_token_ids) > 1


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One sibling. Its tokens below `writable` have pages; pages for later tokens are allocated in time."""

    group: RequestGroup
    sibling: int
    stopping: Stopping
    token_ids: list[int]  # prompt, and what was generated until it last left the batch
    logprobs: list[float] = field(default_factory=list)  # of the completion's tokens in `token_ids`
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0  # before it decodes
    writable: int = 0  # tokens, a multiple of the page size
    row: int = NO_ROW  # its place in the runner's batch while it runs
    joined_at: int | None = None  # the forward with which it began to decode; None: it does not decode
    logits: SequenceLogits | None = None  # None: its logits are not changed, nor reported
    weights: int = 0  # which of the session's weights its pages begin with
    sampled_until: list[tuple[int, int]] = field(default_factory=list)  # (its tokens so far, version), at new weights

    def completion(self, reason: FinishReason, decode: Decode, version: int, digest: str) -> Completion:
        """What it generated, with the version that sampled its last token and the digest of the precision table."""
        token_ids = tuple(self.token_ids[self.prompt_length :])
        text = self.stopping.text_of(token_ids, decode)
        first, updates = self._versions(version)
        return Completion(token_ids, tuple(self.logprobs), text, reason, first, digest, updates)

    def _versions(self, last: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The policy version that sampled its first token, and (n, version) for each that sampled from token n on.
        `last`: the version that sampled its last token."""
        begins, start = [], 0
        for end, version in self.sampled_until:
            if end > start:
                begins.append((start, version))
                start = end
        begins.append((start, last))
        return begins[0][1], tuple(begins[1:])

    @property
    def prompt_scores(self) -> PromptScores | None:
        return self.group.prompt_scores

    @property
    def num_to_cache(self) -> int:
        return len(self.token_ids) - 1

    @property
    def limit(self) -> int:
        """Largest number of its tokens, prompt included."""
        return self.group.limit_of(self.sibling)

    @property
    def prompt_length(self) -> int:
        return self.group.prompt_length

    def length(self, clock: int) -> int:
        """Number of its tokens when `clock` forwards have been launched, known to the host or not."""
        return len(self.token_ids) + (0 if self.joined_at is None else clock - self.joined_at)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of a prefix, or of a preempted sequence, to be prefilled."""

    owner: Prefix | RunningSequence
    start: int
    stop: int
    slot: int = NO_ROW  # of the owner's states, if it has any (sequence_states.py)


@dataclass(slots=True)
class Step:
    """The device's next work: page copies, then one forward over `chunks`, or over one query of each of `decode`."""

    decode: tuple[RunningSequence, ...] = ()  # the same object as in the step before if the batch did not change
    chunks: list[Chunk] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), before the forward
    state_copies: list[tuple[int, int]] = field(default_factory=list)  # of slots, before the forward
    new_pages: list[tuple[int, int, int]] = field(default_factory=list)  # (row, index in its block table, page)
    joined: list[RunningSequence] = field(default_factory=list)  # decode since this step
    preempted: list[tuple[RunningSequence, int]] = field(default_factory=list)  # and the row each had; none in `decode`
    drafts: DraftRows | None = None  # further rows of the decode forward
