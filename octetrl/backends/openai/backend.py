"""A server with OpenAI's API as a rollout backend (rollout/backend.py): for evaluation and for data.

    generate, session     HTTP requests, `engine.openai.concurrency` of them at once (session.py)
    sleep, wake           nothing: this process holds no cache
    put_weights, digest   refused: a server answers with its own weights

So it serves no training run. With `answers: tokens` prompts go and answers come as token ids, and several turns are
exact. With `answers: text` only texts travel: completions have no token ids and no log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from octetrl.backends.one_session import OneSession
from octetrl.backends.openai.answers import SECTION, Models, failure_of, parsed
from octetrl.backends.openai.session import OpenaiSession, ServerMetrics, checked
from octetrl.backends.openai.text import VOCABULARY, CharacterTokenizer
from octetrl.config.schema import OpenaiConfig
from octetrl.endpoint import Endpoint, EndpointError
from octetrl.engine.admission import Admission
from octetrl.engine.session import whole_answers
from octetrl.engine.stopping import Tokenizer, decoder_of, memoised
from octetrl.records import Completion, GenerationRequest, OnCompletions, OnProgress, WeightSet
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError

_SHOWN = 400
NO_LIMIT = 1 << 30  # tokens of a context that only the server knows


class OpenaiBackend(OneSession[ServerMetrics]):
    """`RolloutBackend` over a server. `close` ends its connections."""

    NAME = "the server"

    def __init__(self, endpoint: Endpoint, config: OpenaiConfig, admission: Admission, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._endpoint, self._config, self._admission = endpoint, config, admission
        self._decode = decoder_of(tokenizer)

    @classmethod
    def of_tokens(
        cls, config: OpenaiConfig, *, spec: ModelSpec, tokenizer: Tokenizer, context_length: int
    ) -> OpenaiBackend:
        """For `answers: tokens`, with the tokenizer of the server's model. Asks the server for its models first.
        Raises UserError if it has not this one, or a shorter context."""
        endpoint = Endpoint(config, SECTION)
        try:
            check_server(endpoint, config, context_length)
        except BaseException:
            endpoint.close()
            raise
        eos = {*spec.eos_token_ids, *(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))}
        admission = Admission(
            vocab_size=spec.vocab_size,
            context_length=context_length,
            eos_token_ids=frozenset(eos),
            decode=memoised(decoder_of(tokenizer)),
        )
        return cls(endpoint, config, admission, tokenizer)

    @classmethod
    def of_text(cls, config: OpenaiConfig) -> OpenaiBackend:
        """For `answers: text`. Prompts are those of `CharacterTokenizer`."""
        tokenizer = CharacterTokenizer()
        admission = Admission(
            vocab_size=VOCABULARY,
            context_length=NO_LIMIT,
            eos_token_ids=frozenset(),
            decode=decoder_of(tokenizer),
        )
        return cls(Endpoint(config, SECTION), config, admission, tokenizer)

    # ------------------------------------------------------------ weights and memory

    def put_weights(self, weights: WeightSet) -> None:
        raise _no_weights()

    def weights_digest(self, *, covers_all: bool = False) -> str:
        raise _no_weights()

    def forget_prefixes(self) -> None:
        """Nothing: a server decides on its own what it caches."""

    def sleep(self) -> None:
        """Nothing to free here."""
        self._refuse_while_open("sleep")

    def wake(self) -> None:
        """Nothing to allocate here."""

    def close(self) -> None:
        """Ends the connections."""
        self._endpoint.close()

    # ------------------------------------------------------------ generation

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_progress: OnProgress | None = None,
        on_completions: OnCompletions | None = None,
    ) -> list[list[Completion]]:
        """The completions of each request, `num_siblings` each, in the requests' order. One that the server did not
        answer has `finish_reason` FAILED."""
        with self.session(on_progress) as session:
            groups = [checked(one, index, self._admission, self._config) for index, one in enumerate(requests)]
            return whole_answers(session, groups, on_completions)

    @contextmanager
    def session(self, on_progress: OnProgress | None = None) -> Iterator[OpenaiSession]:
        """An open session. One at a time."""
        self._refuse_while_open("another session")
        session = OpenaiSession(
            self._endpoint,
            self._config,
            admission=self._admission,
            decode=self._decode,
            on_close=self._closed,
            on_progress=on_progress,
        )
        with self._opened(session):
            yield session

    def rollout_metrics(self) -> dict[str, float]:
        """Metrics of the last `generate` or session; empty before the first."""
        return {} if self.metrics is None else self.metrics.named(scales_are_calibrated=False)


def check_server(endpoint: Endpoint, config: OpenaiConfig, context_length: int) -> None:
    """Raises UserError if the server is not there, does not have the model, or has a shorter context."""
    try:
        listed = parsed(Models, endpoint.get("models")).data
    except (EndpointError, ValueError) as error:
        failure = failure_of(error, config) if isinstance(error, EndpointError) else error
        if isinstance(failure, UserError):
            raise failure from None
        remedy = f"give the address of a server with OpenAI's API as {SECTION}.base_url"
        raise UserError(f"{SECTION}.base_url: the server gives no list of its models ({failure}); {remedy}") from None
    models = {model.id: model.max_model_len for model in listed}
    if config.model not in models:
        known = ", ".join(models) or "none"
        known = known if len(known) <= _SHOWN else f"{known[:_SHOWN]}..."
        raise UserError(f"{SECTION}.model: the server has no '{config.model}'; its models are: {known}")
    has = models[config.model]
    if isinstance(has, int) and 0 < has < context_length:
        raise UserError(
            f"{SECTION}.model: the server's context has {has} tokens and model.context_length is {context_length};"
            f" set model.context_length to {has}, with rollout.max_prompt_tokens and rollout.max_new_tokens to fit"
        )


def _no_weights() -> RuntimeError:
    return RuntimeError("engine.backend: openai answers with the server's own weights; none can be put into it")
