r"""Reads the text of an answer: a number, a number in a base, words, or an expression of sympy.

    12,  -1{,}234.5,  $5,  50\%,  \frac{3}{4},  3 1/2,  6.6\times 10^{-34},  12 children     Number, an exact fraction
    2516_8                                                                                  Based
    Tuesday,  \text{(B)}                                                                    Words
    2\sqrt{3},  x^2+1,  (1,2],  \{1,2\},  x \ge 3,  \begin{pmatrix}...                      math-verify's expression

A decimal with digits after its point is inexact; all else is exact. Units are removed, and compared if both sides have
a known one. Nothing is evaluated here: 10^{10^{10}} is read in milliseconds.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from octetrl.environments.math_text import plain_characters

LONGEST = 1000  # characters of an answer; a longer one is not read
_LARGEST_EXPONENT = 5000
_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?![\d,]*\d,\d)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_POWER = r"(?:[eE][-+]?\d+|\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+))"
_REPEATING = r"\d*\.\d*\\(?:overline|bar|dot)\s*\{\d+\}"
_RATIO = rf"\\frac\s*\{{\s*[-+]?{_DECIMAL}\s*\}}\s*\{{\s*[-+]?{_DECIMAL}\s*\}}|{_DECIMAL}\s*/\s*{_DECIMAL}"
_MIXED = r"\d+\s*\\frac\s*\{\d+\}\s*\{\d+\}|\d+(?: +| and |-)\d+\s*/\s*\d+"
_NUMBER = rf"(?:{_MIXED}|{_RATIO}|{_REPEATING}|{_DECIMAL}{_POWER}?)"
_SIGNED = rf"(?P<sign>[-+]?)\s*(?P<number>{_NUMBER}|10\s*\^\s*(?:\{{\s*[-+]?\d+\s*\}}|\d))"
_WHOLE = re.compile(rf"{_SIGNED}(?P<percent>\s*%)?(?P<unit>.*)", re.DOTALL)
_IN_PROSE = re.compile(rf"(?<![\w.,/^*\\{{}}(-]){_SIGNED}(?P<percent>\s*%)?(?![\w]*[\d^])")
_NAME = re.compile(
    r"(?P<name>(?:[A-Za-z]|\\[a-z]{2,7})(?:_(?:\w|\{\w+\}))?(?:\([a-z]\))?'?)\s*(?:=|\\approx|:)\s*(?P<rest>[^=]+)"
)
_BASED = re.compile(r"(?P<digits>[0-9A-Za-z]+)_\s*(?:\{\s*)?(?P<base>\d{1,2}|[a-z]+)\s*\}?")
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_FUNCTION = re.compile(
    r"sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|mod|max|min|sinh|cosh|tanh|arcsin|arccos|arctan|inf|gcd|lcm|det|infinity"
    r"|theta|alpha|beta"
)
_NO_UNIT = frozenset(("not", "wrong", "incorrect", "no"))
_LETTER_UNITS = frozenset("mgshlLNJWVKCFAP")
_SHORT_WORD = re.compile(
    r"sq|cu|cm|mm|km|nm|kg|mg|ml|mL|ft|in|mi|oz|lb|hr|yd|am|pm|AM|PM|Hz|of|to|is|an|by|at|on|so|it|as"
)
_SAME_UNITS = (
    ("m", "meter", "metre"), ("cm", "centimeter", "centimetre"), ("mm", "millimeter", "millimetre"),
    ("km", "kilometer", "kilometre"), ("g", "gram"), ("kg", "kilogram"), ("mg", "milligram"), ("s", "sec", "second"),
    ("min", "minute"), ("h", "hr", "hour"), ("day",), ("week",), ("month",), ("year",), ("cent",),
    ("dollar", "usd", "$"), ("in", "inch", "inche"), ("ft", "foot", "feet"), ("yd", "yard"), ("mi", "mile"),
)  # fmt: skip
_UNITS = {name: names[0] for names in _SAME_UNITS for name in names}
_REPLACED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])\s*\.?(?<!\.)", ""),
        (
            r"(?:US|USD|CA|AU|NZ|HK|A|C|S)?\s?\\\$|(?:\b(?:US|CA|AU|NZ|HK)\$)|\\(?:textdollar|pounds|euro|yen)(?![a-z])",
            "$",
        ),
        (r"[€£¥₹₽₩]|\b(?:USD|EUR|GBP|CNY|INR|RMB|Rs\.?)(?=\s*[-\d])", "$"),
        (r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\\!\s*|~|\\thinspace ?|\u2009|\u202f|\u00a0)+(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\[,!;:> ]|\\q?quad|~|\\thinspace|\\phantom\{[^{}]*\}", " "),
        (r"\\([dtc])frac", r"\\frac"),
        (r"\\frac\s*(\d)", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°|\\degrees?(?![a-z])|\\textdegree", " degrees "),
        (r"\\%|\bper ?cent\b|\bpercentage points?\b|\bpct\b", "%"),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|rm|bf|operatorname)\s*(?:\{\s*\}|(?=\s))", " "),
        (r"\\(leq|geq|neq)slant(?![a-z])", r"\\\1"),
        (r"\\(?:oslash|varnothing)(?![a-z])", r"\\emptyset"),
        (r"(?<=\d)\s+x\s+(?=\d)", r" \\times "),
        (r"¢", " cents "),
        (r"[\u2190-\u21ff\u2600-\u27bf\U0001f000-\U0001faff]|^\s*[-=]>", " "),  # arrows, check marks, emoji
        (r"\\textcircled\s*\{(\w)\}", r"\1"),
        (r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}", ", "),
        (r"\\not\s*=", r"\\neq "),
        (r"\*\*|__|`|^[*_]+|[*_]+$", ""),
    )
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_LAST_TEXT = re.compile(r"\s*\\(?:text|textrm|textbf|textnormal|mathrm|mbox)\s*\{([^{}]*)\}\s*(?:\^\s*\{?-?\d\}?)?\s*$")
_PLAIN_UNIT = re.compile(
    r"(?<=[}\w)])\s+(?:square |cubic |sq\.? )?(?:cm|mm|km|kg|ft|inches|units?|feet|meters|miles)(?:\^\{?\d\}?)?$"
)


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number as it was written; `percent` if a percent sign follows, so 50% has the value 50."""

    value: Fraction
    exact: bool = True
    percent: bool = False
    unit: str = ""  # a known one
    name: str = ""  # x of x = 5


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a base that is written beside them."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Words:
    """A text in lower case, without punctuation."""

    words: str


