"""Whether two answers of mathematics are equal, and one text for equal answers.

Both exact (integers, fractions, surds, symbols): equal. Rational numbers are compared as fractions, other constants
to 120 digits, and expressions in variables by their values at fixed points, to 60 digits. If a side has a decimal: the
relative difference is at most the tolerance, so 6.63e-34 is not 5e-30, and only 0 equals 0.

Nothing calls sympy's `simplify` or `doit`: their time has no bound that a policy could not reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from octetrl.environments.math_values import Based, Expression, Number, Value, Words

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
        case (Based(digits=digits), Number(exact=True, name="", percent=False) as number) | (
            Number(exact=True, name="", percent=False) as number,
            Based(digits=digits),
        ):
            return str(number.value) == digits  # the question names the base
        case Words(), Words():
            return reference.words == answer.words
    left, right = _tree(reference), _tree(answer)
    if left is None or right is None:
        return False
    is_list = any(isinstance(value, Expression) and value.is_list for value in (reference, answer))
    return _equal_trees(left, right, tolerance, is_list)


def vote(value: Value) -> str:
    """A text that equal values have in common: a fraction, digits, words, or the expression as sympy prints it."""
    match value:
        case Number():
            return str(value.value)
        case Based():
            return f"{value.digits}_{value.base}"
        case Words():
            return value.words
    return _text(_unnamed(value.tree)[1])


def _equal_numbers(reference: Number, answer: Number, tolerance: Fraction) -> bool:
    if reference.name and answer.name and reference.name != answer.name:
        return False
    if reference.unit and answer.unit and reference.unit != answer.unit:
        return False
    tolerance = Fraction(0) if reference.exact and answer.exact else tolerance
    scales = {Fraction(1)}
    if reference.percent != answer.percent:  # 50% is 0.5, and 50 where the question asks for percent
        scales.add(Fraction(1, 100) if answer.percent else Fraction(100))
    return any(
        abs(answer.value * scale - reference.value) <= tolerance * max(abs(reference.value), abs(answer.value * scale))
        for scale in scales
    )


def _tree(value: Value) -> Any:
    import sympy

    match value:
        case Number(percent=False, name=name):
            number = sympy.Rational(value.value.numerator, value.value.denominator)
            number = number if value.exact else sympy.Float(number, 40)
            return sympy.Eq(sympy.Symbol(name.lower(), real=True), number, evaluate=False) if name else number
        case Words(words=words) if words.isalpha() and words.isascii() and len(words) <= 8:  # abc = a * b * c
            return sympy.Mul(*map(_symbol, words))
        case Words(words=words) if re.fullmatch(r"[a-j](?: [a-j])+", words):  # options
            return sympy.FiniteSet(*map(_symbol, words.split()))
        case Expression():
            return value.tree
    return None


def _symbol(letter: str) -> Any:
    """A letter as math-verify reads it."""
    import sympy

    return sympy.E if letter == "e" else sympy.Symbol(letter, real=True)


def _unnamed(tree: Any) -> tuple[str, Any]:
    """x and 5, of x = 5. The name is empty if the left side is no variable."""
    import sympy

    if isinstance(tree, sympy.Eq) and not tree.free_symbols:  # 12 = 3 * 4
        return "", tree.rhs
    if isinstance(tree, sympy.Eq) and (tree.lhs.is_Symbol or isinstance(tree.lhs, sympy.core.function.AppliedUndef)):
        return str(tree.lhs), tree.rhs
    parts = getattr(tree, "_unsorted_args", None)
    if parts and isinstance(tree, sympy.And) and isinstance(parts[-1], sympy.Eq) and parts[0].lhs.is_Symbol:
        return str(parts[0].lhs), parts[-1].rhs  # x = 2 + 3 = 5
    if parts and not isinstance(tree, sympy.And):
        named = [_unnamed(part) for part in parts]
        if len({name for name, _ in named}) == 1 and named[0][0]:  # x = 1 or x = 2
            return named[0][0], type(tree)(*(value for _, value in named))
    return "", tree


def _equal_trees(left: Any, right: Any, tolerance: Fraction, is_list: bool = False) -> bool:
    import sympy

    (left_name, left_value), (right_name, right_value) = _unnamed(left), _unnamed(right)
    if left_name == right_name or not (isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq)):
        if left_name and right_name and left_name != right_name:
            return False
        left, right = left_value, right_value
    relations = [isinstance(side, sympy.And | sympy.core.relational.Relational) for side in (left, right)]
    if all(relations):
        return _equal_relations(left, right, tolerance)
    if any(relations):
        sets = [_solutions(side) if related else side for side, related in zip((left, right), relations, strict=True)]
        return all(isinstance(side, sympy.Set) for side in sets) and _equal_trees(sets[0], sets[1], tolerance)
    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
        return left.shape == right.shape and _all_equal(left.flat(), right.flat(), tolerance)
    kinds = (sympy.Set, sympy.Tuple)
    if isinstance(left, kinds) or isinstance(right, kinds):
        return _equal_collections(left, right, tolerance, is_list)
    if isinstance(left, sympy.MatrixBase) or isinstance(right, sympy.MatrixBase):
        return False
    return _equal_expressions(left, right, tolerance)


def _all_equal(left: Sequence[Any], right: Sequence[Any], tolerance: Fraction) -> bool:
    return len(left) == len(right) and all(
        _equal_trees(one, other, tolerance) for one, other in zip(left, right, strict=True)
    )


def _equal_collections(left: Any, right: Any, tolerance: Fraction, is_list: bool) -> bool:
    """Sets in any order, tuples and intervals in theirs. A list without brackets is what the other side is."""
    import sympy

    if isinstance(left, sympy.Interval) and isinstance(right, sympy.Interval):
        same_ends = (left.left_open, left.right_open) == (right.left_open, right.right_open)
        return same_ends and _all_equal([left.start, left.end], [right.start, right.end], tolerance)
    if isinstance(left, sympy.FiniteSet) and isinstance(right, sympy.FiniteSet):
        return _equal_sets(_unique(left.args, tolerance), _unique(right.args, tolerance), tolerance)
    if isinstance(left, sympy.Union) and isinstance(right, sympy.Union):
        return _equal_sets(list(left.args), list(right.args), tolerance)
    one, other = _in_order(left, is_list), _in_order(right, is_list)
    if one is not None and other is not None:
        return _all_equal(one, other, tolerance)
    if isinstance(left, sympy.Set) and isinstance(right, sympy.Set):
        return bool(left == right or left.symmetric_difference(right).is_empty)
    for one, other in ((left, right), (right, left)):
        if isinstance(one, sympy.FiniteSet) and not isinstance(other, sympy.Set | sympy.Tuple):
            parts = _unique(one.args, tolerance)
            return len(parts) == 1 and _equal_trees(parts[0], other, tolerance)
    return bool(left == right)


def _in_order(side: Any, is_list: bool) -> list[Any] | None:
    """The parts of a tuple, of a point, which reads like an open interval, or of a list without brackets."""
    import sympy

    if isinstance(side, sympy.Interval) and side.left_open and side.right_open:
        return [side.start, side.end]
    if isinstance(side, sympy.Tuple):
        return list(side.args)
    return list(getattr(side, "_unsorted_args", side.args)) if is_list and isinstance(side, sympy.FiniteSet) else None


def _unique(parts: Iterable[Any], tolerance: Fraction) -> list[Any]:
    unique: list[Any] = []
    for part in parts:
        if not any(_equal_trees(part, other, tolerance) for other in unique):
            unique.append(part)
    return unique


def _equal_sets(left: list[Any], right: list[Any], tolerance: Fraction) -> bool:
    return len(left) == len(right) and all(any(_equal_trees(one, other, tolerance) for other in right) for one in left)


def _equal_relations(left: Any, right: Any, tolerance: Fraction) -> bool:
    sides = [
        list(getattr(side, "_unsorted_args", side.args)) if side.is_Boolean and not side.is_Relational else [side]
        for side in (left, right)
    ]
    if len(sides[0]) != len(sides[1]):
        return False
    return all(any(_same_relation(one, other, tolerance) for other in sides[1]) for one in sides[0])


def _same_relation(left: Any, right: Any, tolerance: Fraction) -> bool:
    """Of the same kind, and left side - right side are equal up to a factor; in inequalities, a positive one."""
    import sympy

    related = sympy.core.relational
    if not isinstance(left, related.Relational) or not isinstance(right, related.Relational):
        return False
    less = related.LessThan | related.StrictLessThan
    left, right = (side.reversed if isinstance(side, less) else side for side in (left, right))
    if left.rel_op != right.rel_op:
        return False
    sides = (left.lhs, left.rhs, right.lhs, right.rhs)
    if _all_equal(sides[:2], sides[2:], tolerance):
        return True
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if not symbols or not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    minus = [sympy.Add(one.lhs, sympy.Mul(-1, one.rhs, evaluate=False), evaluate=False) for one in (left, right)]
    mine, theirs = (_values(difference, symbols) for difference in minus)
    if mine is None or theirs is None or 0 in mine or 0 in theirs:
        return False
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    is_exact = not left.atoms(sympy.Float) and not right.atoms(sympy.Float)
    same = all(_near(ratio, ratios[0], _limit(is_exact, tolerance)) for ratio in ratios)
    return same and (left.rel_op in ("==", "!=") or bool(sympy.re(ratios[0]) > 0))


def _solutions(relation: Any) -> Any:
    """The set that a relation in one variable describes; None if sympy finds none."""
    try:
        return relation.as_set()
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return None


def _equal_expressions(left: Any, right: Any, tolerance: Fraction) -> bool:
    import sympy

    if left == right:
        return not left.has(sympy.nan, sympy.zoo)
    is_exact = not left.atoms(sympy.Float) and not right.atoms(sympy.Float)
    if is_exact and left.is_Rational and right.is_Rational:
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    values = [_values(side, symbols) for side in (left, right)]
    if values[0] is None or values[1] is None:
        return False
    if is_exact and not symbols and (values[0] == [0]) != (values[1] == [0]):
        return _is_zero(right if values[0] == [0] else left)
    limit = _limit(is_exact, tolerance, _DIGITS if symbols else _CONSTANT_DIGITS)
    return all(_near(one, other, limit) for one, other in zip(*values, strict=True))


def _is_zero(tree: Any) -> bool:
    """Whether a constant such as sin(pi) vanishes: its value is then smaller, the more digits are computed."""
    coarse, fine = (abs(tree.evalf(digits, maxn=4 * digits)) for digits in (_DIGITS, 2 * _DIGITS))
    return bool(fine < 10**-_DIGITS and fine <= coarse * 10.0**-_DIGITS)


def _limit(is_exact: bool, tolerance: Fraction, digits: int = _DIGITS) -> Any:
    import sympy

    if is_exact:
        return sympy.Float(10, 20) ** (10 - digits)
    tolerance = max(tolerance, _SMALLEST_TOLERANCE)
    return sympy.Rational(tolerance.numerator, tolerance.denominator)


def _values(tree: Any, symbols: list[Any]) -> list[Any] | None:
    """The values of `tree` at fixed points; None if sympy can't evaluate it. Equal expressions agree at all points."""
    import sympy

    digits = _DIGITS if symbols else _CONSTANT_DIGITS
    imaginary = {symbol: sympy.I for symbol in symbols if symbol.name == "i"}
    values = []
    for point in (*_POINTS, _POSITIVE) if symbols else ((0.0, 0.0),):
        at = {symbol: sympy.Float(point[place % 2] + 0.0137 * place, digits) for place, symbol in enumerate(symbols)}
        value = tree.evalf(digits, subs=at | imaginary, maxn=4 * digits)
        if (
            not value.is_number
            or (value.has(sympy.nan, sympy.zoo, sympy.oo) and symbols)
            or (not value.is_comparable and not value.is_complex)
        ):
            return None
        values.append(value)
    return values


