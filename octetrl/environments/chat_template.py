"""Errors of a tokenizer's chat template: a jinja program that comes with the model and may fail in many ways."""

from __future__ import annotations

from jinja2 import TemplateError

from octetrl.system.errors import UserError

TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,  # of the Python code that jinja generates
    TypeError,
    ValueError,
)


def template_fails(error: BaseException) -> UserError:
    reason = " ".join(str(error).split())[:120] or "no reason given"
    return UserError(
        f"tokenizer: its chat template fails ({type(error).__name__}: {reason}); correct chat_template in its"
        f" tokenizer_config.json or chat_template.jinja"
    )
