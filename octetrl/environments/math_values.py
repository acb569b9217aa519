r"""Reads the text of an answer: a number, a number in a base, words, or an expression of sympy.

    12,  -1{,}234.5,  $5,  50\%,  \frac{3}{4},  3 1/2,  6.6\times 10^{-34},  12 children     Number, an exact fraction
    2516_8                                                                                  Based
    Tuesday,  \text{(B)}                                                                    Words
    2\sqrt{3},  x^2+1,  (1,2],  \{1,2\},  x \ge 3,  \begin{pmatrix}...                      math-verify's expression
    x = 5,  f(x) = x^2                                                                      Named, one of these

A decimal with digits after its point is inexact; all else is exact. Units are removed, and compared if both sides have
a known one. Nothing is evaluated here: 10^{10^{10}} is read in milliseconds.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

LONGEST = 1000  # characters of an answer; a longer one is not read
_LARGEST_EXPONENT = 5000


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number as it was written; `percent` if a percent sign follows, so 50% has the value 50."""

    value: Fraction
    exact: bool = True
    percent: bool = False
    unit: str = ""  # a known one


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


@dataclass(frozen=True, slots=True)
class Named:
    """The value of a variable or function."""

    name: str
    value: Number | Expression


Value = Number | Based | Words | Expression | Named


def read_value(text: str) -> Value | None:
    """The value of an answer; None if it can't be read. Raises nothing, and evaluates nothing."""
    if len(text) > LONGEST:
        return None
    text = tidied(text)
    if (plain := _plain(text)) is not None:
        return plain
    if (named := _NAMES.match(text)) and set(_NAMES.findall(text)) == {named["name"]}:
        value = read_value(_NAMES.sub("", text))  # also x = 1 or x = 2
        return Named(re.sub("[() ]", "", named["name"]), value) if isinstance(value, Number | Expression) else value
    parts = sorted(part.strip() for part in re.split(r",| and |\\text ?\{ ?and ?\}", text))
    names = [name["name"] for part in parts if (name := _NAMES.match(part))]
    if 1 < len(parts) == len(names) == len({*names}):  # y = 2, x = 1 is the point (1, 2)
        point = _expression(f"({', '.join(_NAMES.sub('', part, count=1) for part in parts)})")
        return point and Named(",".join(names), point)
    return _expression(text)


def is_plain(text: str) -> bool:
    """Whether an answer is read without math-verify, in microseconds."""
    return len(text) <= LONGEST and _plain(tidied(text)) is not None


def _plain(text: str) -> Number | Based | Words | None:
    plain, in_text = _TEXT.subn(r" \1 ", text)
    return _number(plain) or _based(plain) or _words(plain, in_text > 0)


_SYMBOL_NAMES = ["×times", "·cdot", "≤le", "≥ge", "≠ne", "∈in", "∩cap", "∞infty", "√sqrt", "°degree"]
_SYMBOLS = {ord(name[0]): f"\\{name[1:]} " for name in _SYMBOL_NAMES}
_PUNCTUATION = str.maketrans("。、−–÷⁄", ".,--//", "\u2061\u200b\ufeff")
_RAISED = re.compile("[⁻⁰¹²³⁴-⁹]+")
_LOWERED = re.compile("[₀-₉]+")


