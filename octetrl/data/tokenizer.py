"""Load and check the tokenizer of a model folder. Only this module uses transformers' tokenizer classes.

transformers is imported when a tokenizer is loaded, because its import takes seconds. Missing files are refused before.
AutoTokenizer imports text generation and torch's compiler too, which takes another three CPU seconds: a folder that
names the general class is loaded without it.

**Trial.** Try a call of foreign code in a copy of this process, with limits of time and memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import select
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from octetrl.config.schema import Recipe
from octetrl.environments.tools.messages import TEMPLATE_ERRORS, template_fails
from octetrl.shapes.spec import MOST_LAYERS
from octetrl.system.errors import UserError, dangling, nearest_file
from octetrl.system.json_file import read_json, read_text

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TEMPLATE = "chat_template.jinja"
GENERAL_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # two names of one class
WITH_A_CLASS_OF_THEIR_OWN = ("qwen2",)  # model types for which AutoTokenizer overrides the general class
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"(?!")')
_STEPS = re.compile(rb'"(?:normalizer|decoder)"\s*:\s*(?=\{)')
_SAID = "WHAT-THE-USER-SAYS"
_TOOL = {"type": "function", "function": {"name": "f", "description": "-", "parameters": {"type": "object"}}}
_CORRECT = "correct chat_template in its tokenizer_config.json or chat_template.jinja"
MOST_AROUND = 1_000_000  # characters that a template writes around a short message
MOST_GROWTH = 1_000  # characters of a normalized text, for each of its own
Tokenizer = Any  # transformers' PreTrainedTokenizerBase; lower packages declare only the methods that they call


def load_tokenizer(
    folder: str | Path,
    vocab_size: int | None = None,
    *,
    remedy: str = "give model.tokenizer a Hugging Face folder",
    template: str | Path | None = None,
) -> Tokenizer:
    """Load the tokenizer in `folder`. remedy: what to do if there is none. template: a file with a chat template in
    place of its own.

    Raises UserError if there is none, or if it has no EOS token, a broken chat template, or tokens outside the model's
    `vocab_size` (None: not checked)."""
    path = check_tokenizer_files(folder, remedy=remedy)
    text = None if template is None else read_template(template)
    loader = _loader(path)
    try:
        tokenizer = loader.from_pretrained(path, local_files_only=True, trust_remote_code=False)
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
        if text is not None:
            tokenizer.chat_template = text
        check_template(tokenizer)
    except UserError as error:
        if template is None:
            raise UserError(f"{error} (of '{path}')") from error.__cause__
        reason = str(error).removeprefix("tokenizer: its ").removesuffix(f"; {_CORRECT}")
        raise UserError(f"model.chat_template: '{template}': the {reason}; correct the file") from error.__cause__
    if vocab_size is not None:
        try:
            check_vocabulary(tokenizer, vocab_size)
        except UserError as error:
            raise UserError(f"{error} (of '{path}')") from error
    return tokenizer


def recipe_tokenizer(recipe: Recipe, vocab_size: int | None = None) -> Tokenizer:
    """Load the tokenizer of a recipe's model, with the recipe's chat template."""
    return load_tokenizer(tokenizer_folder(recipe), vocab_size, template=recipe.model.chat_template)


def read_template(file: str | Path) -> str:
    """The text of a file with a chat template. Raises UserError if there is none."""
    path = Path(file)
    if not path.is_file():
        raise UserError(f"model.chat_template: no file '{path}'; give a Jinja template{nearest_file(path)}")
    text = read_text(path, "give a Jinja template")
    if not text.strip():
        raise UserError(f"model.chat_template: '{path}' is empty; give a Jinja template, or leave it out")
    return text


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
    content = (path / "tokenizer.json").read_bytes() if (path / "tokenizer.json").is_file() else b""
    _refuse_prefixed_pieces(path / "tokenizer.json", content)
    _refuse_growth(path / "tokenizer.json", content)
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
    """Refuse a chat template that fails, does not end, or leaves out the user's message. Raises UserError."""
    if tokenizer.chat_template is None:
        return
    if too_much := find_excess(lambda: _render_all(tokenizer)):
        raise UserError(
            f"tokenizer: its chat template takes more than {too_much} for a conversation of a few words; {_CORRECT}"
        )
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _SAID}], tokenize=False, add_generation_prompt=True
        )
    except TEMPLATE_ERRORS as error:
        raise template_fails(error) from error
    if _SAID not in text:
        raise UserError(
            f"tokenizer: its chat template leaves out the user's message, so all prompts would be equal; {_CORRECT}"
        )
    if len(text) > MOST_AROUND:
        raise UserError(f"tokenizer: its chat template makes {len(text):,} characters of a few words; {_CORRECT}")