@dataclass(frozen=True, slots=True)
class Expression:
    """What math-verify reads. `tree` is not evaluated. is_list: several values without brackets around them."""

    tree: Any
    is_list: bool = False


Value = Number | Based | Words | Expression


def read_value(text: str) -> Value | None:
    """The value of an answer; None if it can't be read. Raises nothing, and evaluates nothing."""
    if len(text) > LONGEST:
        return None
    text = tidied(text)
    if not text:
        return None
    return _plain(text) or _expression(text)


def is_plain(text: str) -> bool:
    """Whether an answer is read without math-verify, in microseconds."""
    return len(text) <= LONGEST and _plain(tidied(text)) is not None


def _plain(text: str) -> Number | Based | Words | None:
    return _number(text) or _based(text) or _words(text)


def tidied(text: str) -> str:
    """`text` without delimiters of formulas, spacing, Markdown and the dot at its end."""
    text = plain_characters(text).strip()
    formulas = re.findall(r"(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", text, re.DOTALL)
    outside = re.sub(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]", "", text, flags=re.DOTALL)
    if len(formulas) == 1 and re.search(r"[^\W\d_]{2}", outside) and not re.search(r"\d", outside):
        (inside,) = formulas
        rest = re.sub(r"[*\s.]", "", outside.rpartition("\n")[0] or "")
        text = "".join(inside) + ("" if rest else " " + _unit_after(text))
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\\[()\[\]](?!\w*frac)", " ", text).replace("$", "") if "\\\\" not in text else text.replace("$", "")
    return re.sub(r"\s+", " ", text).strip().rstrip(".,;:").strip()


def _unit_after(text: str) -> str:
    """The words after the only formula of a sentence, if they may be a unit."""
    tail = re.split(r"\$|\\\)|\\\]", text)[-1]
    words = re.match(r"\s*((?:[A-Za-z/^\d-]+\s?){0,4})\W*$", tail)
    return words[1] if words else ""


