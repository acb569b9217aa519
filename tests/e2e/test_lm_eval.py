"""lm-eval against a live server: log-likelihoods of choices, generated answers, chats. It runs where lm-eval is
installed (setup/outside_packages.sh); its requests alone are in test_server_fields.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e import tiny_run
from tests.e2e.live_server import Live, live_server
from tests.required import missing

try:
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager
except ImportError as error:
    missing("lm-eval", f"{error.name} is not installed; `make test-outside` runs them", whole_module=True)

ROWS = [
    {"question": f"What is {n} + {n + 1}?", "choices": [f" {2 * n + 1}", " 100", " 7, 8, 9"], "gold": 0}
    for n in range(3)
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(tiny_run.make_model(tmp_path_factory.mktemp("judged") / "model")) as server:
        yield server


def judged(live: Live, kind: str, path: str, task: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """What lm-eval logs of each row."""
    task = {
        "task": "sums",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(ROWS)},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
        **task,
    }
    given = {"base_url": f"{live.url}{path}", "model": "tiny", "tokenizer": str(live.folder), "max_length": 512}
    without_theirs = TaskManager(include_defaults=False)  # reading lm-eval's own tasks takes long
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=given,
        tasks=[task],
        task_manager=without_theirs,
        log_samples=True,
        bootstrap_iters=0,
        **options,
    )
    return sorted(found["samples"]["sums"], key=lambda sample: sample["doc_id"])


def test_log_likelihoods_are_those_of_transformers(live: Live) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"}
    samples = judged(live, "local-completions", "/v1/completions", task)
    model = AutoModelForCausalLM.from_pretrained(live.folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(live.folder)
    for row, sample in zip(ROWS, samples, strict=True):
        for choice, (score, is_greedy) in zip(row["choices"], sample["filtered_resps"], strict=True):
            begin = tokenizer.encode(row["question"])
            ids = torch.tensor([tokenizer.encode(row["question"] + choice)])
            with torch.no_grad():
                logits_V = model(ids).logits[0, len(begin) - 1 : -1].float()
            wanted = logits_V.log_softmax(-1).gather(1, ids[0, len(begin) :, None]).sum()
            assert float(score) == pytest.approx(float(wanted), abs=0.02), (row, choice)
            assert str(is_greedy) == str(bool((logits_V.argmax(-1) == ids[0, len(begin) :]).all()))


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_generated_answers_are_the_clients(live: Live, kind: str) -> None:
    is_chat = "chat" in kind
    task = {"output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["9"], "max_gen_toks": 12}}  # fmt: skip
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    samples = judged(live, kind, path, task, apply_chat_template=is_chat)
    client = live.client()
    common: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12, "stop": ["9"], "seed": 1234}
    for row, sample in zip(ROWS, samples, strict=True):
        if is_chat:
            messages: Any = [{"role": "user", "content": row["question"]}]
            wanted = client.chat.completions.create(messages=messages, **common).choices[0].message.content
        else:
            wanted = client.completions.create(prompt=row["question"], **common).choices[0].text
        assert sample["resps"] == [[wanted]]
