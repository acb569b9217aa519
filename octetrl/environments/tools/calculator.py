"""A calculator for models: it walks the syntax tree of an expression, in bounded time and memory.

`sympy.parse_expr` is no substitute: it runs `__import__("os").system(...)` and computes `9**9**9` without a limit.

Anything that is not in the tables below is refused with an error that names it. Whole numbers are exact up to 1,024
bits (308 digits), and larger ones are refused. All other numbers are 64-bit floats, shown with 12 digits, so 0.1 + 0.2
is 0.3. `^` means a power, as models write it. × · ÷ − mean * * / -.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable

from octetrl.environments.tools.definition import ToolError, tool

Number = int | float
_BITS = 1024
_LENGTH = 1000
_DEPTH = 60
_TOO_LARGE = "a number is too large: at most 308 digits are allowed"
_SIGNS = str.maketrans({"^": "**", "×": "*", "·": "*", "÷": "/", "−": "-"})
_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}


@tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, pi, e, and functions such as sqrt(2), factorial(5),
            log(8, 2), sin(pi / 6) (radians), gcd(12, 18), comb(5, 2), round(2.345, 2).
    """
    return _shown(calculate(expression))


def calculate(expression: str) -> Number:
    """Return the value of `expression`. Raises ToolError, in one line, if it has none."""
    text = " ".join(expression.translate(_SIGNS).split())
    if not text:
        raise ToolError("there is nothing to compute; give an expression, such as 3 * (4 + 5)")
    if len(text) > _LENGTH:
        raise ToolError(f"the expression has {len(text)} characters, {_LENGTH} are allowed; compute it in parts")
    try:
        with warnings.catch_warnings(action="ignore"):  # the parser warns about expressions that are refused below
            tree = ast.parse(text, mode="eval")
        return _bounded(_value(tree.body, 0))
    except (SyntaxError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
        raise ToolError(f"'{text[:60]}' is not an arithmetic expression ({reason})") from None
    except ZeroDivisionError:
        raise ToolError(f"'{text[:60]}' divides by zero") from None
    except OverflowError:
        raise ToolError(_TOO_LARGE) from None
    except (ValueError, TypeError) as error:  # raised by the functions of math
        raise ToolError(f"'{text[:60]}' has no value ({error})") from None


def _value(node: ast.expr, depth: int) -> Number:
    if depth > _DEPTH:
        raise ToolError("the expression is nested too deeply; compute it in parts")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _bounded(_UNARY[type(node.op)](_value(node.operand, depth + 1)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in _FUNCTIONS:
            raise ToolError(f"there is no function '{node.func.id}'; the functions are {', '.join(_FUNCTIONS)}")
        return _bounded(_FUNCTIONS[node.func.id](*(_value(argument, depth + 1) for argument in node.args)))
    shown = ast.unparse(node)[:40]
    if isinstance(node, ast.Name):
        raise ToolError(f"'{shown}' is not a known name; the names are {', '.join((*_CONSTANTS, *_FUNCTIONS))}")
    raise ToolError(f"'{shown}' is not arithmetic; allowed are numbers, + - * / // % **, parentheses and functions")


def _bounded(value: object) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"the result is {value}, not a real number")
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise ToolError(_TOO_LARGE)
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError(_TOO_LARGE)
    return value


def _power(base: Number, exponent: Number) -> Number:
    """base ** exponent. A result that would be too large is refused before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int) and max(base.bit_length() - 1, 0) * exponent > _BITS:
        raise ToolError(_TOO_LARGE)
    power: Number = base**exponent
    return power


def _whole(number: Number, function: str, least: int, most: int) -> int:
    """The whole number that a function takes. The time of some functions grows with their arguments."""
    if number != int(number) or not least <= number <= most:
        raise ToolError(f"{function} takes whole numbers from {least} to {most}, not {_shown(number)}")
    return int(number)


def _rounded(number: Number, digits: Number = 0) -> Number:
    places = _whole(digits, "round to digits", -300, 300)
    return round(number, places) if places else round(number)


def _shown(value: Number) -> str:
    return str(value) if isinstance(value, int) else format(value, ".12g")


_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_MATH_FUNCTIONS = "sqrt floor ceil exp log log2 log10 sin cos tan asin acos atan degrees radians gcd lcm"
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{name: getattr(math, name) for name in _MATH_FUNCTIONS.split()},
    "abs": abs,
    "round": _rounded,
    "min": min,
    "max": max,
    "factorial": lambda number: math.factorial(_whole(number, "factorial", 0, 170)),
    "comb": lambda n, k: math.comb(_whole(n, "comb", 0, 1000), _whole(k, "comb", 0, 1000)),
    "perm": lambda n, k: math.perm(_whole(n, "perm", 0, 1000), _whole(k, "perm", 0, 1000)),
}
