"""The engine: requests in, completions out.

    generate -> sequences -> [schedule -> launch -> ... -> read results -> stop?] until all are done -> completions

The host launches `LAG` forwards ahead of the results it reads, so the device never waits for it. A sequence's last
tokens may thus be drawn in vain; they are dropped, and what the others draw does not depend on them.

One call serves one batch of requests with one policy version. Nothing outlives the call but the pages and what they
hold: the next turn of a conversation finds its beginning there, until new weights are published. After an error or an
interrupt in the middle the pages go too.

What a request gets does not depend on the others: its tokens are a function of the weights, the prompt, the seed and
the sibling's number, because every op on the way keeps a row's order of sums (numerics.md §10) and draws from counters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from octetrl.config.errors import UserError
from octetrl.config.schema import EngineConfig
from octetrl.config.spec import ModelSpec
from octetrl.engine.admission import Admission, check_fits, pages_wanted
from octetrl.engine.block_manager import BlockManager
from octetrl.engine.kv_cache import KVCache, cache_format, configured_pages, host_pages
from octetrl.engine.metrics import EngineMetrics, GenerationProgress, Tally
from octetrl.engine.model_runner import ModelRunner, Results
from octetrl.engine.request import Group
from octetrl.engine.request import Sequence as Sibling
from octetrl.engine.scheduler import Scheduler
from octetrl.engine.stopping import Tokenizer, decoder_of, memoised
from octetrl.engine.transcript import Batch, Transcript
from octetrl.fp8.kv_scales import KVScales
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder
from octetrl.records import Completion, FinishReason, GenerationRequest

LAG = 2  # forwards launched beyond the one whose results are read, on a GPU

OnProgress = Callable[[GenerationProgress], None]


class Engine:
    """Generates with `model`, whose weights somebody else fills and publishes.

    `policy` says how K and V are cached and stamps every completion; `dtype` is the model's. A calibrated cache needs
    `set_kv_scales` for every policy version before `generate`.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        spec: ModelSpec,
        policy: PrecisionPolicy,
        tokenizer: Tokenizer,
        config: EngineConfig,
        context_length: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if context_length > spec.max_positions:
            raise UserError(
                f"model.context_length: {context_length} tokens were asked for and this model has"
                f" {spec.max_positions} positions; lower model.context_length to at most that"
            )
        self.device = torch.device(device)
        self.policy_version = 0
        self.metrics: EngineMetrics | None = None  # of the last `generate`
        self._config, self._policy, self._digest = config, policy, policy.digest
        self._page = cache_format(spec, policy, dtype, config.page_size)
        self._decode = decoder_of(tokenizer)
        eos_token_ids = set(spec.eos_token_ids)
        if tokenizer.eos_token_id is not None:
            eos_token_ids.add(tokenizer.eos_token_id)
        self._admission = Admission(
            vocab_size=spec.vocab_size,
            context_length=context_length,
            eos_token_ids=frozenset(eos_token_ids),
            decode=memoised(self._decode),
        )
        self._lag = LAG if self.device.type == "cuda" else 0
        self._runner = ModelRunner(
            model,
            max_batch=config.max_batch,
            max_tokens=context_length,
            page_size=config.page_size,
            device=self.device,
        )
        self._cache: KVCache | None = None
        self._blocks: BlockManager | None = None  # of this cache
        self._scale_2LK: Tensor | None = None
        self._scales_version: int | None = None
        if policy.kv_mode == "calibrated":
            heads = (2, spec.num_layers, spec.num_kv_heads)
            self._scale_2LK = torch.full(heads, torch.nan, dtype=torch.float32, device=self.device)

    def publish(self, version: int) -> None:
        """The model's weights are those of `version` from now on; prefixes of older ones go, unless the recipe keeps
        them."""
        self.policy_version = version
        if self._config.prefix_cache != "keep":
            self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """What the pages hold is not used again: the next call prefills every prompt."""
        if self._blocks is not None:
            self._blocks.forget()

    def set_kv_scales(self, scales: KVScales) -> None:
        """Puts the scales of a calibrated cache where the kernels read them. Raises ValueError for bad scales."""
        mode = self._policy.kv_mode
        assert self._scale_2LK is not None, f"KV scales are for a calibrated cache, this one is '{mode}'"
        given_2LK = torch.stack((scales.k_scale_LK, scales.v_scale_LK))
        if given_2LK.shape != self._scale_2LK.shape:
            raise ValueError(
                f"KV scales: got [L, K] = {list(given_2LK.shape[1:])}, this model has {list(self._scale_2LK.shape[1:])}"
            )
        if not bool((given_2LK.isfinite() & (given_2LK > 0)).all()):
            which, layer, head = (~(given_2LK.isfinite() & (given_2LK > 0))).nonzero()[0].tolist()
            raise ValueError(
                f"KV scales: the scale of {'KV'[which]} in layer {layer}, head {head} is"
                f" {float(given_2LK[which, layer, head])}; a scale is finite and above 0"
            )
        self._scale_2LK.copy_(given_2LK)
        self.forget_prefixes()  # their codes were written with other scales
        self._scales_version = scales.policy_version

    @property
    def kv_scales(self) -> KVScales | None:
        """The scales as they lie where the kernels read them; None before `set_kv_scales`, or without calibration."""
        if self._scale_2LK is None or self._scales_version is None:
            return None
        k_scale_LK, v_scale_LK = self._scale_2LK.clone().unbind()
        return KVScales(k_scale_LK, v_scale_LK, self._scales_version)

    def allocate_cache(self) -> None:
        """Takes the cache's memory now; `generate` does so too.

        On a CPU without `engine.kv_cache_tokens` the size follows from the requests, so there it waits for them.
        """
        num_pages = configured_pages(self._config, self._page, self.device)
        if self._cache is None and num_pages is not None:
            if num_pages < 1:
                raise UserError(
                    f"engine.kv_memory_fraction: {self._config.kv_memory_fraction} of the free memory does not hold one"
                    f" page ({self._page.bytes_per_page} bytes); raise it or free memory"
                )
            self._make_cache(num_pages)

    def _make_cache(self, num_pages: int) -> None:
        self._cache = KVCache(self._page, num_pages, self.device, self._scale_2LK)
        self._blocks = BlockManager(num_pages, self._page.page_size)

    def release_cache(self) -> None:
        """Gives the cache's memory back, and what was captured with it; scales stay."""
        self._cache = self._blocks = None
        if self._runner.graphs is not None:
            self._runner.graphs.forget()
            torch.cuda.empty_cache()  # or the trainer's first tensors would sit in the middle of that memory for good

    def generate(
        self, requests: Sequence[GenerationRequest], on_progress: OnProgress | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, `num_siblings` each, in the requests' order.

        Raises UserError, before any work, for a request that cannot be served, and RuntimeError for a calibrated
        cache without the scales of this policy version and for logits that are not finite.
        """
        self._check_scales()
        tally = Tally(self._config.max_batch)
        groups = [self._admission.group(index, request) for index, request in enumerate(requests)]
        cache, blocks = self._cache_for(groups)
        check_fits(groups, blocks)
        blocks.peak_used = 0
        scheduler = Scheduler(
            blocks,
            max_batch=self._config.max_batch,
            prefill_chunk=self._config.prefill_chunk,
            keeps_prefixes=self._config.prefix_cache != "off",
        )
        scheduler.submit(sibling for group in longest_first(groups) for sibling in self._admission.siblings(group))
        finished: list[dict[int, Completion]] = [{} for _ in groups]
        try:
            for sibling, completion in self._work(scheduler, cache, tally, on_progress):
                finished[sibling.group.index][sibling.sibling] = completion
        except BaseException:
            self.release_cache()  # it may hold whatever went wrong
            raise
        scheduler.check()
        assert blocks.num_used == 0, f"page accounting: {blocks.num_used} pages are still owned after the last sequence"
        self.metrics = self._metrics(tally, groups, scheduler, cache)
        return [[by_sibling[i] for i in sorted(by_sibling)] for by_sibling in finished]

    def _work(
        self, scheduler: Scheduler, cache: KVCache, tally: Tally, on_progress: OnProgress | None
    ) -> Iterator[tuple[Sibling, Completion]]:
        """Launches forwards, `LAG` ahead of reading their results; yields sequences as they end."""
        transcript = Transcript(self._config.max_batch, self._admission.context_length, self._admission.eos_token_ids)
        in_flight: deque[tuple[Batch, Results]] = deque()
        batch = transcript.batch(())
        while scheduler.has_work:
            step = scheduler.next_step(results_pending=bool(in_flight))
            if step is not None:
                for sequence, row in step.preempted:
                    transcript.close(sequence, row)
                transcript.open(step.joined)
                if step.decode is not batch.sequences and step.decode:
                    batch = transcript.batch(step.decode)
                results = self._runner.launch(step, batch, cache)
                scheduler.complete(step)
                tally.count_launch(step)
                if results is not None:
                    in_flight.append((batch, results))
            if in_flight and (step is None or len(in_flight) > self._lag):
                yield from self._take(*in_flight.popleft(), scheduler, transcript, tally)
            if on_progress is not None:
                on_progress(tally.progress(len(scheduler.running), len(scheduler.waiting)))

    def _take(
        self, batch: Batch, results: Results, scheduler: Scheduler, transcript: Transcript, tally: Tally
    ) -> Iterator[tuple[Sibling, Completion]]:
        """Reads a forward's results; yields the sequences that ended with it."""
        sampled = results.read()
        tally.count_results(transcript.num_added(batch))
        for sequence in transcript.add(batch, *sampled):
            token, num_tokens = transcript.last_token(sequence), transcript.num_tokens(sequence)
            if token < 0:
                raise RuntimeError(
                    f"request '{sequence.group.request.id}', sibling {sequence.sibling}: the logits after"
                    f" {num_tokens - 1} tokens are not finite, so nothing was sampled (tokens with non-finite"
                    f" activations so far: {int(self._runner.poisoned_tokens)}); look at the weights of policy version"
                    f" {self.policy_version}, at the last grad_norm and at the KV scales"
                )
            reason = sequence.stopping.after(token, num_tokens)
            if reason is not None:
                transcript.close(sequence, sequence.row)
                scheduler.finish(sequence)
                tally.done += 1
                yield sequence, self._completion(sequence, reason)

    def _completion(self, sequence: Sibling, reason: FinishReason) -> Completion:
        token_ids = tuple(sequence.token_ids[sequence.prompt_length :])
        return Completion(
            token_ids=token_ids,
            logprobs=tuple(sequence.logprobs),
            text=sequence.stopping.text_of(token_ids, self._decode),
            finish_reason=reason,
            policy_version=self.policy_version,
            precision_digest=self._digest,
        )

    def _check_scales(self) -> None:
        if self._scale_2LK is None:
            return
        if self._scales_version is None:
            raise RuntimeError(
                "the KV cache is calibrated FP8 and has no scales: calibrate on some prompts and call set_kv_scales"
                " before generate, or set fp8.kv_cache to dynamic or none"
            )
        if self._scales_version != self.policy_version:
            raise RuntimeError(
                f"the KV scales belong to policy version {self._scales_version} and the weights to"
                f" {self.policy_version}: publish both (publish and set_kv_scales) before generate"
            )

    def _cache_for(self, groups: Sequence[Group]) -> tuple[KVCache, BlockManager]:
        self.allocate_cache()
        if configured_pages(self._config, self._page, self.device) is None:
            wanted = pages_wanted(groups, self._config.max_batch, self._page.page_size)
            wanted = max(1, min(wanted, host_pages(self._config, self._page)))
            if self._cache is None or self._cache.num_pages != wanted:  # no trace of earlier calls, in metrics neither
                self._cache = None  # the old pages go before the new ones come
                self._make_cache(wanted)
        assert self._cache is not None and self._blocks is not None, "the KV cache was not allocated"
        self._runner.reset()
        if self._cache.saturated_L2K is not None:
            self._cache.saturated_L2K.zero_()
        return self._cache, self._blocks

    def _metrics(self, tally: Tally, groups: Sequence[Group], scheduler: Scheduler, cache: KVCache) -> EngineMetrics:
        blocks = scheduler.blocks
        share_L2K = None
        total = 0.0
        values_per_head = (tally.decoded_tokens + tally.prefilled_tokens) * self._page.head_size
        if cache.saturated_L2K is not None:
            share_L2K = cache.saturated_L2K.cpu().double() / max(1, values_per_head)
            total = float(share_L2K.sum()) / (share_L2K[:, 0].numel() * self._page.scaled_tensors)
        return tally.metrics(
            prompt_tokens=sum(len(group.request.prompt_token_ids) for group in groups),
            preemptions=scheduler.preemptions,
            cache_occupancy=blocks.peak_used / blocks.num_pages,
            kv_capacity_tokens=blocks.num_pages * blocks.page_size,
            kv_saturation=total,
            kv_saturation_L2K=share_L2K,
            non_finite_tokens=int(self._runner.poisoned_tokens),
            capture_seconds=0.0 if self._runner.graphs is None else self._runner.graphs.seconds,
        )


def longest_first(groups: Sequence[Group]) -> list[Group]:
    """By the length that each request is expected to reach, where it says so; the others first, as they came.

    What runs longest should start first, or the last of them run alone. A request nobody knows may be as long as any.
    """

    def key(group: Group) -> float:
        expected = group.request.expected_tokens
        return -math.inf if expected is None else -expected

    return sorted(groups, key=key)