def plain_characters(text: str) -> str:
    """`text` with the ASCII forms of wide characters and other scripts' digits, and LaTeX for symbols."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda match: f" {unicodedata.normalize('NFKC', match[0])}", text)
    text = unicodedata.normalize("NFKC", text).translate(_PUNCTUATION).translate(_SYMBOLS)
    return re.sub(r"(?![0-9])\d", lambda match: str(unicodedata.digit(match[0])), text)


_MONEY = re.compile(
    r"(?:\b[A-Z]{1,3}\s?)?\\\$|\b[A-Z]{2}\$(?=\d)|[€£¥₹₽₩¢]|\b(?:USD|EUR|GBP|CNY|INR|RMB|Rs\.?)(?=\s*\d)"
)
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]|\$\$?")
_SENTENCE = re.compile(r"(?P<before>[^$\d\\]*)\$(?P<formula>[^$]+)\$(?P<after>[^$\d\\]*)")
_TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname|rm|bf)(?![a-z])\s*"

_TIDYINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # characters that mean nothing
        (r"\*\*|__|`|^[*_]+|[*_]+$|[\u2190-\u21ff\u2600-\u27bf\U0001f000-\U0001faff]|^\s*[-=]>", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])\s*\.?", ""),
        (r"\\phantom\{[^{}]*\}|\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))|\\degrees?(?![a-z])", " "),
        # one spelling of each command
        (_TEXT_COMMAND + r"(?=\{)", r"\\text"),
        (_TEXT_COMMAND + r"(?!\{)|\\text\{\s*\}|\\textcircled\s*", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\?sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\not\s*=", r"\\neq "),
        (r"\\(?:lor|vee)(?![a-z])", ", "),
        (r"(?<![\\A-Za-z])inf(?:inity)?(?![A-Za-z])", r"\\infty "),
        (
            r"^((?:\s*[A-Za-z]\s*=)?(?:\\(?:frac|sqrt|pi|cdot|times|ln|log)(?![a-z])|[^A-Za-z=\\])*(?:[\d})]|\\pi)\s*)"
            r"\\(?:approx|simeq)\s*-?\d*\.\d+[\s.]*$",  # 1/3 \approx 0.333
            r"\1",
        ),
        (r"\\(?:approx|simeq)(?![a-z])", "="),
        (r"\\(?:oslash|varnothing)(?![a-z])", r"\\emptyset"),
        (r"\\%|\bper ?cent\b|\bpercentage points?\b|\bpct\b", "%"),
        # numbers
        (r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\\!\s*|~|\\thinspace ?)+(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\[,!;:> ]|\\q?quad(?![a-z])|~|\\thinspace(?![a-z])", " "),
        (r"\^\s*(-?\d+)", r"^{\1}"),
        (r"(?<=\d)\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{\s*([-+]?\d+)\s*\}", r"e\1"),
        (r"(?<=\d)\s+x\s+(?=\d)", r" \\times "),
        (r"\s+", " "),
    )
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORD = re.compile(r"[^\W\d_]+")


def tidied(text: str) -> str:
    """`text` without delimiters of formulas, currencies, spacing, Markdown and the dot at its end."""
    text = _DELIMITER.sub("$", _MONEY.sub("", plain_characters(text)))
    if (sentence := _SENTENCE.fullmatch(text)) and re.search(r"[^\W\d_]{2}", sentence["before"]):
        text = f"{sentence['formula']} {sentence['after']}"
    text = text.replace("$", " ")
    for pattern, replacement in _TIDYINGS:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(" .,;:")


_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?!\d)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(
    r"(?<![\w.\\^{(/*+-])(?P<sign>[-+]?) ?"
    rf"(?:(?:(?P<whole>\d+)(?: +| and ))?(?P<fraction>\d+ ?/ ?\d+)|(?P<decimal>{_DECIMAL}))(?P<percent> ?%)?"
)
_PLAIN_FRACTION = re.compile(r"\\frac ?(?:\{ ?([-+]?\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d))")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot) ?\{(\d+)\}")
_REMARK = re.compile(
    r" \((?![^()]*(?:sqrt|sin|cos|tan|log)(?![a-z]))[^()\\]*[^\W\d_]{3}[^()\\]*\)"
)  # 12 (twelve), not 2 (3+\sqrt{5})
_ORDINAL = re.compile(r"(?<=\d)(?: ?\^ ?\{ ?(?:st|nd|rd|th) ?\}|(?:st|nd|rd|th)(?![a-z]))")
_OPERATOR = re.compile(r"[\\<>^_+*|{}\[\]]")
_SEVERAL = re.compile(r"[,;\\]|\b(?:or|and)\b|(?<![^\W\d_])[^\W\d_](?![^\W\d_])")  # equations, or one in variables

_UNIT_NAMES = (
    "m meter metre, cm centimeter centimetre, mm millimeter millimetre, km kilometer kilometre, g gram, kg kilogram,"
    " mg milligram, s sec second, min minute, h hr hour, day, week, month, year, cent, dollar usd, in inch inche,"
    " ft foot feet, yd yard, mi mile, hundred, thousand, million, billion, trillion"
)
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNITS = {name: names.split()[0] for names in _UNIT_NAMES.split(", ") for name in names.split()}
_SHORT_UNIT = re.compile(r"[lLNJWVKCFAP]|m[lL]|nm|oz|lb|sq|cu|Hz|mph|[ap]m|[AP]M|of|to|is|an|by|at|on|so|it|as")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z]) ?\^ ?(?:\{-?\d\}|-?\d)")
_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan)h?|cot|csc|log|ln|exp|sqrt|gcd|lcm|pi|infty|theta|alpha|beta)(?![A-Za-z])"
)
_NO_ANSWER = re.compile(r"\b(?:not|no|wrong|incorrect)\b", re.IGNORECASE)


def _number(text: str) -> Number | None:
    """The only number of the text, with words that say no more than its unit; after the last equals sign."""
    text = _ORDINAL.sub("", text)
    text = _PLAIN_FRACTION.sub(r" \1\2/\3\4", _REPEATING.sub(_repeating, text))
    left, _, text = _REMARK.sub("", text).rpartition("=")
    found = list(_NUMBER.finditer(text))
    if len(found) != 1 or _SEVERAL.search(left):
        return None
    (match,) = found
    before, after = text[: match.start()].strip(), _UNIT_POWER.sub("", text[match.end() :])
    if re.search(r"\d", before + after) or _FUNCTION.search(text) or _NO_ANSWER.search(text):
        return None
    if not _introduces(before) or not _is_unit(after) or (value := _fraction(match)) is None:
        return None
    exact = value.denominator == 1 or match["fraction"] is not None
    return Number(value, exact, match["percent"] is not None, _known_unit(after))


def _repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} as 1/6."""
    whole, fixed, again = match.groups()
    shift = 10 ** len(fixed)
    value = Fraction(int(whole + fixed or "0"), shift) + Fraction(int(again), shift * (10 ** len(again) - 1))
    return f"{value.numerator}/{value.denominator}"


