"""An open session with vLLM: requests in, events out. Each call of `events` runs one step of vLLM's engine.

A sibling is one request of vLLM, with a seed of its own. vLLM stops at token ids and lengths; stop strings are found
here, token by token, as in our own engine, because vLLM has no tokenizer here. Tokens that vLLM has sampled beyond a
stop string are dropped.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

from octetrl.backends.one_session import AdapterSession
from octetrl.backends.vllm.calls import LLMEngine, RequestOutput, Started, block_pool_of, scheduler_of
from octetrl.backends.vllm.metrics import Tally, VllmMetrics
from octetrl.backends.vllm.ranks import Ranks, step_together
from octetrl.config.backends import VLLM_TEMPERATURES
from octetrl.engine.admission import Admission
from octetrl.engine.request import RequestGroup, RunningSequence
from octetrl.engine.stopping import Decode
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.records import Completion, FinishReason, GenerationProgress, GenerationRequest, OnProgress, SessionEvent
from octetrl.system.errors import UserError

Ended = tuple[RunningSequence, Completion]


class VllmSession(AdapterSession[str, VllmMetrics]):
    """Created by `VllmBackend.session`. Leaving it cancels unfinished requests. `stamp`: policy version and precision
    digest of every completion. `ranks`: of a tensor-parallel vLLM, whose sessions are stepped together."""

    def __init__(
        self,
        vllm: Started,
        *,
        admission: Admission,
        decode: Decode,
        page_size: int,
        max_batch: int,
        stamp: tuple[int, str],
        on_close: Callable[[VllmMetrics], None],
        on_progress: OnProgress | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(on_close)
        self._ranks = ranks
        self._vllm, self._admission, self._decode = vllm, admission, decode
        self._page_size, self._stamp, self._on_progress = page_size, stamp, on_progress
        self._tally = Tally(max_batch)
        self._reported: dict[str, int] = {}  # tokens, of those that stream

    @property
    def _engine(self) -> LLMEngine:
        return self._vllm.engine

    # ------------------------------------------------------------ requests

    def checked(self, request: GenerationRequest) -> RequestGroup:
        return checked(request, self._num_submitted, self._admission, self.num_pages * self._page_size)

    def accept(self, group: RequestGroup, *, streams: bool = False) -> None:
        assert self._is_open, "the session is closed"
        request = group.request
        self._num_submitted += 1
        self._tally.count_request(len(request.prompt_token_ids))
        for sibling in self._admission.siblings(group):
            name = f"{request.id}#{sibling.sibling}"
            self._engine.add_request(name, self._vllm.prompt(list(request.prompt_token_ids)), self._sampling(sibling))
            self._running[name] = sibling
            if streams:
                self._reported[name] = 0

    def _sampling(self, sibling: RunningSequence) -> object:
        """vLLM's parameters. EOS is one of the stop tokens, so vLLM's own rule for it is off."""
        request = sibling.group.request
        sampling = request.sampling
        return self._vllm.sampling(
            max_tokens=sibling.limit - len(request.prompt_token_ids),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sibling_seed(request.seed, sibling.sibling),
            stop_token_ids=sorted(sibling.stopping.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
        )

    def _drop(self, keys: list[str]) -> None:
        for name in keys:
            self._engine.abort_request([name])  # of several, vLLM would free the pages in the order of a set
            self._running.pop(name)
            self._reported.pop(name, None)
        self._rest()

    def adopt(self, put: Callable[[], int], *, keeps_cache: bool) -> Sequence[SessionEvent]:
        """Weights in flight: vLLM cannot. Raises UserError."""
        raise UserError(
            "cluster.weights_in_flight: engine.backend: vllm cannot change weights while it generates; turn it off"
        )

    # ------------------------------------------------------------ steps

    def events(self, wait_seconds: float = 0.0) -> list[SessionEvent]:
        """New events. Runs one step of vLLM, if there is work."""
        events = []
        for name, sibling, completion in self._advance():
            reported = self._reported.pop(name, 0)
            events.append(_event(sibling, reported, completion))
        for name, reported in self._reported.items():
            sibling = self._running[name]
            if len(sibling.logprobs) > reported:
                self._reported[name] = len(sibling.logprobs)
                events.append(_event(sibling, reported, None))
        return events

    def advance(self) -> list[Ended]:
        """Like `events`, but returns only the siblings that ended."""
        return [(sibling, completion) for _, sibling, completion in self._advance()]

    def _advance(self) -> list[tuple[str, RunningSequence, Completion]]:
        assert self._is_open, "the session is closed"
        if not self._running:
            return []
        outputs = step_together(self._ranks, self._engine.step)
        running, _ = scheduler_of(self._engine).get_request_counts()
        self._tally.count_step(running, self.pages_in_use / max(1, self.num_pages))
        ended = []
        for output in outputs:
            sibling = self._running.get(output.request_id)
            if sibling is None:
                continue  # cancelled, or behind a stop string
            reason = self._take(output, sibling)
            if reason is None:
                continue
            name = output.request_id
            if not output.finished:
                self._engine.abort_request([name])
            self._running.pop(name)
            self._tally.done += 1
            ended.append((name, sibling, sibling.completion(reason, self._decode, *self._stamp)))
        self._rest()
        if self._on_progress is not None:
            self._on_progress(self.progress())
        return ended

    def _take(self, output: RequestOutput, sibling: RunningSequence) -> FinishReason | None:
        """Adds an output's tokens, up to a stop. Returns why the sibling ends; None: it continues."""
        reason = None
        for part in output.outputs:
            logprobs = () if part.logprobs is None else part.logprobs.logprobs
            if len(logprobs) != len(part.token_ids):
                raise RuntimeError(
                    f"vLLM returned {len(logprobs)} log-probs for {len(part.token_ids)} tokens of {output.request_id}"
                )
            for token, logprob in zip(part.token_ids, logprobs, strict=True):
                if not math.isfinite(logprob):
                    raise NonFiniteError(
                        f"request '{sibling.group.request.id}', sibling {sibling.sibling}: vLLM's log-prob of token"
                        f" {len(sibling.logprobs)} is {logprob}; look at the weights of policy version"
                        f" {self._stamp[0]}, at the last grad_norm and at the KV scales"
                    )
                sibling.token_ids.append(token)
                sibling.logprobs.append(logprob)
                self._tally.generated_tokens += 1
                reason = sibling.stopping.after(token, len(sibling.token_ids))
                if reason is not None:
                    return reason
        if output.finished:
            raise RuntimeError(f"vLLM ended {output.request_id} before its limit and without a stop token")
        return reason

    def _rest(self) -> None:
        if not self._running:
            self._tally.count_idle()

    # ------------------------------------------------------------ what it did

    def progress(self) -> GenerationProgress:
        running, waiting = scheduler_of(self._engine).get_request_counts()
        return self._tally.progress(running, waiting)

    def metrics(self) -> VllmMetrics:
        return self._tally.metrics(self.num_pages * self._page_size)

    @property
    def num_pages(self) -> int:
        return block_pool_of(self._engine).num_gpu_blocks - 1  # one is never used

    @property
    def pages_in_use(self) -> int:
        return self.num_pages - block_pool_of(self._engine).get_num_free_blocks()


