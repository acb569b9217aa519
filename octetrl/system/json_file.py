"""Read text and JSON files that the user gives, and report each error in one line.

    settings = read_json(folder / "config.json")
    settings.integer("num_hidden_layers", most=1000)       config.json: 'num_hidden_layers' is "12", a whole number ...

A message names the file, the key, its value and what is allowed. A path that is not a regular file is refused before
reading, because a pipe or a device may never end. A file larger than `MOST_BYTES` is also refused before reading. After
reading, JSON is refused if it is incomplete, nested too deeply, or has a number with more digits than Python reads.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from octetrl.system.errors import UserError, nearest_file, type_of

MOST_BYTES = 1 << 26  # size limit of a settings file; published ones have at most a few megabytes
DEEPEST = 100  # levels of nested objects and lists
_SHOWN = 60
_KINDS: dict[type, str] = {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}


def read_text(path: Path, remedy: str, *, most_bytes: int | None = None, encoding: str = "utf-8") -> str:
    """Read a regular text file. Raises UserError if it is missing, not regular, unreadable, too large or not UTF-8.

    remedy: the last part of each message, what the user should do.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
            raise UserError(f"{path}: this is {kind}, not a file; {remedy}")
        if most_bytes is not None and found.st_size > most_bytes:
            raise UserError(f"{path}: {found.st_size:,} bytes, at most {most_bytes:,} are allowed; {remedy}")
        return path.read_text(encoding=encoding)
    except UserError:
        raise  # a ValueError too
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {remedy}{nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); {remedy}") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}); {remedy}") from None
    except ValueError:
        raise UserError(f"{str(path)!r}: not a path, it contains a NUL; {remedy}") from None


def parse_json(text: str, where: str, remedy: str) -> Any:
    """Parse JSON of at most DEEPEST levels. Raises UserError whose message begins with `where`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UserError(f"{where}: not JSON ({error.msg} at {at}); {remedy}") from None
    except (RecursionError, ValueError) as error:  # ValueError: a whole number with more digits than Python reads
        what = "it is nested too deeply" if isinstance(error, RecursionError) else "a number in it has too many digits"
        raise UserError(f"{where}: this JSON cannot be read, {what}; {remedy}") from None
    if text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        raise UserError(f"{where}: it is nested more than {DEEPEST} levels deep; {remedy}")
    return value


def read_json(path: Path, remedy: str = "fetch or export the model again") -> JsonObject:
    """Read a JSON file that holds one object. Raises UserError for any other file."""
    value = parse_json(read_text(path, remedy, most_bytes=MOST_BYTES), str(path), remedy)
    if not isinstance(value, dict):
        raise UserError(f"{path}: it contains {kind_of(value)}, an object is needed; {remedy}")
    return JsonObject(value, f"{path}: ")


def kind_of(value: object) -> str:
    """Name a JSON value's type in words, for a message: "a string", "an object", "null"."""
    if isinstance(value, str):
        return "a string" if value.strip() else "an empty string"
    return "null" if value is None else _KINDS.get(type(value), type_of(value))


class JsonObject(Mapping[str, Any]):
    """A JSON object whose values are read by type.

    A missing or null key gives the default. Without a default it is an error. `where` begins each message: the file,
    and the keys above this object."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values_by_key, self.where = values, where

    def __getitem__(self, key: str) -> Any:
        return self.values_by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)

    def integer(self, key: str, default: int | None = None, *, most: int, least: int = 1) -> int:
        """Read a whole number from `least` (1 or 0) to `most`."""
        needed = f"{'a' if least else '0 or a'} positive integer is needed, at most {most:,}"
        value: int = self._read(key, default, needed, lambda value: _is_whole(value) and least <= value <= most)
        return value

    def number(self, key: str, default: float | None = None, *, least: float = 0.0, most: float = 1e308) -> float:
        """Read a positive number that is finite as a float, from `least` to `most`."""
        value = self._read(key, default, "a positive number is needed", _is_positive)
        if not least <= value <= most:
            raise self.wrong(key, f"a number from {least:g} to {most:g} is needed")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value: bool = self._read(key, default, "true or false is needed", lambda value: isinstance(value, bool))
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value: str | None = self._read(key, default, "a string is needed", lambda value: isinstance(value, str | None))
        return value

    def texts(self, key: str) -> list[str]:
        """Read a list of strings; empty by default."""
        value: list[str] = self._read(key, [], "a list of strings is needed", _each(lambda one: isinstance(one, str)))
        return value

    def integers(self, key: str) -> list[int]:
        """Read a list of whole numbers; empty by default."""
        value: list[int] = self._read(key, [], "a list of integers is needed", _each(_is_whole))
        return value

    def object(self, key: str) -> JsonObject:
        """Read a nested object; empty by default."""
        value = self._read(key, {}, "an object is needed", lambda value: isinstance(value, dict))
        return JsonObject(value, f"{self.where}in '{key}': ")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Read one token id or a list of them, each below `vocab_size`; none by default."""
        needed = f"a token id or a list of them is needed, each below vocab_size {vocab_size}"
        are_ids = _each(lambda one: _is_whole(one) and 0 <= one < vocab_size)
        value = self._read(key, [], needed, lambda value: are_ids(value if isinstance(value, list) else [value]))
        return tuple(value if isinstance(value, list) else [value])

    def wrong(self, key: str, needed: str) -> UserError:
        value = self.values_by_key.get(key)
        given = shown(value) if value is not None else "null" if key in self.values_by_key else "missing"
        return UserError(f"{self.where}'{key}' is {given}, {needed}; correct the config")

    def _read(self, key: str, default: Any, needed: str, is_right: Callable[[Any], bool]) -> Any:
        value = self.values_by_key.get(key)
        value = default if value is None else value
        if not is_right(value):
            raise self.wrong(key, needed)
        return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e308


def _each(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, list) and all(map(is_right, values))


def shown(value: object) -> str:
    """Show a value in a message: on one line, shortened to `_SHOWN` characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # a number with thousands of digits
        text = "a number with too many digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        deepest += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return deepest
