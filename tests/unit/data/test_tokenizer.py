"""Tokenizer folders: the one we make comes back whole, and what can't be used is one line."""

from __future__ import annotations

import errno
import json
from itertools import product
from pathlib import Path

import pytest

from octetrl.data import tokenizer as trial
from octetrl.data.tokenizer import check_tokenizer_files, load_tokenizer, save_tokenizer_files
from octetrl.models.family import FAMILIES
from octetrl.run.tiny_model import ASSISTANT, END, USER, save_tokenizer
from octetrl.system.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(["12 + 34 = 46", "12 - 34 = -22"], tmp_path, vocab_size=300)
    return tmp_path


def test_it_comes_back_from_its_folder(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "45 + 12 = 57, naïve – 字"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eos_token_id]) == END


def change_settings(folder: Path, **changes: object) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def test_it_is_the_one_that_auto_tokenizer_loads(folder: Path) -> None:
    """Whatever the class that the folder names, and the type of the model beside it: also types of which transformers
    says that the class of their files is wrong."""
    from transformers import AutoTokenizer  # not for every process of the tests: it takes seconds
    from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS

    assert type(load_tokenizer(folder)) is type(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    one, other = trial.GENERAL_CLASSES
    cases = [*product([one], sorted({*FAMILIES, *MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS}))]
    cases += product([other, "Qwen2Tokenizer"], ["llama", "qwen2", "qwen3"])
    for named, model_type in cases:
        change_settings(folder, tokenizer_class=named)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        ours = trial._loader(folder).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        assert (type(ours), repr(ours)) == (type(theirs), repr(theirs)), (named, model_type)
        assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


def test_a_digit_is_a_token(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("12 + 34"))
    assert [token for token in tokens if any(letter.isdigit() for letter in token)] == ["1", "2", "3", "4"]


def test_its_chat_template_ends_where_the_answer_begins(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "1 + 2"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{USER}1 + 2{ASSISTANT}"
    answered = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "3"}], tokenize=False)
    assert answered == f"{text}3{END}"


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        load_tokenizer(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_no_folder(tmp_path: Path) -> None:
    assert "no folder" in refusal(tmp_path / "gone")


def test_a_folder_without_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "has none of tokenizer.json" in refusal(tmp_path)


def test_a_torn_file(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text()[:20])
    assert "tokenizer_config.json: not JSON" in refusal(folder)


def test_no_eos(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    del settings["eos_token"]
    config.write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    assert 'set "eos_token"' in refusal(folder)


def test_more_tokens_than_the_model_has(folder: Path) -> None:
    tokens = len(load_tokenizer(folder))
    load_tokenizer(folder, tokens)
    with pytest.raises(UserError, match=rf"it has token {tokens - 1} .*, but the model's vocab_size is {tokens - 1}"):
        load_tokenizer(folder, tokens - 1)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}", "its chat template fails (TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "its chat template fails (TypeError"),
        ("{{ 1 // 0 }}", "its chat template fails (ZeroDivisionError"),
        ("{{ raise_exception('no') }}", "its chat template fails (TemplateError: no"),
        ("{{ 'x' * (2 ** 60) }}", "its chat template takes more than 4 GiB"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "its chat template fails (RecursionError"),
        ("<|user|>", "leaves out the user's message"),
        (7, "'chat_template' is 7, a string or a list of named templates is needed"),
    ],
)
def test_a_broken_chat_template(folder: Path, template: object, says: str) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    assert says in refusal(folder)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "too_much"),
    [
        ("{% if tools %}" + LOOP + "{% endif %}{{ messages[0]['content'] }}", "1 seconds"),
        ("{{ messages[0]['content'] }}{{ 'a' * 10**10 }}", "4 GiB"),
        ("{{ messages[0]['content'] }}{{ 'a' * 10**7 }}", "10,000,018 characters"),
    ],
)
def test_a_chat_template_that_does_not_end(
    folder: Path, template: str, too_much: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SECONDS", 1)
    (folder / "chat_template.jinja").write_text(template)
    assert too_much in refusal(folder)


@pytest.mark.parametrize(
    ("key", "lists", "factor", "count", "is_refused"),
    [
        ("normalizer", "normalizers", "aa", 40, True),
        ("normalizer", "normalizers", "a" * 5000, 1, True),
        ("decoder", "decoders", "aaaa", 20, True),
        ("normalizer", "normalizers", "aa", 3, False),
        ("normalizer", "normalizers", "b", 40, False),
    ],
)
def test_steps_that_multiply_a_text(
    folder: Path, key: str, lists: str, factor: str, count: int, is_refused: bool
) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": factor}
    file.write_text(json.dumps({**content, key: {"type": "Sequence", lists: [step] * count}}))
    if is_refused:
        assert "times as long" in refusal(folder)
    else:
        check_tokenizer_files(folder)


def test_a_prefix_that_aborts_the_tokenizers_library(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["continuing_subword_prefix"] = "«"
    file.write_text(json.dumps(content))
    assert "continuing_subword_prefix is not supported" in refusal(folder)
    file.write_text(json.dumps(content).replace('"BPE"', '"WordPiece"'))
    assert check_tokenizer_files(folder) == folder, "every WordPiece has one"
    content["model"]["continuing_subword_prefix"] = ""
    file.write_text(json.dumps(content))
    assert check_tokenizer_files(folder) == folder


def test_a_config_that_transformers_can_not_read_is_named_with_its_key(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "head_dim": None}))
    change_settings(folder, tokenizer_class="Qwen2Tokenizer")
    said = refusal(folder)
    assert "config.json: transformers can't read it" in said and "'head_dim'" in said


def test_a_full_disk_is_the_operating_systems_error(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    full = tmp_path_factory.mktemp("full")
    (full / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        save_tokenizer_files(load_tokenizer(folder), full)
    assert raised.value.errno == errno.ENOSPC
