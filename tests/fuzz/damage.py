"""How the fuzzer damages a sound file: another value at some place of it, or other bytes.

Values are those that have ended in tracebacks before: numbers beyond every type, empty and enormous texts, half a
character, a NUL, wrong kinds, nesting without end.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

DEEP: list[Any] = []
for _ in range(150):
    DEEP = [DEEP]
ODD_VALUES = (
    *(None, True, False, 0, -1, 1, 7, 10**9, -(10**9), 2**63, 10**400, 0.5, -0.0, 1e308, -1e308, 1e-320),
    *("", " ", "0", "x", "\0", "\ud800", "é" * 300, "a/" * 3000, "../../..", "/dev/zero", "{{ 1 // 0 }}", "{% if"),
    *([], [[]], ["x"], [0], [None], [{}], {}, {"": {}}, {"x": None}, {"type": "x"}, DEEP),
)
odd_values = (
    st.sampled_from(ODD_VALUES).map(copy.deepcopy) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
)
raw = st.one_of(
    st.sampled_from([b"", b"\xff\xfe", b"\0", b"[" * 100_000, b"{" * 500, b"9" * 5_000, b'"\\ud800"', b"&a [*a]\n"]),
    st.binary(max_size=6),
)


def places(tree: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value in `tree`, of the first few of each long list."""
    found = [above] if above else []
    if isinstance(tree, dict):
        inner: Any = list(tree.items())[:40]
    elif isinstance(tree, list):
        inner = list(enumerate(tree))[:3]
    else:
        inner = ()
    for key, value in inner:
        found += places(value, (*above, key))
    return found


@st.composite
def damaged(draw: st.DrawFn, sound: Any) -> Any:
    """`sound` with one to three of its values replaced, removed, or joined by others."""
    tree = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(sound)))
        try:
            node = tree
            for key in path[:-1]:
                node = node[key]
            kind = draw(st.sampled_from(["replace", "remove", "add"]))
            if kind == "replace":
                node[path[-1]] = draw(odd_values)
            elif kind == "remove":
                del node[path[-1]]
            else:
                node[draw(st.text(max_size=3))] = draw(odd_values)
        except (KeyError, IndexError, TypeError):  # an earlier damage took the place away
            continue
    return tree


@st.composite
def damaged_bytes(draw: st.DrawFn, sound: bytes) -> bytes:
    """`sound` with bytes put in, taken out or cut off."""
    begin = draw(st.integers(0, len(sound)))
    return sound[:begin] + draw(raw) + sound[draw(st.sampled_from([begin, begin + 1, begin + 20, len(sound)])) :]


def as_json(tree: Any) -> bytes:
    """Whole numbers of any length included."""
    return json.dumps(tree).encode()


def json_files(sound: Any) -> st.SearchStrategy[bytes]:
    return damaged(sound).map(as_json) | damaged_bytes(as_json(sound))