def _number(text: str) -> Number | None:
    name = ""
    if named := _NAME.fullmatch(text):
        name, text = named["name"], named["rest"].strip()
    plain = _TEXT.sub(r" \1 ", text)
    plain = re.sub(r"^(?:\\approx|=|~)\s*", "", re.sub(r"\s+", " ", plain).strip())
    while (bare := re.fullmatch(r"\{([^{}]*)\}", plain)) is not None:
        plain = bare[1].strip()
    match = _WHOLE.fullmatch(plain.strip())
    glued = match is not None and not re.match(r"[\s\-]|$", match["unit"])
    if match is None or not _is_unit(match["unit"], glued=glued):
        match = _only_number(plain)
        if match is None:
            return None
    value = _fraction(match["number"])
    if value is None:
        return None
    value = -value if match["sign"] == "-" else value
    is_decimal = re.search(r"\.|\d[eE]|10\s*[\^*]", match["number"]) and not re.fullmatch(_REPEATING, match["number"])
    exact = value.denominator == 1 or not is_decimal
    unit = _known_unit(plain[match.end("number") :])
    return Number(value, exact, match["percent"] is not None, unit, name)


def _only_number(plain: str) -> re.Match[str] | None:
    """The only number of a sentence; after the last equals sign, if it has one."""
    plain = re.sub(r"\s\((?=[^()]*[^\W\d_]{3})[^()]*\)", "", plain)
    if "\\" in plain or re.search(r"[<>^_]|!(?=[\s=]|$)", plain):
        return None
    left, equals, last = plain.rpartition("=")
    if equals and re.search(r"[,;]|\b(?:or|and)\b|(?<![^\W\d_])[^\W\d_](?![^\W\d_])", left):
        return None  # several equations, or one in variables
    found = list(_IN_PROSE.finditer(last))
    if len(found) != 1 or re.search(r"\d", last[: found[0].start()] + last[found[0].end() :]):
        return None
    (match,) = found
    before, after = last[: match.start()].strip(), last[match.end() :]
    says = not before or re.search(r"[^\W\d_]{2}[^\w+*/^-]*$|[:,]$", before)
    if (
        not says
        or re.search(r"\b(?:not|no)\b", before.lower())
        or not _is_unit(after, glued=not re.match(r"[\s-]|$", after))
    ):
        return None
    offset = len(plain) - len(last)
    return _IN_PROSE.search(plain, match.start() + offset)


def _is_unit(tail: str, *, glued: bool) -> bool:
    """Whether a number that is followed by `tail` is still this number."""
    tail = re.sub(r"^\s*\((?:[^()]*[^\W\d_]{3}[^()]*)\)", "", tail.strip().lstrip("-")).strip()
    if not tail:
        return True
    if re.search(r"[=<>+*\\{}\[\]|_]|(?<![A-Za-z])\d", re.sub(r"\\cdot|\^\s*(?:\{-?\d\}|-?\d)", "", tail)):
        return False
    words = re.findall(r"[^\W\d_]+", tail)
    if (
        not words
        or any(_FUNCTION.fullmatch(word) for word in words)
        or _NO_UNIT & set(words)
        or words[0] in ("or", "and")
    ):
        return False
    first = words[0]
    if len(first) == 1:
        return (first in _LETTER_UNITS and not glued and len(words) <= 3) or (first == "a" and len(words) > 1)
    return len(first) >= 3 or _SHORT_WORD.fullmatch(first) is not None or first.lower() in _UNITS or not first.isascii()


def _known_unit(tail: str) -> str:
    words = re.findall(r"[^\W\d_]+", tail)
    if not words or "/" in tail or "per" in words:
        return ""
    word = words[0] if len(words[0]) == 1 else words[0].lower()
    return _UNITS.get(word) or _UNITS.get(word.rstrip("s")) or ""


