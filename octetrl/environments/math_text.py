"""Finds the final answer in a completion of a mathematics task, as a short text.

    the last \\boxed{...}                       also nested, or not closed at the end
    the line after `environment.answer_marker`   if the recipe has one and there is no box after it
    the text after "the answer is"              in several languages
    the last formula or number                  otherwise

Boxes that only a comma, "and" or "or" separates are one list. Every search takes time linear in the text, so a
policy can't slow the scorer down by a long answer.
"""

from __future__ import annotations

import re
import unicodedata

from octetrl.environments.rewards import extract_answer

_TAIL = 4000  # characters at the end that are searched if there is neither box nor marker

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ is no brace
_BETWEEN_BOXES = re.compile(
    r"[\s$.]*(?:[,;&]|\\q?quad|\\text\{|\b(?:and|or)\b)[\s$,;]*(?:and|or)?[\s$}]*(?:[A-Za-z]\s*=\s*)?"
)

_FORMULA = r"\$\$[^$]+\$\$|(?<!\\)\$[^$\n]+\$|\\\(.{1,400}?\\\)|\\\[.{1,400}?\\\]"
_FRACTION = r"[-−]?\\[dt]?frac\{[^{}]*\}\{[^{}]*\}"
_NUMBER = r"(?<![\w.])[-−+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?"
_FORMULA_OR_NUMBER = re.compile(rf"{_FORMULA}|{_FRACTION}|{_NUMBER}", re.DOTALL)

_ANSWER_IS = re.compile(
    r"\b(?:answer|result)(?:\s+(?:is|equals|would be)\b|\**\s*[:=\n])"
    r"|答案\s*(?:是|为|為|:)|答え\s*(?:は|:)|답\s*(?:은|:)|ответ\b\s*(?::|-|—|равен)|\bantwort\s*(?:ist|lautet|:)"
    r"|\b(?:respuesta|réponse|risposta|resposta)(?:\s+final[ea]?)?\s*(?:es\b|est\b|è|é|:)|đáp án\s*(?:là|:)",
    re.IGNORECASE,
)
_END = re.compile(r"[.!?](?=\s|$)|;\s|,\s+(?!and\b|or\b)(?=[^\W\d_]{2})")  # of a sentence or clause

_NAMES = {"×": "times", "·": "cdot", "≤": "le", "≥": "ge", "≠": "ne", "∈": "in", "∩": "cap"}  # math-verify reads others
_NAMES |= {"∞": "infty", "√": "sqrt", "°": "degree"}
_SYMBOLS = {ord(symbol): f"\\{name} " for symbol, name in _NAMES.items()}
_PUNCTUATION = str.maketrans("。、−–÷⁄", ".,--//", "\u2061\u200b\ufeff")
_RAISED = re.compile("[⁻⁰¹²³⁴-⁹]+")
_LOWERED = re.compile("[₀-₉]+")


def final_answer(completion_text: str, marker: str | None) -> str | None:
    """The completion's answer as it stands there; None if there is none.

    marker: `environment.answer_marker`; only the text after it is searched."""
    if marker is not None and not marker.endswith(">"):
        completion_text = completion_text.rstrip().removesuffix(marker)  # nothing follows it
    found = extract_answer(completion_text, marker)
    if not found:
        return None
    if (box := last_box(found)) is not None:
        return box
    if marker is not None:
        return _first_statement(plain_characters(found[:_TAIL]))
    tail = plain_characters(found[-_TAIL:]).strip()
    *_, stated = ["", *(match.end() for match in _ANSWER_IS.finditer(tail))]
    if isinstance(stated, int) and (statement := _first_statement(tail[stated:])):
        return statement
    if len(tail.split()) == 1 or not re.search(r"[^\W\d_]{2}", re.sub(r"\\[A-Za-z]+", "", tail)):
        return tail  # nothing but an answer
    *_, last = ["", *_FORMULA_OR_NUMBER.findall(tail)]
    return last or (tail if len(tail) <= 100 else None)


def plain_characters(text: str) -> str:
    """`text` with the ASCII forms of wide characters and other scripts' digits, and LaTeX for symbols."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda match: f" {unicodedata.normalize('NFKC', match[0])}", text)
    text = unicodedata.normalize("NFKC", text).translate(_PUNCTUATION).translate(_SYMBOLS)
    return re.sub(r"(?![0-9])\d", lambda match: str(unicodedata.digit(match[0])), text)


def last_box(text: str) -> str | None:
    """The content of the last box, or of several that form a list; None without a box. Of nested boxes, the outer one.
    A box that is not closed ends with its line."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    contents: list[str] = []
    end = 0
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue  # it is inside of the last one
        if box.start() - end > 60 or not _BETWEEN_BOXES.fullmatch(text, end, box.start()):
            contents.clear()  # not in one list with this one
        start = box.end()
        if text[start : start + 1] != "{":  # \boxed 7
            content = re.split(r"\s", text[start : start + 40])[0].rstrip(".,$")
            end = start + len(content)
        elif start in closing:
            content, end = text[start + 1 : closing[start]], closing[start] + 1
        else:
            content, end = text[start + 1 : start + _TAIL].lstrip().partition("\n")[0], start + 1
        contents.append(content)
    return ", ".join(dict.fromkeys(_BOX.sub("", content).strip() for content in contents)) or None


def _first_statement(text: str) -> str | None:
    """The first line of `text` that says something, up to the end of its sentence. A formula may have several lines."""
    rest = text
    while rest := re.sub(r"^[\s*:=_]+", "", rest):
        for opening, closing in (("$$", "$$"), ("\\[", "\\]"), ("\\begin{", "\\end{")):
            if rest.startswith(opening) and (end := rest.find(closing, len(opening))) > 0:
                return rest[:end] + rest[end:].partition("\n")[0]
        line, _, rest = rest.partition("\n")
        if rest and line.rstrip().endswith((":", " is")) and not re.search(r"\d", line):
            continue  # the answer stands on the next line
        for clause in _END.finditer(line):
            statement = line[: clause.start()]
            if re.search(r"[\d$]", statement) and statement.count("$") % 2 == 0:
                return statement
        return line
    return None
