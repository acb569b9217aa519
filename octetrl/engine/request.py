"""The state of a request while it is generated: one `Group`, its `Sequence`s, and the `Prefix` they share.

A sequence is ready to decode when all its tokens but the last are in the cache: that one token is then the query of the
next forward, and its logits give the next token. So a prompt's last token is never prefilled, siblings need no logits
from one another, and a preempted sequence is brought back by prefilling what it had and going on. The price is one
query per completion that a prefill could have answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octetrl.engine.stopping import Stopping
from octetrl.records import GenerationRequest

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt without its last token, in pages that all siblings read. The group is one owner of each page."""

    token_ids: tuple[int, ...]
    pages: list[int]
    num_cached: int = 0

    @property
    def num_to_cache(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True, eq=False)
class Group:
    """One request. `prefix` is None before its first sibling runs, when pages ran out, and where nothing is shared."""

    request: GenerationRequest
    index: int  # among the requests of this call
    limit: int  # most tokens of prompt and completion together
    num_unfinished: int
    num_running: int = 0
    prefix: Prefix | None = None

    @property
    def shares_prefix(self) -> bool:
        return self.request.num_siblings > 1 and len(self.request.prompt_token_ids) > 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One sibling. Its tokens below `writable` have their pages; pages for later ones are made in time."""

    group: Group
    sibling: int
    stopping: Stopping
    token_ids: list[int]  # prompt and completion so far
    logprobs: list[float] = field(default_factory=list)  # of the completion's tokens
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    writable: int = 0  # tokens, a multiple of the page size
    row: int = NO_ROW  # its place in the runner's batch while it runs

    @property
    def num_to_cache(self) -> int:
        return len(self.token_ids) - 1

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[len(self.group.request.prompt_token_ids) :]

    def append(self, token: int, logprob: float) -> None:
        """The query that gave `token` is now cached; `token` is the next query."""
        self.num_cached += 1
        self.token_ids.append(token)
        self.logprobs.append(logprob)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of a prefix, or of a sequence that comes back, to be put into the cache."""

    owner: Prefix | Sequence
    start: int
    stop: int


@dataclass(slots=True)
class Step:
    """One forward: a query for each sequence of `decode`, after them the tokens of `chunks`."""

    decode: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), before the forward
    admitted: list[Sequence] = field(default_factory=list)  # have a row since this step
    repaged: list[Sequence] = field(default_factory=list)  # their page list changed