def _introduces(before: str) -> bool:
    """Whether a number may follow: "She has", "Total:", and nothing of mathematics."""
    return not before or (not _OPERATOR.search(before) and re.search(r"[^\W\d_]{2}[^\w-]*$|[:,]$", before) is not None)


def _is_unit(after: str) -> bool:
    """Whether a number that is followed by `after` is still this number."""
    words = _WORD.findall(after)
    if not words or _OPERATOR.search(after) or after[0] == "!":
        return not after.strip()
    word, is_separate = words[0], after[0] in " -"
    if word in ("or", "and"):
        return False
    if word in _UNITS or _SHORT_UNIT.fullmatch(word):
        return is_separate or len(word) > 1
    return len(word) >= (3 if is_separate else 5) or not word.isascii() or (word == "a" and len(words) > 1)


def _known_unit(after: str) -> str:
    words = _WORD.findall(after)
    if not words or "/" in after or "per" in words:
        return ""
    word = words[0] if len(words[0]) == 1 else words[0].lower()
    return _UNITS.get(word) or _UNITS.get(word.rstrip("s")) or ""


def _fraction(match: re.Match[str]) -> Fraction | None:
    """The value of a match of `_NUMBER`; None for a denominator of 0 or a huge exponent."""
    written = re.sub("[, ]", "", match["fraction"] or match["decimal"])
    if abs(int(written.lower().partition("e")[2] or 0)) > _LARGEST_EXPONENT or re.search("/0+$", written):
        return None
    value = Fraction(written) + int(match["whole"] or 0)
    return -value if match["sign"] == "-" else value


_BASED = re.compile(r"(?P<digits>[0-9A-Za-z]*\d[0-9A-Za-z]*)_\{?(?P<base>\d{1,2}|[a-z]+)\}?")
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def _based(text: str) -> Based | None:
    match = _BASED.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    digits, name = match["digits"].upper(), match["base"]
    base = int(name) if name.isdigit() else _BASES.index(name) + 2 if name in _BASES else 0
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Based(digits.lstrip("0") or "0", base)


def _words(text: str, in_text: bool) -> Words | None:
    """Words, one letter, or a time of day; not two letters, which are a product. in_text: it was in \\text{}."""
    words = [word for word in _WORD.findall(text) if word not in ("and", "or")]
    if not words or _OPERATOR.search(text) or (not in_text and _FUNCTION.search(text)):
        return None
    is_letter = len("".join(words)) == 1 and not re.search(r"[-\d/!]", text)
    is_time = re.search(r"\d:\d\d *[ap]\.?m\b", text, re.IGNORECASE)
    is_product = re.search(r"\d[^\W\d_]", text) or max(map(len, words)) < (2 if in_text else 3)
    if is_product and not is_letter and not is_time:
        return None
    text = re.sub(r"^\W*(?:the|an) ", "", text.casefold())
    return Words(re.sub(r"[^\w./:+-]|\.(?!\d)", "", text))


_NAME = r"(?:[A-Za-z]|\\[a-z]{2,7})(?:_(?:\w|\{\w+\}))?(?:\(\w+\))?'?|\([a-z](?:, ?[a-z])+\)"  # x, a_1, f(x), (x, y)
_NAMES = re.compile(rf"(?<![\w\\{{(^+*/-])(?P<name>{_NAME}) ?(?:=|\\in(?![a-z])) ?")
_RELATION = re.compile(r"\\(?:neq?|geq?|leq?|gt|lt)(?![A-Za-z])|[<>]")
_LONG_UNITS = "|".join(name for name in _UNITS if len(name) > 1)
_LAST_UNIT = re.compile(
    rf"(?<=[\w)}}])(?: ?\\text ?\{{[^{{}}]*\}}| (?:square |cubic |sq\.? )?(?:{_LONG_UNITS}|inches|units?)s?)"
    r"(?: ?\^ ?(?:\{-?\d\}|-?\d))?$"
)
_SIDE_BY_SIDE = re.compile(r"(?<![\d_^.])\d+(?:\.\d+)? +\d")  # 12 12 is no number


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
    if _RELATION.match(text):
        text = f"x {text}"  # its left side is not written
    text = _TEXT.sub(r" \1 ", _LAST_UNIT.sub("", text))
    text = re.sub(r"(\d)[eE]([-+]?\d+)", r"\1 \\cdot 10^{\2}", text)
    text = re.sub(r"(?<!\w)\(([A-Z])\)", r"\1", text)  # (A), (C)
    text = _FUNCTION.sub(r"\\\1", text).replace("*", r" \cdot ").strip()
    text = re.sub(r"((?<![\w^.}])\d+|\)) ?(?=\( ?-?\d+ ?\))", r"\1 \\cdot ", text)  # 2(6) is a product
    if not text or _SIDE_BY_SIDE.search(text):
        return None
    found = math_verify().parse(f"${text}$", [_config()], fallback_mode="no_fallback", parsing_timeout=None)
    if not found or isinstance(found[0], str):
        return None
    return Expression(found[0], is_list=type(found[0]).__name__ == "FiniteSet" and "\\{" not in text)
