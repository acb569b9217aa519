"""Load and check the tokenizer of a model folder. Only this module uses transformers' tokenizer classes.

transformers is imported when a tokenizer is loaded, because its import takes seconds. Missing files are refused before.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

from octetrl.config.schema import Recipe
from octetrl.environments.tools.messages import TEMPLATE_ERRORS, Family, family_of, template_fails
from octetrl.shapes.spec import MOST_LAYERS
from octetrl.system.errors import UserError, dangling
from octetrl.system.json_file import read_json

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TEMPLATE = "chat_template.jinja"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"(?!")')
_SAID = "WHAT-THE-USER-SAYS"
Tokenizer = Any  # transformers' PreTrainedTokenizerBase; lower packages declare only the methods that they call


def load_tokenizer(
    folder: str | Path, vocab_size: int | None = None, *, remedy: str = "give model.tokenizer a Hugging Face folder"
) -> Tokenizer:
    """Load the tokenizer in `folder`. remedy: what to do if there is none.

    Raises UserError if there is none, or if it has no EOS token, a broken chat template, or tokens outside the model's
    `vocab_size` (None: not checked)."""
    path = check_tokenizer_files(folder, remedy=remedy)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        _try_out(tokenizer)
    except Exception as error:  # the tokenizers library raises a plain Exception; only library code runs in this block
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


def check_tokenizer_files(folder: str | Path, *, remedy: str = "give model.tokenizer a Hugging Face folder") -> Path:
    """Check a tokenizer's files as far as that needs no transformers. Returns the folder. Raises UserError."""
    path = Path(folder)
    if not path.is_dir():
        seen = "" if path.is_absolute() else f" in '{Path.cwd()}'"
        raise UserError(f"tokenizer: no folder '{path}'{seen}; {remedy} with a tokenizer{dangling(path)}")
    if not any((path / name).is_file() for name in VOCABULARIES):
        raise UserError(
            f"tokenizer: '{path}' has none of {', '.join(VOCABULARIES)}; {remedy} with a tokenizer"
            f"{dangling(path, *VOCABULARIES)}"
        )
    if links := dangling(path, TEMPLATE):
        raise UserError(f"tokenizer: '{path}' has no chat template{links}; fetch it again, or remove the link")
    _check_settings(path)
    if (path / "tokenizer.json").is_file():
        _refuse_prefixed_pieces(path / "tokenizer.json")
    return path


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer with tokens for which a model of `vocab_size` has no embedding. Raises UserError."""
    word, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= vocab_size:
        raise UserError(
            f"tokenizer: it has token {largest} ({word[:40]!r}), but the model's vocab_size is {vocab_size}; give the"
            f" tokenizer that the model was trained with, or remove the tokens that were added to it"
        )


def check_template(tokenizer: Tokenizer) -> None:
    """Refuse a chat template that fails or leaves out the user's message. Raises UserError."""
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
    """Call `save_pretrained`. Raises OSError for a full disk, where the tokenizers library raises a plain Exception."""
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
    """Raise UserError if transformers cannot read the folder's config.json, which it reads before the tokenizer."""
    if not (path / "config.json").is_file():
        return
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above: huggingface_hub's own errors, and any error from a value of the wrong type
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(
            f"{path / 'config.json'}: transformers can't read it ({reason}); correct it, or fetch the model again"
        ) from error


def _try_out(tokenizer: Tokenizer) -> None:
    """Call each method that a run uses once, because settings of a wrong type fail only then."""
    encoded = tokenizer("a", add_special_tokens=False, return_offsets_mapping=True)
    if not encoded["input_ids"]:
        raise ValueError("it returns no tokens for a text")
    token_ids = [*encoded["input_ids"], *tokenizer.encode("a", add_special_tokens=True)]
    tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    tokenizer.convert_ids_to_tokens(list(tokenizer.get_vocab().values())[:1])
    if not all(isinstance(special, str) for special in tokenizer.all_special_tokens):
        raise ValueError("a special token is not a string")


def _refuse_prefixed_pieces(file: Path) -> None:
    """Raise UserError for a BPE with a continuing_subword_prefix.

    The tokenizers library cuts that number of bytes off each piece. If this splits a character, the process aborts. No
    known model's BPE has such a prefix."""
    content = file.read_bytes()
    if _PREFIX.search(content) and b'"WordPiece"' not in content:
        raise UserError(
            f"{file}: a BPE with a continuing_subword_prefix is not supported; set it to null, or use another one"
        )


def _check_settings(path: Path) -> None:
    """Raise UserError for JSON files with wrong types. transformers would fail without naming the file."""
    for name in SETTINGS:
        if os.path.lexists(path / name):
            settings = read_json(path / name, f"fetch the {'model' if name == 'config.json' else 'tokenizer'} again")
            if settings.get("num_hidden_layers") is not None:  # config.json: transformers creates a list of this length
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
    """Return the form in which a model with this tokenizer writes tool calls. None: no form, or an unknown one."""
    return None if tokenizer.chat_template is None else family_of(tokenizer.get_chat_template(tools=[]))
