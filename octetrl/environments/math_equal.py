"""Whether two answers of mathematics are equal, and one text for equal answers.

Numbers are compared as fractions: exactly if both are exact, else with a relative tolerance, so 6.63e-34 is not 5e-30,
and only 0 equals 0. sympy compares expressions, relations, sets, tuples and matrices: constants to 120 digits, and
expressions in variables by their values at fixed points, to 60 digits. If a side has a decimal, the relative difference
is at most the tolerance. Nothing calls sympy's `simplify` or `doit`: their time has no bound that a policy could not
reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import sympy
from sympy.core.relational import LessThan, Relational, StrictLessThan

from octetrl.environments.math_values import SCALES, Based, Expression, Named, Number, Value, Words

_DIGITS, _CONSTANT_DIGITS = 60, 120
_POINTS = ((0.7310585786, -1.2247448714), (2.6457513111, 1.7320508076), (-0.5772156649, 3.3166247904))
_POSITIVE = (1.3813600225, 0.4142135624)
_SMALLEST_TOLERANCE = Fraction(1, 10**13)  # for decimals inside of expressions, which sympy keeps in binary


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
    left, right = _tree(reference), _tree(answer)
    if not all(isinstance(tree, sympy.Eq) and tree.free_symbols for tree in (left, right)):  # then x = 5 is 5
        if isinstance(reference, Named) or isinstance(answer, Named):
            return equal(_unnamed(reference), _unnamed(answer), tolerance)
        left, right = _last_side(left), _last_side(right)
    is_list = any(isinstance(value, Expression) and value.is_list for value in (reference, answer))
    return left is not None and right is not None and _equal_trees(left, right, tolerance, is_list)


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
    return _text(_last_side(value.tree))


def _equal_numbers(reference: Number, answer: Number, tolerance: Fraction) -> bool:
    word_scales = [SCALES.get(side.unit, 1) for side in (reference, answer)]
    if reference.unit and answer.unit and reference.unit != answer.unit and word_scales == [1, 1]:
        return False
    if reference.exact and answer.exact:
        tolerance = Fraction(0)
    scales = [Fraction(1)]
    if reference.percent != answer.percent:  # 50% is 0.5, and 50 where the question asks for percent
        scales.append(Fraction(1, 100) if answer.percent else Fraction(100))
    if 1 not in word_scales:
        scales = [Fraction(word_scales[1], word_scales[0])]
    elif word_scales != [1, 1]:  # 2 million is 2000000, and 2 where the question asks for millions
        scales.append(Fraction(word_scales[1], word_scales[0]))
    values = [answer.value * scale for scale in scales]
    return any(abs(value - reference.value) <= tolerance * max(abs(value), abs(reference.value)) for value in values)


def _unnamed(value: Value) -> Value:
    return value.value if isinstance(value, Named) else value


def _tree(value: Value) -> Any:
    """The value as sympy's expression, set, matrix or relation; None if it has none."""
    match value:
        case Number(percent=False):
            rational = sympy.Rational(value.value.numerator, value.value.denominator)
            return rational if value.exact else sympy.Float(rational, 40)
        case Words(words=words) if words.isalpha() and words.isascii() and len(words) <= 8:  # abc is a * b * c
            return sympy.Mul(*(sympy.E if letter == "e" else sympy.Symbol(letter, real=True) for letter in words))
        case Named() if (tree := _tree(value.value)) is not None:
            symbol = sympy.Symbol(value.name.lstrip("\\").lower(), real=True)
            return sympy.Eq(symbol, tree, evaluate=False)
        case Expression():
            return value.tree
    return None


def _last_side(tree: Any) -> Any:
    """15, of 12 + 3 = 15; of anything else, itself."""
    return tree.rhs if isinstance(tree, sympy.Eq) and not tree.free_symbols else tree


def _equal_trees(left: Any, right: Any, tolerance: Fraction, is_list: bool = False) -> bool:
    """is_list: a set without brackets is among them, which is what the other side is."""
    if _is_relation(left) != _is_relation(right):
        left, right = (_solutions(side) if _is_relation(side) else side for side in (left, right))
        if not isinstance(left, sympy.Set) or not isinstance(right, sympy.Set):
            return False
    if isinstance(left, Relational) and isinstance(right, Relational):
        return _equal_relations(left, right, tolerance)
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        return _equal_expressions(left, right, tolerance)
    (brackets, parts), (other_brackets, other_parts) = _parts(left), _parts(right)
    if brackets == other_brackets not in ("{}", "") or (is_list and {brackets, other_brackets} == {"{}", "()"}):
        return _all_equal(parts, other_parts, tolerance)
    if {brackets, other_brackets} in ({"{}"}, {"{}", ""}) and _same_sets(parts, other_parts, tolerance):
        return True  # also 5 and {5}
    are_sets = isinstance(left, sympy.Set) and isinstance(right, sympy.Set)
    return bool(left == right or (are_sets and left.symmetric_difference(right).is_empty))


def _is_relation(tree: Any) -> bool:
    return isinstance(tree, sympy.And | Relational)


def _solutions(relation: Any) -> Any:
    """The set that a relation in one variable describes; None if sympy finds none."""
    try:
        return relation.as_set()
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return None


def _parts(tree: Any) -> tuple[str, list[Any]]:
    """The brackets of a collection and its parts; of anything else, "" and itself.

    {} are sets, whose order does not matter. A point (1, 2) and an open interval look the same, and are."""
    if isinstance(tree, sympy.MatrixBase):
        return f"matrix {tree.shape}", list(tree.flat())
    if isinstance(tree, sympy.Interval):
        return "[("[bool(tree.left_open)] + "])"[bool(tree.right_open)], [tree.start, tree.end]
    if isinstance(tree, sympy.Tuple):
        return "()", list(tree.args)
    if isinstance(tree, sympy.FiniteSet | sympy.Union | sympy.And):
        return "{}", list(getattr(tree, "_unsorted_args", tree.args))
    return "", [tree]


