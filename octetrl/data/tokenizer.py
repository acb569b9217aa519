"""The tokenizer of a model folder: the only place that knows transformers' tokenizer classes."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from octetrl.config.errors import UserError
from octetrl.config.json_file import read_json
from octetrl.config.schema import Recipe
from octetrl.config.spec import MOST_LAYERS
from octetrl.environments.chat_template import TEMPLATE_ERRORS, template_fails
from octetrl.environments.tools import Family, family_of

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"(?!")')
_SAID = "WHAT-THE-USER-SAYS"
Tokenizer = Any  # transformers' PreTrainedTokenizerBase; rooms below see only the methods they call


def load_tokenizer(folder: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer saved in `folder`. Raises UserError when there is none, or one that no model could be used with:
    without an EOS token, with a broken chat template, or with tokens beyond the model's `vocab_size` (None: any)."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"tokenizer: no folder '{path}'; give model.tokenizer a Hugging Face tokenizer folder")
    if not any((path / name).is_file() for name in VOCABULARIES):
        raise UserError(
            f"tokenizer: '{path}' has none of {', '.join(VOCABULARIES)};"
            f" give model.tokenizer a Hugging Face tokenizer folder"
        )
    _check_settings(path)
    _refuse_prefixed_pieces(path / "tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        _try_out(tokenizer)
    except Exception as error:  # the tokenizers library raises it bare; nothing of ours runs in there
        _refuse_config(path)
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(
            f"tokenizer: '{path}' cannot be loaded ({reason}); it needs tokenizer.json and tokenizer_config.json"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer: '{path}' has no EOS token, so no answer would ever end;"
            f' set "eos_token" in its tokenizer_config.json'
        )
    try:
        check_template(tokenizer)
        if vocab_size is not None:
            check_vocabulary(tokenizer, vocab_size)
    except UserError as error:
        raise UserError(f"{error} (of '{path}')") from error.__cause__
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UserError for a tokenizer with tokens that a model of `vocab_size` has no embedding for."""
    word, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= vocab_size:
        raise UserError(
            f"tokenizer: it has token {largest} ({word[:40]!r}), the model's vocab_size is {vocab_size}; give the"
            f" tokenizer that the model was trained with, or remove the tokens that were added to it"
        )


def check_template(tokenizer: Tokenizer) -> None:
    """Raises UserError for a chat template that fails, or leaves out what the user says."""
    if tokenizer.chat_template is None:
        return
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _SAID}], tokenize=False, add_generation_prompt=True
        )
    except TEMPLATE_ERRORS as error:
        raise template_fails(error) from error
    if _SAID not in text:
        raise UserError(
            "tokenizer: its chat template leaves out the user's message, so all prompts would be equal; correct"
            " chat_template in its tokenizer_config.json or chat_template.jinja"
        )


def save_tokenizer_files(tokenizer: Tokenizer, folder: Path) -> None:
    """`save_pretrained`, whose full disk is an OSError: the tokenizers library raises a bare Exception for it."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        full = next((code for code in (errno.ENOSPC, errno.EDQUOT) if f"os error {code}" in str(error)), None)
        if full is None:
            raise
        raise OSError(full, os.strerror(full), str(folder)) from error


def tokenizer_folder(recipe: Recipe) -> Path:
    if recipe.model.tokenizer is not None:
        return Path(recipe.model.tokenizer)
    assert recipe.model.path is not None, "validated: a preset needs model.tokenizer"
    return Path(recipe.model.path)


def _refuse_config(path: Path) -> None:
    """UserError where transformers can't read the config.json beside a tokenizer, which it reads first."""
    if not (path / "config.json").is_file():
        return
    try:
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above: huggingface_hub's own, and whatever a value of the wrong kind leads to
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(
            f"{path / 'config.json'}: transformers can't read it ({reason}); correct it, or fetch the model again"
        ) from error


def _try_out(tokenizer: Tokenizer) -> None:
    """What a run will ask of it, once: settings of the wrong kind show only then."""
    encoded = tokenizer("a", add_special_tokens=False, return_offsets_mapping=True)
    if not encoded["input_ids"]:
        raise ValueError("it gives no tokens for a text")
    tokenizer.decode([*encoded["input_ids"], *tokenizer.encode("a", add_special_tokens=True)])
    tokenizer.convert_ids_to_tokens(list(tokenizer.get_vocab().values())[:1])
    if not all(isinstance(special, str) for special in tokenizer.all_special_tokens):
        raise ValueError("a special token is not a string")


def _refuse_prefixed_pieces(file: Path) -> None:
    """UserError for a BPE with a continuing_subword_prefix: the tokenizers library cuts pieces by its length wherever
    that falls, and half a letter aborts the process. No known model's BPE has one."""
    content = file.read_bytes() if file.is_file() else b""
    if _PREFIX.search(content) and b'"WordPiece"' not in content:
        raise UserError(
            f"{file}: a BPE with a continuing_subword_prefix is not supported; set it to null, or give another"
        )


def _check_settings(path: Path) -> None:
    """UserError for JSON files of the wrong form, which transformers would fail on without naming them."""
    for name in SETTINGS:
        if os.path.lexists(path / name):
            settings = read_json(path / name, "fetch the tokenizer again")
            if settings.get("num_hidden_layers") is not None:  # config.json: transformers makes a list of them
                settings.integer("num_hidden_layers", most=MOST_LAYERS)
            if name != "tokenizer_config.json":
                continue
            for key in ("tokenizer_class", "padding_side", "truncation_side"):
                settings.text(key)
            for key in ("added_tokens_decoder", "auto_map"):
                settings.object(key)
            template = settings.get("chat_template")
            if not isinstance(template, str | list | None):
                raise settings.wrong("chat_template", "a string or a list of named templates is needed")
            for key in (key for key in settings if key.endswith("_token")):
                if not isinstance(settings[key], str | dict | bool | None):
                    raise settings.wrong(key, "a string or an object with content is needed")


def tool_family(tokenizer: Tokenizer) -> Family | None:
    """How a model with this tokenizer writes tool calls; None: not at all, or not in a way known here."""
    return None if tokenizer.chat_template is None else family_of(tokenizer.get_chat_template(tools=[]))
