"""Whatever is in a recipe, a model folder, a tokenizer or a file of rows: it is used, or refused in one line.

Anything but a UserError fails. Deterministic; OCTETRL_FUZZ=20 takes twenty times as many examples, drawn
again each time.
What was found once stands in `@example`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from octetrl.cli.check import check
from octetrl.cli.main import OF_A_PATH, run_command
from octetrl.cli.rollouts import RolloutsView
from octetrl.config.load import dump_recipe, load_recipe
from octetrl.config.schema import DataSource
from octetrl.data.mixture import Mixture, read_source
from octetrl.data.tasks import read_tasks
from octetrl.data.tokenizer import load_tokenizer
from octetrl.environments.scoring import Score, Scorer
from octetrl.environments.tasks import Taskset
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_critic_spec, load_reward_spec, load_spec, spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.models.peft_adapters import read_adapter_config
from octetrl.records import Reply, RolloutStatus, Task
from octetrl.rollout.chat_tokens import ChatTokens, ReplyError
from octetrl.run.build import full_precision
from octetrl.run.tiny_model import save_tokenizer, train_tokenizer
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from octetrl.system.text import TextTooLong
from octetrl.telemetry.rollout_page import rollout_page
from octetrl.telemetry.rollouts import Filter, select
from tests.fuzz.damage import DEEP, as_json, damaged, damaged_bytes, json_files, odd_values

MORE = int(os.environ.get("OCTETRL_FUZZ", "0"))
TINY = preset_config("tiny")
RECIPE: dict[str, Any] = {
    "precision": "fp8_full",
    "model": {"path": "model", "context_length": 256, "lora": {"rank": 8}},
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_prompt_tokens": 32, "max_new_tokens": 8, "stop": ["x"]},
    "engine": {"page_size": 16, "kv_cache_tokens": 4096, "max_batch": 4},
    "trainer": {"tokens_per_micro_batch": 64, "optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "algorithm": {"name": "grpo", "corrections": ["tis"], "token_mask_range": [0.5, 5.0]},
    "environment": {"kind": "jsonl", "dataset": "tasks.jsonl", "eval_size": 1, "columns": {"id": "id"}},
    "evaluation": {"every": 1, "k": [1]},
    "cluster": {"device": "cpu"},
    "logging": {"console": "quiet"},
    "output_dir": "run",
    "steps": 1,
}
MODEL = {"model": {"path": "model", "context_length": 256}}
ADAPTER = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "model",
    "modules_to_save": None,
}
ROLLOUT = {
    **{"task_id": "1", "prompt": "a", "answer": None, "sibling": 0, "status": "scored", "reward": 1.0},
    **{"detail": None, "trace": None, "answered": "b", "text": "b", "token_ids": [1], "logprobs": [-0.5]},
    **{"components": {"right": 1.0}, "metrics": {"turns": 1.0}},
    "turns": [{"prompt_token_ids": [2], "text": "b", "num_tokens": 1, "replies": [{"role": "tool", "text": "c"}]}],
}
ROWS: dict[str, dict[str, Any]] = {
    "tasks": {"id": 1, "prompt": [{"role": "user", "content": "a"}], "answer": "b", "more": {"x": [1]}},
    "conversations": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        ],
        "tools": [{"type": "function"}],
    },
    "preferences": {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]},
}


def examples(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=number * max(MORE, 1),
        deadline=None,
        derandomize=not MORE,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def used_or_refused() -> Iterator[None]:
    try:
        yield
    except TextTooLong:  # a rollout's status, a row's refusal
        return
    except OSError as error:  # which the command line says in one line
        assert error.errno in OF_A_PATH and error.filename, error
    except UserError as error:
        first, *others = str(error).split("\n")
        assert first.strip() and all(line.startswith("  ") for line in others), error
        assert max(map(len, (first, *others))) < 2_000, error


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "model"
    spec = spec_from_config(TINY)
    model = Decoder(spec, full_precision(spec), "train")
    model.random_init(0)
    folder.mkdir()
    save_weights(model, folder)
    save_tokenizer(["1 + 2 = 3"], folder, vocab_size=290)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def here(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(sound, tmp_path / "model")
    rows = ({"id": number, "prompt": prompt, "answer": "c"} for number, prompt in ((1, "a"), (2, "b")))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    for module in ("rehearsal", "environment"):
        monkeypatch.setattr(f"octetrl.run.{module}.RewardWorkers", ScoresHere)
    return tmp_path


class ScoresHere(AbstractContextManager["ScoresHere"]):
    """Takes the place of reward processes, which take longer to start than all the rest of an example."""

    def __init__(self, scorer: Scorer, **limits: object) -> None:
        self._scorer = scorer

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        return [Score(RolloutStatus.SCORED, self._scorer(task, text)) for task, text in completions]

    def close(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()


@given(
    st.one_of(
        damaged(RECIPE).map(lambda tree: yaml.safe_dump(tree).encode()),
        damaged(RECIPE).map(as_json),
        damaged_bytes(yaml.safe_dump(RECIPE).encode()),
    ),
    st.lists(st.tuples(st.sampled_from(["steps", "model.path", "fp8", "a.b", "rollout.stop"]), odd_values), max_size=1),
)
@example(yaml.safe_dump({**RECIPE, "output_dir": "a\0b"}).encode(), [])
@example(yaml.safe_dump({**RECIPE, "environment": {"kind": "reasoning_gym", "train_size": 10**9}}).encode(), [])
@example(b"a: &a [*a]\n", [])
@examples(60)
def test_recipes(here: Path, content: bytes, given: list[tuple[str, Any]]) -> None:
    Path("r.yaml").write_bytes(content)
    overrides = [f"{key}={value}" for key, value in given]
    with used_or_refused():
        recipe = load_recipe("r.yaml", overrides)
        Path("dumped.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        assert load_recipe("dumped.yaml") == recipe
        with redirect_stdout(io.StringIO()):
            check("r.yaml", overrides)


@given(json_files(TINY), json_files({"eos_token_id": [1, 2], "bos_token_id": None}))
@example(as_json(TINY | {"eos_token_id": 10**6}), b"{}")
@example(as_json(TINY | {"num_hidden_layers": 10**9}), b"{}")
@example(as_json(TINY | {"rope_scaling": "llama3", "architectures": 7}), as_json({"x": DEEP}))
@example(as_json(TINY | {"rope_scaling": {"rope_type": "yarn", "factor": 1e307, "beta_slow": 5e-324}}), b"{}")
@example(as_json(TINY | {"use_sliding_window": True, "sliding_window": 7, "layer_types": [[]] * 4}), b"{}")
@examples(90)
def test_configs(here: Path, config: bytes, generation: bytes) -> None:
    Path("model/config.json").write_bytes(config)
    Path("model/generation_config.json").write_bytes(generation)
    Path("r.yaml").write_text(yaml.safe_dump({**RECIPE, "precision": "bf16"}))
    policy = spec_from_config(TINY)
    for read in (load_spec, load_reward_spec, lambda folder: load_critic_spec(folder, policy, 64)):
        with used_or_refused():
            read("model")
    with used_or_refused(), redirect_stdout(io.StringIO()):
        check("r.yaml", [])


@given(json_files(ADAPTER))
@example(as_json(ADAPTER | {"r": 10**9, "lora_alpha": 10**400}))
@example(as_json(ADAPTER | {"peft_type": "\n\x1b[31m"}))
@examples(100)
def test_adapters(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "adapter_config.json").write_bytes(config)
    with used_or_refused():
        read_adapter_config(tmp_path)


def spoken(tokenizer: Any) -> None:
    chat = ChatTokens(tokenizer, "system", context_length=256)
    assert max(chat.prompt_tokens("a\ud800 字"), default=0) < 384
    chat.answer_tokens("\0")
    with suppress(ReplyError):
        chat.reply_tokens([Reply("tool", "b")], (1,))
    chat.message_tokens([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "chat_template.jinja"])
def test_tokenizers(here: Path, name: str) -> None:
    file = Path("model") / name
    content = file.read_bytes() if file.exists() else b"{}"
    files = damaged_bytes(content) if name.endswith("jinja") else json_files(json.loads(content))

    @given(files)
    @example(as_json({"model_max_length": "", "eos_token": "<|end|>", "tokenizer_class": "TokenizersBackend"}))
    @example(as_json({"auto_map": {"AutoTokenizer": ["a.B", None]}, "eos_token": {"x": 1}, "chat_template": [7]}))
    @examples(40)
    def whatever_it_holds(content: bytes) -> None:
        file.write_bytes(content)
        with used_or_refused():
            spoken(load_tokenizer("model", 384))

    whatever_it_holds()


@pytest.fixture(scope="module")
def chat() -> ChatTokens:
    return ChatTokens(train_tokenizer(["1 + 2 = 3"], vocab_size=290), context_length=64)


@pytest.mark.parametrize("kind", ROWS)
def test_rows(tmp_path: Path, chat: ChatTokens, kind: Any) -> None:
    file = tmp_path / "rows.jsonl"

    @given(st.lists(json_files(ROWS[kind]), min_size=1, max_size=3).map(b"\n".join))
    @example(as_json({"prompt": "a", "answer": "b", "x": DEEP}))
    @example(as_json({"[" * 100_000: 1, "\n": 2}))
    @example(b'{"prompt": "a\\ud800", "answer": "b\\udfff", "chosen": "\\ud801", "rejected": "c"}')
    @examples(100)
    def whatever_it_holds(content: bytes) -> None:
        file.write_bytes(content)
        with used_or_refused():
            if kind == "tasks":
                for task in Taskset(read_tasks(file), eval_size=0, seed=0).next_batch(2):
                    chat.prompt_tokens(task.prompt)
            else:
                source = read_source("all", DataSource(path=str(file)), kind)
                Mixture([source], chat, seed=0, context_length=64, too_long="drop").next_batch(2)

    whatever_it_holds()


@given(json_files(ROLLOUT))
@example(as_json(ROLLOUT | {"reward": "1"}))
@examples(100)
def test_rollouts(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step_000001.jsonl").write_bytes(content + b"\n")
    with used_or_refused():
        selection = select(tmp_path, Filter(), None)
        RolloutsView(Console(file=io.StringIO(), width=100), Filter(), letters=100).show(selection)
        rollout_page("run", selection, Filter())


@pytest.fixture
def with_recipe(here: Path) -> None:
    Path("r.yaml").write_text(yaml.safe_dump({key: value for key, value in RECIPE.items() if key != "model"} | MODEL))


def test_what_is_sound_is_used(with_recipe: None) -> None:
    assert run_command(["check", "r.yaml"]) == 0


@pytest.mark.parametrize("name", ["r.yaml", "model", "model/config.json", "model/tokenizer_config.json", "tasks.jsonl"])
@pytest.mark.parametrize("odd", ["pipe", "folder", "circle", "device"])
def test_odd_files_where_others_belong(
    with_recipe: None, name: str, odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(name)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if odd == "pipe":
        os.mkfifo(path)
    elif odd == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if odd == "device" else path.name)
    assert run_command(["check", "r.yaml"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    [
        *(f"{field}={'n' * 300}" for field in ("model.path", "model.tokenizer", "environment.dataset", "output_dir")),
        *("environment.train_size=1000000000", "rollout.group_size=1000000000", "rollout.prompts_per_step=1000000000"),
        "environment.reward_timeout_seconds=1e308",
    ],
)
def test_names_and_sizes_that_nothing_can_have(
    with_recipe: None, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["check", "r.yaml", override]) == 2
    assert "octetrl: " in capsys.readouterr().err
