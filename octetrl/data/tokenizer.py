"""The tokenizer of a model folder: the only place that knows transformers' tokenizer classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from octetrl.config.errors import UserError
from octetrl.environments.tools import Family, family_of

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
Tokenizer = Any  # transformers' PreTrainedTokenizerBase; rooms below see only the methods they call


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer saved in `folder`. Raises UserError when there is none or when it has no EOS token."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"tokenizer: no folder '{path}'; give model.tokenizer a Hugging Face tokenizer folder")
    if not any((path / name).is_file() for name in VOCABULARIES):
        raise UserError(
            f"tokenizer: '{path}' holds none of {', '.join(VOCABULARIES)};"
            f" give model.tokenizer a Hugging Face tokenizer folder"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(
            f"tokenizer: '{path}' holds none that loads ({reason}); it needs tokenizer.json and tokenizer_config.json"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer: '{path}' has no EOS token, so no answer would ever end;"
            f' set "eos_token" in its tokenizer_config.json'
        )
    return tokenizer


def tool_family(tokenizer: Tokenizer) -> Family | None:
    """How a model with this tokenizer writes tool calls; None: not at all, or not in a way known here."""
    return None if tokenizer.chat_template is None else family_of(tokenizer.get_chat_template(tools=[]))
