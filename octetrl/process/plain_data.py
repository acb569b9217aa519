"""Plain data as JSON text and back, for answers of processes that run foreign code; messages over a stream socket.

Reading the text only creates plain values. Reading a pickle would call functions that the pickle names. Lists, strings,
numbers, None and dictionaries with string keys are written as JSON. Tuples, sets, bytes and other dictionaries are
written as an object with one key that names the type, so that the reader restores the type.

    (1, {2: "x"})    {"~tuple": [1, {"~dict": [[2, "x"]]}]}

A value of a subclass is restored as its base class: a numpy string as a string, a numpy integer as an integer.

A message is eight bytes of length, and as many bytes.
"""

from __future__ import annotations

import binascii
import json
import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real

LONGEST_MESSAGE = 64 << 20  # bytes that a run accepts of a process with foreign code
_MARK = "~"
_READ_BYTES = 1 << 16


def to_text(value: object) -> str:
    """JSON text of `value`. Raises TypeError, naming the type, if it contains anything but plain data."""
    return json.dumps(_marked(value), separators=(",", ":"))


def from_text(text: str | bytes) -> object:
    """The value from which `to_text` made `text`. Raises ValueError for any other text."""
    try:
        return json.loads(text, object_hook=_unmarked)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no plain data: {error}") from error


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(8, "big") + message


def take_frame(data: bytearray, longest: int | None = None) -> bytes | None:
    """Remove the first message from `data` and return it; None if it is not complete. Raises ValueError for one of more
    than `longest` bytes."""
    size = int.from_bytes(data[:8], "big")
    if longest is not None and len(data) >= 8 and size > longest:
        raise ValueError(f"{size:,} bytes; {longest:,} are allowed")
    if len(data) < 8 + size:
        return None
    message = bytes(data[8 : 8 + size])
    del data[: 8 + size]
    return message


def read_frame(descriptor: int, ahead: bytearray) -> bytes | None:
    """The next message; None if the other end is closed. ahead: what was read beyond it, for the next call."""
    while (message := take_frame(ahead)) is None:
        try:
            part = os.read(descriptor, _READ_BYTES)
        except ConnectionResetError:
            return None
        if not part:
            return None
        ahead += part
    return message


def write_frame(descriptor: int, message: bytes) -> None:
    data = memoryview(framed(message))
    while data:
        data = data[os.write(descriptor, data) :]


def _marked(value: object) -> object:
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, list):
        return [_marked(each) for each in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
            return {key: _marked(each) for key, each in value.items()}
        return {"~dict": [[_marked(key), _marked(each)] for key, each in value.items()]}
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "frozenset" if isinstance(value, frozenset) else "set"
        return {_MARK + kind: [_marked(each) for each in value]}
    if isinstance(value, bytes | bytearray):
        return {"~bytes": binascii.b2a_base64(value, newline=False).decode()}
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    kind = type(value).__name__
    raise TypeError(f"a {kind} is not plain data; give text, numbers, lists, tuples, sets, dictionaries")


_KINDS: dict[str, Callable] = {
    "~tuple": tuple,
    "~set": set,
    "~frozenset": frozenset,
    "~dict": lambda pairs: {key: each for key, each in pairs},  # not dict(): it would take the text "ab" for a pair
    "~bytes": lambda text: binascii.a2b_base64(text, strict_mode=True),
}


def _unmarked(item: dict[str, object]) -> object:
    mark = next(iter(item), "")
    return _KINDS[mark](item[mark]) if len(item) == 1 and mark in _KINDS else item
