"""What goes over a process border as plain data comes back as it was, and nothing else is read."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.process.plain_data import from_text, to_text

KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["~tuple", "~dict", "~", "call"])
LEAVES = KEYS | st.floats(allow_nan=False) | st.binary()
PLAIN = st.recursive(
    LEAVES | st.tuples(KEYS, KEYS) | st.sets(KEYS) | st.frozensets(KEYS),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS | st.tuples(KEYS), inner),
    max_leaves=12,
)


def types_of(value: Any) -> Any:
    """1, 1.0 and True are equal; what they are is compared as well."""
    if isinstance(value, dict):
        return [(types_of(key), types_of(each)) for key, each in value.items()]
    return type(value), [types_of(each) for each in value] if isinstance(value, list | tuple) else None


@settings(max_examples=50, deadline=None)
@given(PLAIN)
def test_it_comes_back_as_it_was(value: object) -> None:
    found = from_text(to_text(value))
    assert found == value and types_of(found) == types_of(value)


def test_odd_numbers_and_numpys() -> None:
    assert math.isnan(from_text(to_text(math.nan))) and from_text(to_text(-math.inf)) == -math.inf
    found = from_text(to_text([numpy.int64(3), numpy.float32(0.5), numpy.str_("x")]))
    assert found == [3, 0.5, "x"] and types_of(found) == types_of([3, 0.5, "x"])


@pytest.mark.parametrize("value", [object(), print, {"a": [1j]}, ValueError("x")])
def test_what_is_no_plain_data_is_named(value: object) -> None:
    with pytest.raises(TypeError, match="is not plain data; give text"):
        to_text(value)


@pytest.mark.parametrize(
    "text",
    [b"\x80\x04.", b"\xff", "", "{", '{"~tuple":5}', '{"~dict":[[[],1]]}', '{"~bytes":"?"}', "[" * 10**5, "9" * 5000],
)
def test_anything_else_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        from_text(text)
