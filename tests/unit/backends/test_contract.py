"""What every rollout backend does (rollout/backend.py): our engine, vLLM's adapter over a double, and a server.

The server is our own, around an engine with the same weights. It claims less: an answer comes as one event, and weights
cannot be put into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from octetrl.backends.openai.backend import OpenaiBackend
from octetrl.config.schema import OpenaiConfig
from octetrl.engine.engine import Engine
from octetrl.records import Completion, FinishReason, LogitOptions
from octetrl.rollout.backend import RolloutBackend
from octetrl.system.errors import UserError
from octetrl.workers.build_engine import build_engine
from tests.unit.backends.setting import CONTEXT_LENGTH, SPEC, Letters, Setting, drain, request
from tests.unit.config.test_validate import recipe_with


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting("fp8_full")


@pytest.fixture(scope="module")
def server(setting: Setting) -> Iterator[OpenaiBackend]:
    """A client of a server with the weights of `setting`. Only its tests need the packages of `octetrl serve`."""
    from tests.unit.backends.served_engine import NAME, served_engine

    with served_engine(Setting("fp8_full").own) as url:
        config = OpenaiConfig(base_url=url, model=NAME, retries=0, timeout_seconds=60.0, concurrency=3)
        backend = OpenaiBackend.of_tokens(config, spec=SPEC, tokenizer=Letters(), context_length=CONTEXT_LENGTH)
        yield backend
        backend.close()


@pytest.fixture(params=["own", "vllm", "openai"])
def backend(request: pytest.FixtureRequest, setting: Setting) -> RolloutBackend:
    if request.param == "openai":
        chosen: RolloutBackend = request.getfixturevalue("server")
        return chosen
    return setting.own if request.param == "own" else setting.adapter


def streams(backend: RolloutBackend) -> bool:
    return not isinstance(backend, OpenaiBackend)


def test_answers_depend_on_seed_and_sibling_alone(backend: RolloutBackend) -> None:
    asked = [request("a", 5), request("b", 6)]
    together = backend.generate(asked)
    assert [len(group) for group in together] == [2, 2]
    assert backend.generate(asked[::-1]) == together[::-1]
    first, second = together[0]
    assert first.token_ids != second.token_ids and together[0] != together[1]
    lone = replace(asked[0], id="c", num_siblings=1, first_sibling=1)
    assert backend.generate([lone]) == [[second]]
    for one in (first, second):
        assert len(one.token_ids) == len(one.logprobs) == 6 and one.finish_reason is FinishReason.LENGTH
        assert one.policy_version == 0 and all(logprob <= 0 for logprob in one.logprobs)


def test_an_answer_ends_at_a_stop_token_a_stop_string_or_the_context(backend: RolloutBackend) -> None:
    ((whole,),) = backend.generate([replace(request("a", max_new_tokens=20), num_siblings=1)])

    def ended(**sampling: Any) -> Completion:
        asked = replace(request("a", **{"max_new_tokens": 20, **sampling}), num_siblings=1)
        ((found,),) = backend.generate([asked])
        return found

    place = next(at for at in range(3, 20) if whole.token_ids[at] not in whole.token_ids[:at])
    found = ended(stop_token_ids=(whole.token_ids[place],))
    assert found.token_ids == whole.token_ids[: place + 1] and found.finish_reason is FinishReason.STOP
    assert found.text == whole.text[:place] and found.logprobs == whole.logprobs[: place + 1]
    end = next(at for at in range(4, 20) if whole.text.find(whole.text[at - 2 : at]) == at - 2)
    found = ended(stop=(whole.text[end - 2 : end],))
    assert found.token_ids == whole.token_ids[:end] and found.finish_reason is FinishReason.STOP
    assert found.text == whole.text[: end - 2]
    to_the_context = ended(max_new_tokens=500)
    assert len(to_the_context.token_ids) == 61 and to_the_context.token_ids[:20] == whole.token_ids


def test_siblings_may_have_limits_of_their_own(backend: RolloutBackend) -> None:
    whole = backend.generate([request("a")])[0]
    cut = backend.generate([replace(request("a"), answer_limits=(2, 6))])[0]
    assert [one.token_ids for one in cut] == [whole[0].token_ids[:2], whole[1].token_ids]


def test_a_session_streams_and_cancels(backend: RolloutBackend) -> None:
    expected = backend.generate([request("a")])[0]
    with backend.session() as session:
        session.submit(request("a"), streams=True)
        session.submit(request("b", 6))
        with pytest.raises(UserError, match="request with this id is not finished"):
            session.submit(request("b", 7))
        events = [*session.events(), *session.events()] if streams(backend) else []
        session.cancel("b")
        session.cancel("unknown")
        events += drain(session)
        assert session.pages_in_use == 0 and session.progress().done == 2
    assert {event.request_id for event in events} == {"a"}
    for sibling, completion in enumerate(expected):
        parts = [event for event in events if event.sibling == sibling]
        assert (len(parts) > 1 or not streams(backend)) and parts[-1].completion == completion
        assert sum((part.token_ids for part in parts), ()) == completion.token_ids
        assert sum((part.logprobs for part in parts), ()) == completion.logprobs


def test_what_cannot_be_served_is_refused_before_any_work_and_never_ignored(backend: RolloutBackend) -> None:
    for asked, expected in (
        (replace(request("a"), prompt_token_ids=()), "the prompt has no tokens"),
        (replace(request("a"), prompt_token_ids=(90,)), "the model knows 0 to 89"),
        (request("a", temperature=-1.0), "temperature is -1.0"),
    ):
        with pytest.raises(UserError, match=expected):
            backend.generate([request("b"), asked])
    assert len(backend.generate([request("a")])[0]) == 2
    # An answer that another engine began, and a bias that leaves one token.
    asked = replace(request("a"), num_siblings=1)
    ((whole,),) = backend.generate([asked])
    biased = replace(asked.sampling, logits=LogitOptions(logit_bias=((7, 100.0),)))
    for changed, expected in (
        (replace(asked, said=(whole.token_ids[:2], whole.logprobs[:2])), whole.token_ids),
        (replace(asked, sampling=biased), (7,) * 6),
    ):
        try:
            ((found,),) = backend.generate([changed])
        except UserError as error:
            assert "request 'a'" in str(error) and not isinstance(backend, Engine)
        else:
            assert found.token_ids == expected


def test_weights_are_refused_while_a_session_is_open(backend: RolloutBackend) -> None:
    with backend.session(), pytest.raises(RuntimeError, match="open session"):
        backend.sleep()
    metrics = backend.rollout_metrics()
    assert {"rollout/tokens_per_second", "rollout/batch_occupancy"} <= set(metrics)


def test_a_server_gives_the_tokens_and_log_probs_of_the_engine_behind_it(
    setting: Setting, server: OpenaiBackend
) -> None:
    """Greedy answers, and drawn ones of the first sibling, whose seed is the request's own."""
    for asked in (request("g", temperature=0.0), replace(request("s", max_new_tokens=20), num_siblings=1)):
        answers, expected = server.generate([asked])[0], setting.own.generate([asked])[0]
        if asked.sampling.temperature == 0:
            assert len(answers) == 2
        assert [strip(one) for one in answers] == [strip(one) for one in expected]


def strip(completion: Completion) -> Completion:
    """Without the stamp of its weights, of which a server says nothing."""
    return replace(completion, policy_version=0, precision_digest="")


def test_no_weights_are_put_into_a_server(setting: Setting, server: OpenaiBackend) -> None:
    for act in (lambda: server.put_weights(setting.weights), server.weights_digest):
        with pytest.raises(RuntimeError, match="answers with the server's own weights"):
            act()
    with server.session() as session, pytest.raises(UserError, match="openai takes no weights"):
        session.adopt(lambda: 1, keeps_cache=False)


def test_a_backend_that_is_built_nowhere_is_not_taken_for_our_own(setting: Setting) -> None:
    recipe = recipe_with()
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": "sglang"})})
    how: dict[str, Any] = {"policy": setting.sides.policy, "tokenizer": Letters(), "trains": False}
    with pytest.raises(AssertionError, match=r"engine.backend: sglang is not built here"):
        build_engine(recipe, setting.sides.engine_model, device=torch.device("cpu"), **how)