def _fraction(number: str) -> Fraction | None:
    """The value of a text that matches `_NUMBER`; None for a denominator of 0 or a huge exponent."""
    number = re.sub(r"(?<=\d)[, ](?=\d{3})", "", number)
    if (
        mixed := re.fullmatch(r"(\d+)(?: +| and |-|\s*(?=\\frac))(\\frac\s*\{\d+\}\s*\{\d+\}|\d+\s*/\s*\d+)", number)
    ) is not None:
        part = _fraction(mixed[2])
        return None if part is None else int(mixed[1]) + part
    if (repeating := re.fullmatch(r"(\d*)\.(\d*)\\\w+\s*\{(\d+)\}", number)) is not None:
        whole, fixed, again = repeating.groups()
        shift = 10 ** len(fixed)
        return Fraction(int((whole or "0") + fixed), shift) + Fraction(int(again), shift * (10 ** len(again) - 1))
    parts = re.findall(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", number)
    if power := re.fullmatch(r"(.*?)\s*(?:\\times|\\cdot|\*|x)?\s*10\s*(?:\^|\*\*)\s*\{?\s*([-+]?\d+)\s*\}?", number):
        parts = [f"{power[1].strip() or 1}e{power[2]}"]
    if len(parts) != (2 if "/" in number or "frac" in number else 1):
        return None
    exponents = [int(part.lower().partition("e")[2] or 0) for part in parts if len(part) <= LONGEST]
    if any(abs(exponent) > _LARGEST_EXPONENT for exponent in exponents):
        return None
    values = [Fraction(part) for part in parts]
    if len(values) == 1:
        return values[0]
    return values[0] / values[1] if values[1] else None


def _based(text: str) -> Based | None:
    match = _BASED.fullmatch(_TEXT.sub(r"\1", text).replace(" ", ""))
    if match is None or not re.search(r"\d", match["digits"]):
        return None
    name = match["base"]
    base = int(name) if name.isdigit() else _BASES.index(name) + 2 if name in _BASES else 0
    digits = match["digits"].upper()
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Based(digits.lstrip("0") or "0", base)


def _words(text: str) -> Words | None:
    """Words, or one letter; not two letters, which are a product."""
    plain, in_text = _TEXT.subn(r" \1 ", text)
    plain = re.sub(r"\s+", " ", plain).strip()
    if re.fullmatch(r"\d{1,2}:\d\d ?[ap]\.?m\.?", plain.lower()):  # a time of day
        return Words(plain.lower().replace(".", "").replace(" ", ""))
    if re.search(r"[\\^_{}=<>+*|]", plain) or not re.search(r"[^\W\d_]", plain):
        return None
    longest = max(len(word) for word in re.findall(r"[^\W\d_]+", plain))
    letters = sum(character.isalpha() for character in plain)
    alone = re.fullmatch(r"\W*([^\W\d_])\W*", plain) is not None and not re.search(r"[-/!]", plain)
    if (
        not in_text
        and not alone
        and (longest < 3 or any(map(_FUNCTION.fullmatch, re.findall(r"[a-z]+", plain.lower()))))
    ):
        return None
    if letters < 0.3 * len(plain.replace(" ", "")) and not in_text and not alone:
        return None
    words = re.sub(r"[^\w\s/:+-]", " ", plain.casefold())
    return Words(re.sub(r"^(?:the|an) ", "", re.sub(r"\s+", " ", words).strip()))


@cache
def math_verify() -> Any:
    """The library: 0.4 s to import, which only processes do that read answers."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its time limits are off
    return math_verify


@cache
def _config() -> Any:
    """How math-verify reads an answer that is already found. It does not remove units: to it, 5h and 5 are equal."""
    from latex2sympy2_extended.math_normalization import NormalizationConfig

    normalization = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
    return math_verify().LatexExtractionConfig(normalization_config=normalization, boxed_match_priority=-1)


def _expression(text: str) -> Expression | None:
    if re.match(r"\\(?:neq?|geq?|leq?|gt|lt)(?![A-Za-z])|[<>]|\\not\s*=", text):
        text = f"x {text}"  # a relation whose left side is not written
    text = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)", r"\1 \\cdot 10^{\2}", text)
    for unit in (True, False):
        bare = _LAST_TEXT.sub("", text) if unit else text
        bare = re.sub(r"\bdegrees\b\s*(?:[CF]\b)?", "", bare).strip()
        bare = _PLAIN_UNIT.sub("", bare)
        bare = re.sub(r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|log|ln|pi|infty)(?![A-Za-z])", r"\\\1", bare)
        if not bare or "$" in bare or re.search(r"(?<![\d_^.])\d+(?:\.\d+)?\s+\d", bare):  # 12 12 is no number
            continue
        found = math_verify().parse(f"${bare}$", [_config()], fallback_mode="no_fallback", parsing_timeout=None)
        if found and not isinstance(found[0], str):
            return Expression(
                found[0],
                is_list=type(found[0]).__name__ == "FiniteSet" and not re.match(r"\s*\\?\{|.*=\s*\\\{|.*\\in\b", bare),
            )
    return None
