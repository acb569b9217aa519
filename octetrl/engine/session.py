"""An open session: requests arrive while others run, and their tokens come out as they are read.

    with engine.session() as session:
        session.submit(request)                 between any two steps
        while session.has_work:
            for event in session.events(): ...  submit or cancel here

The host launches `lag` forwards ahead of the results it reads, so the device never waits for it. Some tokens are
sampled after a sequence's end; they are dropped, and other sequences do not depend on them. A step launches one
forward, reads the oldest one's results, or both. `Engine.generate` is a session whose requests all arrive at its
beginning.

Completions are reported when they end. A request submitted with `streams` is also reported token by token, in order.
These tokens are final, but a stop string that began in them may still cut their text.

A request's result does not depend on its arrival or on other requests (engine.py). The pages of a cancelled request are
freed at once. Forwards in flight may still write to them, but the device runs in order, so later forwards read them
only afterwards. Requests submitted between the same two steps start in the order of `longest_first`, behind all earlier
ones.

One policy version serves a session, and the engine refuses new weights while it is open, except within `adopt`. A step
that fails ends the session and frees all pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from octetrl.config.schema import EngineConfig
from octetrl.engine.admission import Admission, check_fits
from octetrl.engine.block_manager import BlockManager
from octetrl.engine.kv_cache import KVCache
from octetrl.engine.metrics import EngineMetrics, Tally, session_metrics
from octetrl.engine.model_runner import ModelRunner, Results, Sampled
from octetrl.engine.request import NO_ROW, RequestGroup, RunningSequence
from octetrl.engine.row_edits import catch_up, event_of
from octetrl.engine.scheduler import longest_first
from octetrl.engine.sequence_states import StateRunner, StateScheduler
from octetrl.engine.speculation import DraftSource, Speculator
from octetrl.engine.stopping import Decode
from octetrl.engine.transcript import Batch, Transcript
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.records import Completion, GenerationProgress, GenerationRequest, OnCompletions, OnProgress, SessionEvent
from octetrl.system.errors import UserError

Ended = tuple[RunningSequence, Completion]


class Session:
    """Created by `Engine.session`. A context manager: leaving it cancels unfinished requests. Not thread-safe.

    `stamp`: policy version and precision digest of every completion. `on_close` receives whether the cache is sound.
    """

    def __init__(
        self,
        *,
        cache: KVCache,
        blocks: BlockManager,
        runner: ModelRunner,
        admission: Admission,
        config: EngineConfig,
        prefill_chunk: int,
        decode: Decode,
        stamp: tuple[int, str],
        lag: int,
        on_close: Callable[[Session, bool], None],
        on_progress: OnProgress | None = None,
        draft_source: DraftSource | None = None,
    ) -> None:
        self._cache, self._blocks, self._runner, self._admission = cache, blocks, runner, admission
        self._decode, self._stamp, self._lag = decode, stamp, lag
        self._on_close, self._on_progress = on_close, on_progress
        self._tally = Tally(config.max_batch, captured_before=None if runner.graphs is None else runner.graphs.seconds)
        keeps_prefixes = config.prefix_cache != "off"
        self._scheduler = runner.new_scheduler(blocks, config.max_batch, prefill_chunk, keeps_prefixes=keeps_prefixes)
        self._transcript = Transcript(config.max_batch, admission.context_length, admission.eos_token_ids)
        if isinstance(self._scheduler, StateScheduler) and isinstance(runner, StateRunner):
            self._scheduler.since, self._scheduler.copy_states = self._transcript.since, runner.copy_states
        parts = (self._transcript, self._scheduler, runner, cache, self._tally)
        self._speculator = Speculator(config.speculation, draft_source, *parts)
        self._in_flight: deque[tuple[Batch, Results]] = deque()
        self._batch = self._transcript.batch(())
        self._submitted: list[RequestGroup] = []  # since the last step
        self._groups: dict[str, RequestGroup] = {}  # unfinished
        self._reported: dict[RunningSequence, int] = {}  # tokens, of those that stream
        self._num_submitted, self._is_open = 0, True
        self.adopts = False  # new weights, at this moment

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(sound=kind is None or issubclass(kind, UserError))

    # ------------------------------------------------------------ requests

    def submit(self, request: GenerationRequest, *, streams: bool = False) -> None:
        """Adds a request, which starts with the next step. Raises UserError for a request that cannot be served, or
        whose id belongs to an unfinished request."""
        if request.id in self._groups:
            raise UserError(f"request '{request.id}': a request with this id is not finished yet; use a different id")
        group = self._admission.group(self._num_submitted, request)
        group.streams = streams
        self.accept(group)

    def accept(self, group: RequestGroup) -> None:
        """`submit` for a request that has passed admission."""
        assert self._is_open, "the session is closed"
        check_fits((group,), self._blocks)
        self._groups[group.request.id] = group
        self._submitted.append(group)
        self._num_submitted += 1
        self._tally.count_request(len(group.request.prompt_token_ids))

    def cancel(self, request_id: str) -> None:
        """Stops the request's siblings; no event of theirs follows. An unknown or finished id is ignored."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return
        if group in self._submitted:
            self._submitted.remove(group)
            self._tally.cancelled += group.num_unfinished
        self._drop([sibling for sibling in self._unfinished() if sibling.group is group])
        self._rest()

    def _unfinished(self) -> list[RunningSequence]:
        return [*self._scheduler.running, *self._scheduler.waiting]

    def _drop(self, siblings: list[RunningSequence]) -> None:
        for sibling in siblings:
            if sibling.row != NO_ROW:
                self._transcript.close(sibling, sibling.row)
            self._scheduler.cancel(sibling)
            self._speculator.end(sibling, keeps=False)
            self._reported.pop(sibling, None)
        self._tally.cancelled += len(siblings)

    def adopt(self, put: Callable[[], int], *, keeps_cache: bool) -> list[SessionEvent]:
        """Continues with other weights: `put` loads them and returns their version. Sequences keep their tokens. Their
        cache is kept, or computed again. Returns events of the forwards in flight."""
        parts = (part for launched in self._in_flight for part in self._speculator.parts(*launched))
        ended = [each for part in parts for each in self._take(*part)]
        self._in_flight.clear()
        for one in self._unfinished():
            one.sampled_until.append((self._transcript.num_tokens(one) - one.prompt_length, self._stamp[0]))
        for sequence, row in self._scheduler.change_weights(keeps_cache=keeps_cache):
            self._transcript.close(sequence, row)
        self.adopts = True
        self._stamp = (put(), self._stamp[1])
        self.adopts = False
        return [self._last_event(*each) for each in ended]

    # ------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        return bool(self._submitted) or self._scheduler.has_work

    def events(self, wait_seconds: float = 0.0) -> list[SessionEvent]:
        """New events. Launches one forward, reads the results of one, or both. Returns at once if there is no work.

        This session runs in the caller's process: a call never waits, and `wait_seconds` has no effect.
        """
        events = [self._last_event(sibling, completion) for sibling, completion in self.advance()]
        for sibling, reported in self._reported.items():
            token_ids, logprobs = self._transcript.since(sibling, reported)
            if token_ids:
                self._reported[sibling] = reported + len(token_ids)
                events.append(event_of(sibling, reported, token_ids, logprobs, None))
        return events

    def advance(self) -> list[Ended]:
        """Like `events`, but returns only the sequences that ended."""
        assert self._is_open, "the session is closed"
        if not self.has_work:
            return []
        try:
            ended = self._advance()
        except BaseException:
            self.close(sound=False)  # the cache may contain wrong values
            raise
        self._rest()
        if self._on_progress is not None:
            self._on_progress(self.progress())
        return ended

    def _advance(self) -> list[Ended]:
        scheduler, transcript = self._scheduler, self._transcript
        if self._submitted:
            submitted, self._submitted = longest_first(self._submitted), []
            for group in submitted:
                siblings = self._admission.siblings(group)
                scheduler.submit(siblings)
                if group.streams:
                    self._reported.update(dict.fromkeys(siblings, 0))
        step = scheduler.next_step(results_pending=bool(self._in_flight))
        if step is not None:
            for sequence, row in step.preempted:
                transcript.close(sequence, row)
            transcript.open(step.joined)
            if step.decode is not self._batch.sequences and step.decode:
                self._batch = transcript.batch(step.decode)
            catch_up(self._batch, transcript, scheduler.clock)
            step.drafts = self._speculator.plan(step, self._batch, bool(self._in_flight))
            results = self._runner.launch(step, self._batch, self._cache)
            scheduler.complete(step)
            self._tally.count_launch(step)
            self._speculator.prepare(self._batch)
            if results is not None:
                self._in_flight.append((self._batch, results))
        ended: list[Ended] = []
        has_drafts = step is not None and step.drafts is not None  # only its results say how long its sequences are
        reads_at_once = has_drafts or self._batch.edited or self._speculator.is_on(self._batch)
        lag = len(self._in_flight) - 1 if step is None else 0 if reads_at_once else self._lag
        while len(self._in_flight) > max(lag, 0):
            for part in self._speculator.parts(*self._in_flight.popleft()):
                ended += self._take(*part)
        return ended

    def _take(self, batch: Batch, sampled: Sampled) -> list[Ended]:
        """Adds a forward's tokens; the sequences that ended with it."""
        transcript, ended = self._transcript, []
        for sequence in transcript.add(batch, *sampled):
            token, num_tokens = transcript.last_token(sequence), transcript.num_tokens(sequence)
            if token < 0:
                raise NonFiniteError(
                    f"request '{sequence.group.request.id}', sibling {sequence.sibling}: the logits after"
                    f" {num_tokens - 1} tokens are not finite, so nothing was sampled (tokens with non-finite"
                    f" activations so far: {self._runner.num_poisoned()}); look at the weights of policy version"
                    f" {self._stamp[0]}, at the last grad_norm and at the KV scales"
                )
            reason = sequence.stopping.after(token, num_tokens)
            if reason is not None:
                transcript.close(sequence, sequence.row)
                self._scheduler.finish(sequence)
                self._speculator.end(sequence)
                self._tally.done += 1
                ended.append((sequence, sequence.completion(reason, self._decode, *self._stamp)))
                if sequence.group.num_unfinished == 0:
                    self._groups.pop(sequence.group.request.id, None)
        return ended

    def _last_event(self, sibling: RunningSequence, completion: Completion) -> SessionEvent:
        reported = self._reported.pop(sibling, 0)
        return event_of(sibling, reported, completion.token_ids[reported:], completion.logprobs[reported:], completion)

    def _rest(self) -> None:
        """Once no request is left, drops the results that are still in flight."""
        if not self.has_work:
            self._in_flight.clear()
            self._tally.count_idle()

    # ------------------------------------------------------------ what it did

    def answer_lengths(self) -> dict[str, int]:
        """Tokens read so far of each unfinished request's longest unfinished answer."""
        lengths = dict.fromkeys(self._groups, 0)
        for one in self._unfinished():
            name, tokens = one.group.request.id, self._transcript.num_tokens(one) - one.prompt_length
            lengths[name] = max(lengths[name], tokens)
        return lengths

    def answers_so_far(self) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
        """Tokens and log-probs read so far of each unfinished answer, by request and sibling. None yet: empty."""
        return {(one.group.request.id, one.sibling): self._transcript.since(one, 0) for one in self._unfinished()}

    def progress(self) -> GenerationProgress:
        return self._tally.progress(len(self._scheduler.running), len(self._scheduler.waiting))

    def metrics(self) -> EngineMetrics:
        """Metrics up to now. On a GPU this waits for all launched forwards."""
        return session_metrics(self._tally, self._cache, self._blocks, self._runner, self._scheduler.preemptions)

    @property
    def pages_in_use(self) -> int:
        return self._blocks.num_used

    @property
    def num_pages(self) -> int:
        return self._blocks.num_pages

    def close(self, *, sound: bool = True) -> None:
        """Cancels unfinished requests. `sound` false: the cache is not reused. Does nothing on a closed session."""
        if not self._is_open:
            return
        self._is_open = False
        if sound:
            self._submitted.clear()
            self._drop(self._unfinished())
            self._scheduler.check()
            used = self._blocks.num_used
            assert used == 0, f"page accounting: {used} pages are still owned after the last sequence"
        self._on_close(self, sound)


class Advances(Protocol):
    """An open session that is advanced by its owner, as engine/session.py."""

    @property
    def has_work(self) -> bool: ...

    def accept(self, group: RequestGroup, /) -> None: ...

    def advance(self) -> Iterable[tuple[RunningSequence, Completion]]: ...


def whole_answers(
    session: Advances, groups: Sequence[RequestGroup], on_completions: OnCompletions | None
) -> list[list[Completion]]:
    """The completions of each group, in the order of its siblings. `on_completions` receives each when it ends."""
    finished: list[dict[int, Completion]] = [{} for _ in groups]
    for group in groups:
        session.accept(group)
    while session.has_work:
        ended = [(one.group.index, one.sibling, completion) for one, completion in session.advance()]
        for index, sibling, completion in ended:
            finished[index][sibling] = completion
        if on_completions is not None:
            on_completions(ended)
    return [[by_sibling[number] for number in sorted(by_sibling)] for by_sibling in finished]
