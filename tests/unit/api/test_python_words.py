"""Messages of the library name its arguments, where those of the command line name options."""

from __future__ import annotations

import re

import pytest

from octetrl.api.python_words import in_python, python_words
from octetrl.system.errors import RunFailed, UserError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("continue it with --resume, or give", "continue it with resume=True, or give"),
        ("--resume: 'runs/a' holds no run; leave --resume out", "resume: 'runs/a' holds no run; leave resume=True out"),
        ("--to: cannot write in 'x'", "to: cannot write in 'x'"),
        ("give --allow trainer.optimizer.lr=1e-6 --allow seed=3", "give allow=['trainer.optimizer.lr', 'seed']"),
        ("--allow algorithm.kl_coefficient: the run has", "allow algorithm.kl_coefficient: the run has"),
        ("or with --from runs/a@20, with which", "or with model='runs/a@20', with which"),
        ("in a recipe, else --device cpu)", "in a recipe, else device='cpu')"),
        ("export it without --adapter", "export it without adapter=True"),
        ("`octetrl train R --resume`; --fp8: none", "`octetrl train R --resume`; fp8: none"),
        ("hf download a/b --local-dir models/b", "hf download a/b --local-dir models/b"),
    ],
)
def test_options_become_arguments(text: str, said: str) -> None:
    assert in_python(text) == said


@pytest.mark.parametrize("kind", [UserError, RunFailed])
def test_the_error_stays_the_same(kind: type[Exception]) -> None:
    given = kind("the disk is full; then --resume")
    with pytest.raises(kind, match=re.escape("the disk is full; then resume=True")) as caught, python_words():
        raise given
    assert caught.value is given
