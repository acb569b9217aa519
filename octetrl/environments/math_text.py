"""Finds the final answer in a completion of a mathematics task, as a short text.

    the last \\boxed{...}                       also nested, or not closed at the end
    the line after `environment.answer_marker`   if the recipe has one and there is no box after it
    the text after "the answer is"              in several languages
    the last formula or number                  if there is nothing else

Boxes that only a comma, "and" or "or" separates are one list. Every search takes time linear in the text, so a
policy can't slow the scorer down by a long answer.
"""

from __future__ import annotations

import re
import unicodedata

from octetrl.environments.answers import extract_answer

_TAIL = 4000  # characters at the end that are searched if there is neither box nor marker
_BRACES = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<brace>\{?)|\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(r"[\s$.]*(?:[,;&]|\\q?quad|\band\b|\bor\b|\\text\{\s*(?:and|or)\s*\})[\s$,;]*(?:and|or)?[\s$]*")
_NAMED = re.compile(r"[A-Za-z](?:_\{?\w\}?)?\s*=\s*$")
_FORMULA = r"\$\$[^$]+\$\$|(?<!\\)\$(?:\\.|[^$\\\n])+\$|\\\((?:(?!\\\)).){1,400}\\\)|\\\[(?:(?!\\\]).){1,400}\\\]"
_NUMBER = r"(?<![\w.])[-−+]?(?:[$€£¥]\s?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?"
_FRACTION = r"[-−]?\\[dtc]?frac\{[^{}]*\}\{[^{}]*\}"
_FOUND = re.compile(rf"{_FORMULA}|{_FRACTION}|{_NUMBER}", re.DOTALL)
_PHRASE = re.compile(
    r"\b(?:answer|result)(?:\s+(?:is|equals|would be)\b|\**\s*[:=]|\**\s*\n)"
    r"|答案\s*(?:是|为|為|:)|答え\s*(?:は|:)|답\s*(?:은|:)|ответ\b\s*(?::|-|—|равен)|\bantwort\s*(?:ist|lautet|:)"
    r"|\b(?:respuesta|réponse|risposta|resposta)(?:\s+final[ea]?)?\s*(?:es\b|est\b|è|é|:)|đáp án\s*(?:là|:)",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[!?](?=\s|$)|\.(?=\s|$)|;\s")
_CLAUSE = re.compile(r",\s+(?!and\b|or\b)(?=[^\W\d_]{2,})")
_CHARACTERS = str.maketrans(
    {
        "。": ".",
        "、": ",",
        "−": "-",
        "–": "-",
        "\u2061": "",
        "\u200b": "",
        "\ufeff": "",
        "²": "^2",
        "³": "^3",
        "½": " 1/2",
    }
    | {"¼": " 1/4", "¾": " 3/4", "π": "\\pi ", "×": "\\times ", "·": "\\cdot ", "÷": "/", "≤": "\\le ", "≥": "\\ge "}
    | {"≠": "\\ne ", "∞": "\\infty ", "∪": "\\cup ", "∈": "\\in ", "±": "\\pm ", "≈": "\\approx ", "√": "\\sqrt "}
)


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
    phrases = list(_PHRASE.finditer(tail))
    if phrases and (stated := _first_statement(tail[phrases[-1].end() :])):
        return stated
    if len(tail.split()) == 1 or not re.search(r"[^\W\d_]{2}", re.sub(r"\\[A-Za-z]+|\$", "", tail)):
        return tail  # nothing but an answer
    matches = [match[0] for match in _FOUND.finditer(tail)]
    return matches[-1] if matches else tail if len(tail) <= 100 else None


def plain_characters(text: str) -> str:
    """`text` with the ASCII forms of wide characters and other scripts' digits, and LaTeX for symbols."""
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
    return re.sub(r"(?![0-9])\d", lambda match: str(unicodedata.digit(match[0])), text)


def last_box(text: str) -> str | None:
    """The content of the last box, or of several that form a list; None without a box. Of nested boxes, the outer one.
    A box that is not closed ends with its line."""
    closed: list[tuple[int, int, str]] = []  # start and end of each box, and its content
    opened: list[tuple[int, int] | None] = []  # of each open brace: start and content's start, None if it is no box
    for match in _BRACES.finditer(text):
        if match["brace"] == "{":
            opened.append((match.start(), match.end()))
        elif match["brace"] == "":  # \\boxed 7
            word = text[match.end() : match.end() + 40].split(maxsplit=1)[:1]
            closed += [(match.start(), match.end() + len(one), one.rstrip(".,$")) for one in word]
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened and (start := opened.pop()) is not None:
            while closed and closed[-1][0] > start[0]:
                closed.pop()
            closed.append((start[0], match.end(), text[start[1] : match.start()]))
    unclosed = [box for box in opened if box is not None and (not closed or box[0] >= closed[-1][1])]
    if unclosed:
        rest = text[unclosed[0][1] :].strip().partition("\n")[0]
        return re.sub(r"[\s.$]+$|\\[\])]\s*$", "", rest) or None
    if not closed:
        return None
    parts = [closed[-1]]
    for box in reversed(closed[:-1]):
        between = _NAMED.sub("", text[box[1] : parts[0][0]][-60:])
        if len(text[box[1] : parts[0][0]]) > 60 or not _BETWEEN.fullmatch(between):
            break
        parts.insert(0, box)
    contents = list(dict.fromkeys(re.sub(r"\\(?:boxed|fbox)(?![A-Za-z])\s*", "", box[2]).strip() for box in parts))
    return ", ".join(contents) or None


def _first_statement(text: str) -> str | None:
    """The first line of `text` that says something, up to the end of its sentence. A formula may have several lines."""
    text = re.sub(r"^[\s*:=_]+", "", text)
    for opening, closing in (("$$", "$$"), ("\\[", "\\]"), ("\\begin{", "\\end{")):
        if text.startswith(opening) and (end := text.find(closing, len(opening))) > 0:
            return text[: text.find("\n", end)] if "\n" in text[end:] else text
    line = text.partition("\n")[0].strip()
    if line.endswith((":", " is")) and "\n" in text and not re.search(r"\d", line):
        return _first_statement(text.partition("\n")[2])
    for ends in (_SENTENCE, _CLAUSE):
        for match in ends.finditer(line):
            said = line[: match.start()]
            if (re.search(r"\d|\$", said) and said.count("$") % 2 == 0) or (
                ends is _SENTENCE and match.end() == len(line)
            ):
                line = said
                break
    return line.strip() or None