def _render_all(tokenizer: Tokenizer) -> None:
    """Render a short conversation of each kind."""
    user = {"role": "user", "content": _SAID}
    longer = [{"role": "system", "content": "-"}, user, {"role": "assistant", "content": "-"}, user]
    for conversation, tools in (([user], None), (longer, None), (longer, [_TOOL])):
        try:
            tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False, add_generation_prompt=True)
        except MemoryError:
            raise
        except TEMPLATE_ERRORS:  # a template may refuse a role; what every run needs is tried once more
            continue


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


def _loader(path: Path) -> Any:
    """The class whose from_pretrained loads this folder: the one that it names, if that is the general one, else
    AutoTokenizer, which gives the same for such a folder."""
    names = ("tokenizer_config.json", "config.json")
    settings, config = ({} if not (path / name).is_file() else read_json(path / name) for name in names)
    is_general = settings.get("tokenizer_class") in GENERAL_CLASSES and "auto_map" not in settings
    if is_general and (path / VOCABULARIES[0]).is_file() and config.get("model_type") not in WITH_A_CLASS_OF_THEIR_OWN:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


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


def _refuse_growth(file: Path, content: bytes) -> None:
    """Raise UserError for a normalizer or decoder whose steps multiply the length of a text: nothing could stop it."""
    for found in _STEPS.finditer(content):
        try:
            steps, _ = json.JSONDecoder().raw_decode(content[found.end() :].decode("utf-8"))
            growth = _growth(steps)
        except (ValueError, RecursionError):
            continue  # the tokenizers library says what is wrong
        if growth > MOST_GROWTH:
            raise UserError(
                f"{file}: its normalizer or decoder can make a text {growth:,.0f} times as long, and at most"
                f" {MOST_GROWTH:,} is allowed; remove the Replace steps that lengthen it, or fetch the tokenizer again"
            )


def _growth(step: Any) -> float:
    """How many times as long a step of a tokenizer, or all steps of a list, can make a text."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    if step.get("type") != "Replace":
        return 2.0 if step.get("type") == "ByteLevel" else math.prod(map(_growth, step.values()))
    pattern = step.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    return max(1.0, len(str(step.get("content"))) / max(1, len(str(replaced or ""))))


def _refuse_prefixed_pieces(file: Path, content: bytes) -> None:
    """Raise UserError for a BPE with a continuing_subword_prefix.

    The tokenizers library cuts that number of bytes off each piece. If this splits a character, the process aborts. No
    known model's BPE has such a prefix."""
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


SECONDS = 10  # of a core
GIB = 4  # beyond what the process has
_WAITED = 120.0  # seconds, on a machine that is short of cores
_FULL = 3  # exit code
_PARALLEL = "TOKENIZERS_PARALLELISM"


def find_excess(call: Callable[[], object]) -> str | None:
    """What `call` takes too much of. None: it ends, with or without an error, or could not be tried.

    The call may use no threads and no GPU: the copy has neither."""
    before = os.environ.get(_PARALLEL)
    os.environ[_PARALLEL] = "false"  # the tokenizers library then says nothing of the copy
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads, which the copy lacks
            copy = os.fork()
        if copy == 0:
            _try(call)
    except RuntimeError:  # another thread holds a lock file, and its library lets nobody copy the process
        os.close(reader)
        return None
    finally:
        os.close(writer)
        os.environ.pop(_PARALLEL) if before is None else os.environ.update({_PARALLEL: before})
    try:
        if not select.select([reader], [], [], _WAITED)[0]:
            os.kill(copy, signal.SIGKILL)
    except BaseException:
        os.kill(copy, signal.SIGKILL)
        raise
    finally:
        os.close(reader)
        _, status, used = os.wait4(copy, 0)
    if os.WIFSIGNALED(status):
        return f"{SECONDS} seconds" if used.ru_utime + used.ru_stime > SECONDS / 2 else None
    return f"{GIB} GiB" if os.WEXITSTATUS(status) == _FULL else None


def _try(call: Callable[[], object]) -> NoReturn:
    """In the copy, whose descriptors end with it."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + GIB * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        call()
    except MemoryError:
        os._exit(_FULL)
    finally:
        os._exit(0)