def _near(one: Any, other: Any, limit: Any) -> bool:
    if one == other:
        return True
    if one.is_infinite or other.is_infinite:
        return False
    return bool(abs(one - other) <= limit * max(abs(one), abs(other)))


def _text(tree: Any) -> str:
    import sympy

    if isinstance(tree, sympy.MatrixBase | sympy.Tuple | sympy.Set) and not isinstance(tree, sympy.Interval):
        parts = [
            _text(_unnamed(part)[1]) for part in (tree.flat() if isinstance(tree, sympy.MatrixBase) else tree.args)
        ]
        return f"{type(tree).__name__}({', '.join(sorted(set(parts)) if isinstance(tree, sympy.Set) else parts)})"
    if isinstance(tree, sympy.Interval):
        brackets = "(" if tree.left_open else "[", ")" if tree.right_open else "]"
        return f"{brackets[0]}{_text(tree.start)}, {_text(tree.end)}{brackets[1]}"
    if isinstance(tree, sympy.Expr) and not tree.free_symbols and (values := _values(tree, [])) is not None:
        (value,) = values
        if value.is_real and value.is_finite and -300 < sympy.log(abs(value) + sympy.Float("1e-300"), 10).n(5) < 300:
            exact = Fraction(str(value))
            near = exact.limit_denominator(10**6)
            if abs(near - exact) <= abs(exact) / 10**100:
                return str(near)
        return str(value.n(15))
    return str(sympy.expand(tree)) if isinstance(tree, sympy.Expr) else str(tree)
