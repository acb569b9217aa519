"""vLLM as a rollout backend (rollout/backend.py), in the trainer's process and on its GPU.

    put_weights     wakes vLLM's weights, copies codes, scales and tensors by name, drops its prefixes
    weights_digest  reads all of it back from vLLM's model
    wake            wakes the cache, clears it if it is FP8, writes the KV scales and reads them back
    sleep           vLLM's level 2: weights and cache are freed

vLLM's memory for weights comes back with random content, and its scales as 1. So nothing is drawn before both were
written and read back. Parity with the trainer is not promised: vLLM's kernels add in other orders.

With `cluster.tensor_parallel` the workers of a group have one vLLM together (ranks.py), and call every method together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from octetrl.backends.one_session import OneSession
from octetrl.backends.vllm.calls import Started
from octetrl.backends.vllm.metrics import VllmMetrics
from octetrl.backends.vllm.ranks import Ranks, together
from octetrl.backends.vllm.session import VllmSession, checked
from octetrl.backends.vllm.settings import no_room
from octetrl.backends.vllm.weights import VllmWeights
from octetrl.config.schema import EngineConfig
from octetrl.engine.admission import Admission
from octetrl.engine.session import whole_answers
from octetrl.engine.stopping import Tokenizer, decoder_of, memoised
from octetrl.fp8.kv_scales import KVScales
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.records import Completion, GenerationRequest, OnCompletions, OnProgress, WeightSet
from octetrl.shapes.spec import ModelSpec

SLEEP_LEVEL = 2  # frees weights too; level 1 would copy them to the host


class VllmBackend(OneSession[VllmMetrics]):
    """`RolloutBackend` over a started engine, which is put to sleep at once.

    `context_length` and `config` must be those that the engine was started with (settings.py). `spec`: of this worker's
    part of the model. `ranks`: the workers that have the others; None: it has the model whole. Raises UserError for
    a calibrated cache whose attention may not read new scales.
    """

    NAME = "vLLM"

    def __init__(
        self,
        vllm: Started,
        *,
        spec: ModelSpec,
        policy: PrecisionPolicy,
        tokenizer: Tokenizer,
        config: EngineConfig,
        context_length: int,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.policy_version = 0
        self._vllm, self._config, self._policy = vllm, config, policy
        self._ranks = ranks
        self._model = VllmWeights(spec, policy, ranks)
        self._weights: WeightSet | None = None  # the last put in
        self._digest = ""  # of all of them, read back from vLLM
        self._scales: KVScales | None = None
        self._decode = decoder_of(tokenizer)
        eos = {*spec.eos_token_ids, *(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))}
        self._admission = Admission(
            vocab_size=spec.vocab_size,
            context_length=context_length,
            eos_token_ids=frozenset(eos),
            decode=memoised(self._decode),
        )
        self._has_weights = self._has_cache = True
        if policy.kv_mode != "none":
            together(ranks, "start", lambda: self._apply(self._model.check_attention))
        self.sleep()

    # ------------------------------------------------------------ weights

    def put_weights(self, weights: WeightSet) -> None:
        """Copies the weights of a policy version into vLLM and drops its prefixes.

        Raises ValueError naming a weight or scale that is not finite, RuntimeError for a parameter of vLLM that would
        keep its random values.
        """
        self._refuse_while_open("put_weights")
        together(self._ranks, "publish", lambda: _check_above_zero(weights.kv_scales))
        self._wake_memory("weights")
        self._apply(lambda model: self._model.put(model, weights))
        self._weights, self.policy_version = weights, weights.policy_version
        self._scales = weights.kv_scales
        self._digest = self._read_back(covers_all=True)
        if self._has_cache:
            self._write_scales()
            self.forget_prefixes()

    def weights_digest(self, *, covers_all: bool = False) -> str:
        """Digest of what vLLM holds, compared with what was put in. Raises RuntimeError naming what differs.

        Under `fp8_rollout` the codes were made for vLLM alone, so that only one linear a version can be compared. The
        digest of all bytes then says whether any changed.
        """
        assert self._weights is not None, "`put_weights` comes first"
        if not self._has_weights:
            self._load_again()
        if self._has_cache and self._scales is not None:
            scales = self._scales
            together(self._ranks, "publish", lambda: self._apply(lambda model: self._model.check_scales(model, scales)))
        made_for_vllm = self._policy.uses_fp8("rollout") and not self._weights.codes
        if made_for_vllm:
            self._compare_digest(
                f"publish: vLLM's weights are not those of policy version {self.policy_version} any more, which were"
                " put in; stopping"
            )
        return self._read_back(covers_all=covers_all)

    def _read_back(self, *, covers_all: bool = False) -> str:
        weights = self._weights
        assert weights is not None
        digest: str = self._apply(lambda model: self._model.digest(model, weights, covers_all=covers_all))
        return digest

    def _load_again(self) -> None:
        """The last weights again, after a sleep. Their tensors are the trainer's: an update changes them."""
        weights = self._weights
        if weights is None:
            raise RuntimeError("vLLM has no weights yet; put_weights comes before generate")
        self._wake_memory("weights")
        self._apply(lambda model: self._model.put(model, weights))
        self._compare_digest(
            f"the weights of policy version {weights.policy_version} changed while vLLM slept; publish before generate"
        )

    def _compare_digest(self, otherwise: str) -> None:
        """Raises RuntimeError with this text if what vLLM holds is not what was last put in."""
        found = self._read_back(covers_all=True)

        def compare() -> None:
            if found != self._digest:
                raise RuntimeError(otherwise)

        together(self._ranks, "publish", compare)

    def _write_scales(self) -> None:
        if self._policy.kv_mode == "none" or self._scales is None:
            return
        scales = self._scales
        together(self._ranks, "publish", lambda: self._apply(lambda model: self._model.put_scales(model, scales)))

    def _check_calibrated(self) -> None:
        """A calibrated cache needs the scales of the weights that vLLM holds."""
        if self._policy.kv_mode == "none":
            return
        if self._scales is None:
            raise RuntimeError("the KV cache is calibrated FP8 and has no scales: calibrate before generate")
        if self._scales.policy_version != self.policy_version:
            raise RuntimeError(
                f"the KV scales belong to policy version {self._scales.policy_version} and the weights to"
                f" {self.policy_version}: publish both before generate"
            )

    # ------------------------------------------------------------ memory

    def sleep(self) -> None:
        """Frees vLLM's weights and cache."""
        self._refuse_while_open("sleep")
        if self._has_weights or self._has_cache:
            if not (self._has_weights and self._has_cache):
                self._wake_memory("weights" if self._has_cache else "kv_cache")  # vLLM sleeps as a whole
            together(self._ranks, "sleep", self._sleep)
            self._has_weights = self._has_cache = False
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _sleep(self) -> None:
        with _one_reading_of_free_memory():
            self._vllm.engine.sleep(level=SLEEP_LEVEL)

    def wake(self) -> None:
        """Weights, cache and scales, so that requests can be served."""
        if not self._has_weights:
            self._load_again()
        if not self._has_cache:
            self._wake_memory("kv_cache")
            if self._policy.kv_mode != "none":
                self._vllm.engine.collective_rpc(_clear_cache)
            self._write_scales()

    def _wake_memory(self, which: str) -> None:
        if self._has_weights if which == "weights" else self._has_cache:
            return
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        together(self._ranks, "wake", lambda: self._map_memory(which))
        if which == "weights":
            self._has_weights = True
        else:
            self._has_cache = True

    def _map_memory(self, which: str) -> None:
        try:
            self._vllm.engine.wake_up(tags=[which])
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise no_room(which, error) from error

    def forget_prefixes(self) -> None:
        """The next request prefills its whole prompt. A sleep has dropped them already."""
        if self._has_cache and not self._vllm.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its cached prefixes, because requests are still running")

    # ------------------------------------------------------------ generation

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_progress: OnProgress | None = None,
        on_completions: OnCompletions | None = None,
    ) -> list[list[Completion]]:
        """The completions of each request, `num_siblings` each, in the requests' order."""
        with self.session(on_progress) as session:
            capacity = session.num_pages * self._config.page_size
            groups = [checked(one, index, self._admission, capacity) for index, one in enumerate(requests)]
            return whole_answers(session, groups, on_completions)

    @contextmanager
    def session(self, on_progress: OnProgress | None = None) -> Iterator[VllmSession]:
        """An open session. One at a time; new weights are refused while it is open."""
        self._refuse_while_open("another session")
        self._check_calibrated()
        self.wake()
        session = VllmSession(
            self._vllm,
            admission=self._admission,
            decode=self._decode,
            page_size=self._config.page_size,
            max_batch=self._config.max_batch,
            stamp=(self.policy_version, self._policy.digest),
            on_close=self._closed,
            on_progress=on_progress,
            ranks=self._ranks,
        )
        with self._opened(session):
            yield session

    def rollout_metrics(self) -> dict[str, float]:
        """Metrics of the last `generate` or session; empty before the first."""
        return {} if self.metrics is None else self.metrics.named(scales_are_calibrated=self._policy.kv_mode != "none")

    def _apply(self, function: Callable[[Any], Any]) -> Any:
        """The result of `function` on vLLM's model."""
        (result,) = self._vllm.engine.apply_model(function)
        return result


def _check_above_zero(scales: KVScales | None) -> None:
    if scales is not None and not bool((scales.scale_LS > 0).all()):
        raise ValueError("KV scales: a scale is not above 0; look at the amax of K and V")


@contextmanager
def _one_reading_of_free_memory() -> Iterator[None]:
    """vLLM's sleep asserts, after it freed its memory, that the device has no less free than before. That is false if
    another process of the GPU allocated meanwhile, and vLLM would then never wake. So it reads free memory once."""
    read = torch.accelerator.get_memory_info
    torch.accelerator.get_memory_info = lru_cache(read)
    try:
        yield
    finally:
        torch.accelerator.get_memory_info = read


@torch.inference_mode()
def _clear_cache(worker: Any) -> None:
    """Zeroes the pages. Fresh memory may hold NaN codes, and a masked probability of 0 times NaN is NaN."""
    for cache in worker.model_runner.kv_caches:
        cache.view(torch.uint8).zero_()
