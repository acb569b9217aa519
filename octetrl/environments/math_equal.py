"""Whether two answers of mathematics are equal, and one text for equal answers.

Numbers are compared as fractions: exactly if both are exact, else with a relative tolerance, so 6.63e-34 is not 5e-30,
and only 0 equals 0. What sympy has to compare is in `math_trees.py`, which is imported when it is needed.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from octetrl.environments.math_values import SCALES, Based, Expression, Named, Number, Value, Words


def equal(reference: Value, answer: Value, tolerance: Fraction) -> bool:
    """Whether `answer` is the value of `reference`. tolerance: relative, where a side is a decimal."""
    match reference, answer:
        case Number(), Number():
            return _equal_numbers(reference, answer, tolerance)
        case Based(), Based():
            return int(reference.digits, reference.base) == int(answer.digits, answer.base)
        case (Based(), Number()) | (Number(), Based()):
            return vote(reference).partition("_")[0] == vote(answer).partition("_")[0]  # the question names the base
        case Words(), Words():
            return reference.words == answer.words
        case Named(), Named() if reference.name == answer.name:
            return equal(reference.value, answer.value, tolerance)
    from octetrl.environments import math_trees

    left, right = _tree(reference), _tree(answer)
    if not (math_trees.is_equation(left) and math_trees.is_equation(right)):  # then x = 5 is 5
        if isinstance(reference, Named) or isinstance(answer, Named):
            return equal(_unnamed(reference), _unnamed(answer), tolerance)
        left, right = math_trees.last_side(left), math_trees.last_side(right)
    is_list = any(isinstance(value, Expression) and value.is_list for value in (reference, answer))
    return left is not None and right is not None and math_trees.equal_trees(left, right, tolerance, is_list)


def vote(value: Value) -> str:
    """A text that equal values have in common: a fraction, digits, words, or the expression as sympy prints it."""
    match value:
        case Named():
            return vote(value.value)
        case Number():
            return str(value.value)
        case Based():
            return f"{value.digits}_{value.base}"
        case Words():
            return value.words
    from octetrl.environments import math_trees

    return math_trees.text(math_trees.last_side(value.tree))


def _equal_numbers(reference: Number, answer: Number, tolerance: Fraction) -> bool:
    of_words = [SCALES.get(side.unit, 1) for side in (reference, answer)]
    if reference.unit and answer.unit and reference.unit != answer.unit and of_words == [1, 1]:
        return False
    if reference.exact and answer.exact:
        tolerance = Fraction(0)
    scales = [Fraction(1)]
    if reference.percent != answer.percent:  # 50% is 0.5, and 50 where the question asks for percent
        scales.append(Fraction(1, 100) if answer.percent else Fraction(100))
    if 1 not in of_words:
        scales = [Fraction(of_words[1], of_words[0])]
    elif of_words != [1, 1]:  # 2 million is 2000000, and 2 where the question asks for millions
        scales.append(Fraction(of_words[1], of_words[0]))
    values = [answer.value * scale for scale in scales]
    return any(abs(value - reference.value) <= tolerance * max(abs(value), abs(reference.value)) for value in values)


def _unnamed(value: Value) -> Value:
    return value.value if isinstance(value, Named) else value


def _tree(value: Value) -> Any:
    """The value as sympy's expression, set, matrix or relation; None if it has none."""
    from octetrl.environments import math_trees

    match value:
        case Number(percent=False):
            return math_trees.number(value.value, value.exact)
        case Words(words=words) if words.isalpha() and words.isascii() and len(words) <= 8:
            return math_trees.product(words)
        case Named():
            return math_trees.equation(value.name, _tree(value.value))
        case Expression():
            return value.tree
    return None
