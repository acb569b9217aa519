"""Addresses that match a pattern and that the HTTP client refuses: one line, for a server and for a judge."""

from __future__ import annotations

import pytest

from octetrl.config.environment import JudgeConfig
from octetrl.config.rules_running import openai_problems
from octetrl.config.schema import OpenaiConfig
from octetrl.endpoint import Endpoint
from octetrl.system.errors import UserError


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1/v1",
        "http://127.0.0.1:abc/v1",
        "http://127.0.0.1:99999/v1",
        "http://a..b/v1",
        "http://\u00e9\u00e9..x/v1",
        "http://xn--/v1",
        f"http://{'a' * 300}/v1",
    ],
)
def test_an_address_that_the_client_refuses_is_no_address(url: str) -> None:
    (problem,) = openai_problems(OpenaiConfig(base_url=url, model="m"))
    assert problem.text.startswith("engine.openai.base_url: this is not an address")
    with pytest.raises(ValueError, match="it is not an address"):
        JudgeConfig(base_url=url, model="m")
    with pytest.raises(UserError, match=r"engine.openai.base_url: this is not an address"):
        Endpoint(OpenaiConfig(base_url=url, model="m"), "engine.openai")