def _all_equal(left: Sequence[Any], right: Sequence[Any], tolerance: Fraction) -> bool:
    return len(left) == len(right) and all(
        _equal_trees(one, other, tolerance) for one, other in zip(left, right, strict=True)
    )


def _same_sets(left: Sequence[Any], right: Sequence[Any], tolerance: Fraction) -> bool:
    return all(
        any(_equal_trees(one, other, tolerance) for other in others)
        for ones, others in ((left, right), (right, left))
        for one in ones
    )


def _equal_relations(left: Any, right: Any, tolerance: Fraction) -> bool:
    """Whether they are of the same kind, and their left side - right side are equal up to a factor, which is positive
    in inequalities."""
    left, right = (side.reversed if isinstance(side, LessThan | StrictLessThan) else side for side in (left, right))
    if left.rel_op != right.rel_op:
        return False
    sides = (left.lhs, left.rhs, right.lhs, right.rhs)
    if _all_equal(sides[:2], sides[2:], tolerance):
        return True
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    minus = [sympy.Add(one.lhs, sympy.Mul(-1, one.rhs, evaluate=False), evaluate=False) for one in (left, right)]
    mine, theirs = _values(*minus)
    if not mine or not theirs or 0 in mine or 0 in theirs:
        return False
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    limit = _limit(_is_exact(*minus), tolerance, _DIGITS)
    same = all(_near(ratio, ratios[0], limit) for ratio in ratios)
    return same and (left.rel_op in ("==", "!=") or bool(sympy.re(ratios[0]) > 0))


def _equal_expressions(left: Any, right: Any, tolerance: Fraction) -> bool:
    if left == right:
        return not left.has(sympy.nan, sympy.zoo)
    is_exact = _is_exact(left, right)
    if is_exact and left.is_Rational and right.is_Rational:
        return False
    values, others = _values(left, right)
    if not values or not others:
        return False
    if is_exact and len(values) == 1 and (values == [0]) != (others == [0]):
        return _is_zero(right if values == [0] else left)
    limit = _limit(is_exact, tolerance, _DIGITS if len(values) > 1 else _CONSTANT_DIGITS)
    return all(_near(one, other, limit) for one, other in zip(values, others, strict=True))


def _is_exact(left: Any, right: Any) -> bool:
    return not left.atoms(sympy.Float) and not right.atoms(sympy.Float)


def _is_zero(tree: Any) -> bool:
    """Whether a constant such as sin(pi) vanishes: its value is then smaller, the more digits are computed."""
    coarse, fine = (abs(tree.evalf(digits, maxn=4 * digits)) for digits in (_DIGITS, 2 * _DIGITS))
    return bool(fine < 10**-_DIGITS and fine <= coarse * 10.0**-_DIGITS)


def _values(*trees: Any) -> list[list[Any]]:
    """The values of each tree: one of a constant, else several, at fixed points. Equal expressions agree at all points.
    Empty if sympy can't evaluate the tree."""
    symbols = sorted({symbol for tree in trees for symbol in tree.free_symbols}, key=str)
    digits = _DIGITS if symbols else _CONSTANT_DIGITS
    points = [
        {symbol: sympy.Float(point[place % 2] + 0.0137 * place, digits) for place, symbol in enumerate(symbols)}
        | {symbol: sympy.I for symbol in symbols if symbol.name == "i"}
        for point in ((*_POINTS, _POSITIVE) if symbols else _POINTS[:1])
    ]
    found = [[tree.evalf(digits, subs=point, maxn=4 * digits) for point in points] for tree in trees]
    return [values if all(_is_value(value, bool(symbols)) for value in values) else [] for values in found]


def _is_value(value: Any, finite: bool) -> bool:
    if not value.is_number or (finite and value.has(sympy.nan, sympy.zoo, sympy.oo)):
        return False
    return bool(value.is_comparable or value.is_complex)


def _limit(is_exact: bool, tolerance: Fraction, digits: int) -> Any:
    if is_exact:
        return sympy.Float(10, 20) ** (10 - digits)
    tolerance = max(tolerance, _SMALLEST_TOLERANCE)
    return sympy.Rational(tolerance.numerator, tolerance.denominator)


def _near(one: Any, other: Any, limit: Any) -> bool:
    if one == other:
        return True
    if one.is_infinite or other.is_infinite:
        return False
    return bool(abs(one - other) <= limit * max(abs(one), abs(other)))


def _text(tree: Any) -> str:
    """The same text for equal trees: decimals and roots of 15 digits, fractions where the value is one."""
    brackets, parts = _parts(tree)
    if brackets:
        texts = [_text(part) for part in parts]
        return f"{brackets} {', '.join(sorted(set(texts)) if brackets == '{}' else texts)}"
    if not isinstance(tree, sympy.Expr):
        return str(tree)
    if tree.free_symbols:
        return str(sympy.expand(tree))
    (values,) = _values(tree)
    if not values:
        return str(tree)
    (value,) = values
    if value.is_real and value.is_finite and -300 < sympy.log(abs(value) + sympy.Float("1e-300"), 10).n(5) < 300:
        exact = Fraction(str(value))
        near = exact.limit_denominator(10**6)
        if abs(near - exact) <= abs(exact) / 10**100:
            return str(near)
    return str(value.n(15))
