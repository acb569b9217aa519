"""The engine: requests in, completions out.

    generate -> sequences -> [schedule -> launch -> ... -> read results -> stop?] until all are done -> completions
    session  -> the same, while requests still come and go (session.py)

One call, or one session, has one policy version. Only the pages outlive it: the next turn of a conversation finds its
beginning there, until new weights are published. After an error or an interrupt the pages are freed too.

A request's tokens do not depend on other requests. They are a function of the weights, the prompt, the seed and the
sibling's number. Every op keeps a row's order of sums (docs/fp8.md §10), and sampling uses counters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octetrl.config.schema import EngineConfig
from octetrl.engine.admission import Admission, pages_wanted
from octetrl.engine.block_manager import BlockManager
from octetrl.engine.grammars import Grammars
from octetrl.engine.kv_cache import (
    CacheScales,
    KVCache,
    cache_format,
    configured_pages,
    host_pages,
    sized_by_requests,
    smallest_pages,
)
from octetrl.engine.metrics import EngineMetrics
from octetrl.engine.model_runner import ModelRunner
from octetrl.engine.ngram_drafts import NGramDrafts, draft_source_of
from octetrl.engine.sequence_states import StateRunner
from octetrl.engine.session import Session, whole_answers
from octetrl.engine.stopping import Tokenizer, decoder_of, memoised
from octetrl.engine.weights import put_weights, weights_digest
from octetrl.fp8.kv_scales import KVScales, same_bits
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder
from octetrl.records import Completion, EarlierAnswer, GenerationRequest, OnCompletions, OnProgress, WeightSet
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError

LAG = 2  # forwards launched beyond the one whose results are read, on a GPU
OPEN_CACHE_BYTES = 1 << 28  # size of a session's cache on a CPU if neither recipe nor requests set it


class Engine:
    """Generates with `model`. A worker fills and publishes its weights.

    `policy` decides how K and V are cached, and its digest is stored in every completion. `dtype` is the model's. A
    calibrated cache needs `set_kv_scales` for every policy version before `generate`.
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
                f"model.context_length: {context_length} tokens were requested, but this model has"
                f" {spec.max_positions} positions; lower model.context_length to at most that"
            )
        self.device = torch.device(device)
        self.policy_version = 0
        self.metrics: EngineMetrics | None = None  # of the last `generate` or session
        self._config, self._policy, self._digest = config, policy, policy.digest
        self._prefill_chunk = config.prefill_chunk or spec.prefill_chunk
        self._model = model
        self._weights: WeightSet | None = None  # the last put in
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
            grammars=Grammars(tokenizer, spec.vocab_size, sorted(eos_token_ids)),
        )
        self._lag = LAG if self.device.type == "cuda" else 0
        new_runner = StateRunner if spec.state_bytes(dtype.itemsize) else ModelRunner
        self._runner = new_runner(model, config, context_length, self.device)
        self.draft_source = draft_source_of(config.speculation)  # None: no speculation
        self._session: Session | None = None  # the open one
        self._cache: KVCache | None = None
        self._blocks: BlockManager | None = None  # of this cache
        self._scales = CacheScales(spec, self.device) if policy.kv_mode == "calibrated" else None

    def put_weights(self, weights: WeightSet) -> None:
        """Loads the weights and KV scales of a policy version. `weights_digest` then reads them back.

        Raises ValueError naming a weight or scale that is not finite, RuntimeError while a session is open.
        """
        self._refuse_while_open("put_weights")
        put_weights(self._model, weights)
        if weights.kv_scales is not None:
            self.set_kv_scales(weights.kv_scales)
        self.publish(weights.policy_version)
        self._weights = weights

    def weights_digest(self, *, covers_all: bool = False) -> str:
        """Digest of the weights and scales, read back from where the kernels read them and compared with those put in.

        `covers_all`: not only of FP8 weights and adapters. Raises RuntimeError naming the first tensor that differs.
        """
        assert self._weights is not None, "`put_weights` comes first"
        given, held = self._weights.kv_scales, self.kv_scales
        if given is not None and (held is None or not same_bits(held, given)):
            raise RuntimeError(
                f"publish: the engine's KV scales are not those published with policy version {self.policy_version}"
            )
        return weights_digest(self._model, self._weights, covers_all=covers_all)

    def publish(self, version: int) -> None:
        """Declares that the model has the weights of `version`. Drops cached prefixes, unless the recipe keeps them."""
        self._refuse_while_open("publish")
        self.policy_version = version
        if self._config.prefix_cache != "keep":
            self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Drops all cached prefixes: the next call prefills every prompt."""
        if self._blocks is not None:
            self._blocks.forget()

    def remember(self, answers: Sequence[EarlierAnswer]) -> None:
        """Makes drafts from answers of earlier steps too, oldest first. Without n-gram drafts it does nothing."""
        if isinstance(self.draft_source, NGramDrafts):
            self.draft_source.remember(answers)

    def set_kv_scales(self, scales: KVScales) -> None:
        """Copies the scales of a calibrated cache to where the kernels read them. Raises ValueError for bad scales."""
        self._refuse_while_open("set_kv_scales")
        assert self._scales is not None, f"KV scales are for a calibrated cache, not for '{self._policy.kv_mode}'"
        self._scales.set(scales)
        self.forget_prefixes()  # their codes were written with other scales

    @property
    def kv_scales(self) -> KVScales | None:
        """The scales that the kernels read. None before `set_kv_scales`, or without calibration."""
        return None if self._scales is None else self._scales.held

    def wake(self) -> None:
        """Allocates the KV cache now. `generate` and `session` do so too.

        On a CPU without `engine.kv_cache_tokens` the size follows from the requests, so nothing is allocated yet.
        """
        if isinstance(self._runner, StateRunner):
            self._runner.wake()
        if self._cache is None and not sized_by_requests(self._config, self.device):
            num_pages = smallest_pages(self._model.group, configured_pages(self._config, self._page, self.device))
            if num_pages < 1:
                raise UserError(
                    f"engine.kv_memory_fraction: {self._config.kv_memory_fraction} of the free memory does not hold one"
                    f" page ({self._page.bytes_per_page} bytes); raise it or free memory"
                )
            self._make_cache(num_pages)

    def _make_cache(self, num_pages: int) -> None:
        scale_LS = None if self._scales is None else self._scales.scale_LS
        self._cache = KVCache(self._page, num_pages, self.device, scale_LS)
        self._blocks = self._runner.new_blocks(num_pages, self._page.page_size)

    def sleep(self) -> None:
        """Frees the KV cache and the graphs captured with it. Scales stay."""
        self._refuse_while_open("sleep")
        self._cache = self._blocks = None
        if isinstance(self._runner, StateRunner):
            self._runner.sleep()
        if self._runner.graphs is not None:
            self._runner.graphs.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise the trainer's first tensors would fragment that memory

    def rollout_metrics(self) -> dict[str, float]:
        """Metrics of the last `generate` or session, by the names of a step's metrics; empty before the first."""
        if self.metrics is None:
            return {}
        return self.metrics.named(scales_are_calibrated=self._policy.kv_mode == "calibrated")

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_progress: OnProgress | None = None,
        on_completions: OnCompletions | None = None,
    ) -> list[list[Completion]]:
        """The completions of each request, `num_siblings` each, in the requests' order.

        Raises UserError, before any work, for a request that cannot be served, and RuntimeError for a calibrated
        cache without the scales of this policy version and for logits that are not finite.
        """
        self._check_scales()
        groups = [self._admission.group(index, request) for index, request in enumerate(requests)]
        wanted = pages_wanted(groups, self._config.max_batch, self._page.page_size)
        with self._open(min(wanted, host_pages(self._config, self._page)), on_progress) as session:
            return whole_answers(session, groups, on_completions)

    def session(self, on_progress: OnProgress | None = None) -> Session:
        """Opens a session that takes requests while others run (session.py). Use it as a context manager, one at a
        time.

        On a CPU without `engine.kv_cache_tokens` the cache holds `max_batch` whole contexts, limited to
        `OPEN_CACHE_BYTES`, and at least one whole context.
        """
        self._check_scales()
        whole = -(-self._admission.context_length // self._page.page_size)
        affordable = max(whole, OPEN_CACHE_BYTES // self._page.bytes_per_page)
        return self._open(min(self._config.max_batch * (whole + 1), affordable), on_progress)

    def _open(self, wanted_pages: int, on_progress: OnProgress | None) -> Session:
        """`wanted_pages`: used if neither the recipe nor a GPU's memory decides the number of pages."""
        self._refuse_while_open("another session")
        cache, blocks = self._cache_for(wanted_pages)
        blocks.peak_used = 0
        self._session = Session(
            cache=cache,
            blocks=blocks,
            runner=self._runner,
            admission=self._admission,
            config=self._config,
            prefill_chunk=self._prefill_chunk,
            decode=self._decode,
            stamp=(self.policy_version, self._digest),
            lag=self._lag,
            on_close=self._closed,
            on_progress=on_progress,
            draft_source=self.draft_source,
        )
        return self._session

    def _closed(self, session: Session, sound: bool) -> None:
        self._session = None
        if sound:
            self.metrics = session.metrics()
        else:
            self.sleep()

    def _refuse_while_open(self, what: str) -> None:
        if self._session is not None and not self._session.adopts:
            raise RuntimeError(f"{what} is not possible while the engine has an open session; close it first")

    def _check_scales(self) -> None:
        if self._scales is not None:
            self._scales.check(self.policy_version)

    def _cache_for(self, wanted_pages: int) -> tuple[KVCache, BlockManager]:
        self.wake()
        if sized_by_requests(self._config, self.device):
            wanted = smallest_pages(self._model.group, max(1, wanted_pages))
            if self._cache is None or self._cache.num_pages != wanted:  # no trace of earlier calls, in metrics neither
                self._cache = None  # the old pages go before the new ones come
                self._make_cache(wanted)
        assert self._cache is not None and self._blocks is not None, "the KV cache was not allocated"
        self._runner.reset()
        if self._cache.saturated_LS is not None:
            self._cache.saturated_LS.zero_()
        return self._cache, self._blocks