def checked(request: GenerationRequest, index: int, admission: Admission, capacity: int) -> RequestGroup:
    """The request as a group of siblings. `capacity`: tokens of the cache. Raises UserError for what vLLM is not asked
    to do, and for what any engine refuses."""
    temperature = request.sampling.temperature
    if request.sampling.logits is not None:
        raise UserError(
            f"request '{request.id}': penalties, grammars and further log-probs are for engine.backend: octetrl; leave"
            " them out"
        )
    if request.said[0]:
        raise UserError(
            f"request '{request.id}': vLLM cannot continue an answer that another engine began; ask for a whole one"
        )
    least, most = VLLM_TEMPERATURES
    if temperature > most or 0 < temperature < least:
        raise UserError(
            f"request '{request.id}': temperature is {temperature:g}, and vLLM samples at {least:g} to"
            f" {most:g}; give one of these, or 0 (greedy)"
        )
    group = admission.group(index, request)
    if group.limit > capacity:
        raise UserError(
            f"request '{request.id}': prompt and answer may take {group.limit} tokens, and vLLM's KV cache has"
            f" {capacity}; raise engine.kv_cache_tokens or engine.kv_memory_fraction, or lower max_new_tokens"
        )
    return group


def sibling_seed(seed: int, sibling: int) -> int:
    """A seed of 63 bits for one sibling, as vLLM has one seed for a request."""
    digest = hashlib.sha256(f"{seed} {sibling}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _event(sibling: RunningSequence, reported: int, completion: Completion | None) -> SessionEvent:
    begin = sibling.prompt_length + reported
    token_ids, logprobs = tuple(sibling.token_ids[begin:]), tuple(sibling.logprobs[reported:])
    return SessionEvent(sibling.group.request.id, sibling.sibling, token_ids, logprobs, completion)
