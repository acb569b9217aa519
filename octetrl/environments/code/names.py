"""Which names of the tests belong to the code. Known before a run, so that `octetrl check` refuses the other ones.

A name that the tests bind anywhere is never the code's, and neither is a builtin or a module of the standard library.
Of the names that are left, the code's are

1. what the row names: `function` (or `entry_point`), an import `from solution import add`, and what its prompt, starter
   code or solution defines;
2. if it has no `function`: what the tests call, subclass-check or catch, unless it is a name that
   tests usually import (`isclose`, `Counter`, `approx`) and the code has another name too.

Any other name is bound nowhere. That is the fault of the task: the code could define such a name to its advantage.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import symtable
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octetrl.process.judge.remote import CHANGES, PLAIN_NAMES
from octetrl.process.judge.wire import NODE_FIELDS

SOLUTION = "solution"
"""The module of the code, for tests that import from it."""
_TEXTS_OF_CODE = ("solution", "canonical_solution", "reference_solution", "starter_code", "code")
_IMPORTED = ("math", "collections", "itertools", "functools", "statistics", "heapq", "copy", "typing", "unittest")
_MODULES = [importlib.import_module(name) for name in _IMPORTED]
_HELPERS = {name for module in _MODULES for name in getattr(module, "__all__", dir(module))}
_HELPERS |= {"approx", "raises", "pytest", "np", "pd", "numpy", "pandas", "assert_allclose", "assert_array_equal"}
_NOT_EVIDENCE = PLAIN_NAMES - CHANGES
_DEFINITION = re.compile(r"\b(def|class)\s+(?:named\s+|called\s+)?[`'\"*]*([A-Za-z_]\w*)")
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*) *=(?!=)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CodeNames:
    """names: the tests take them from the code; classes: those that the tests call to build objects; exceptions: those
    that they catch; unbound: names that the tests bind nowhere; imports: packages that the tests must have."""

    names: frozenset[str]
    classes: frozenset[str] = frozenset()
    exceptions: frozenset[str] = frozenset()
    unbound: frozenset[str] = frozenset()
    imports: frozenset[str] = frozenset()


NO_NAMES = CodeNames(frozenset())


def names_of_code(tests: Sequence[str], function: str | None, row: Mapping[str, Any], prompt: str) -> CodeNames:
    """tests: valid Python, of one row, none if they are calls; function: an expression that they call; row: its other
    fields."""
    trees = [ast.parse(text) for text in (*tests, function or "")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read, bound = _globals(tests)
    imported = {name for node in nodes for name in _of_solution(node)}
    named = set(re.findall(r"^\w+", function or ""))
    codes = [text for key in _TEXTS_OF_CODE if isinstance(text := row.get(key), str)]
    defined = {name: word for text in (prompt, *codes) for word, name in _DEFINITION.findall(text)}
    defined |= {name: "value" for text in codes for name in _ASSIGNMENT.findall(text)}

    functions = _names(node.func for node in nodes if isinstance(node, ast.Call))
    modules = set(sys.stdlib_module_names) - functions - named
    free = read - (bound - _rewrapped(node for tree in trees for node in tree.body)) - modules - NODE_FIELDS.keys()
    free = {name for name in free if not name.startswith("__") and (name in named or not hasattr(builtins, name))}
    exceptions = free & {name for node in nodes for name in _caught(node)}
    ours = free & (named | defined.keys())
    if not named:
        ours |= _called(nodes, free, is_sure=bool(ours or imported)) | exceptions
    is_called = not tests or any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes)
    wanted = ours | imported | (named if is_called else set()) | exceptions & defined.keys()
    classes = {name for name in wanted if _is_class(name, defined, nodes)}
    return CodeNames(
        names=frozenset(wanted),
        classes=frozenset(classes),
        exceptions=frozenset(exceptions & wanted),
        unbound=frozenset(free - wanted),
        imports=frozenset(_imports(tests)) - {SOLUTION} - set(sys.stdlib_module_names),
    )


def _globals(texts: Iterable[str]) -> tuple[set[str], set[str]]:
    """The global names that the texts read, and those that they bind, in whatever scope."""
    read: set[str] = set()
    bound: set[str] = set()

    def look(table: symtable.SymbolTable, *, is_top: bool) -> None:
        for symbol in table.get_symbols():
            if is_top or symbol.is_global():
                read.update([symbol.get_name()] if symbol.is_referenced() else ())
                is_bound = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
                bound.update([symbol.get_name()] if is_bound else ())
        for inner in table.get_children():
            look(inner, is_top=False)

    for text in texts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            look(symtable.symtable(text, "test", "exec"), is_top=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in _IMPORTED:
                bound.update(dir(importlib.import_module(node.module)))
    return read, bound


def _of_solution(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module == SOLUTION:
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == SOLUTION:
        yield node.attr


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _rewrapped(statements: Iterable[ast.stmt]) -> set[str]:
    """Global names that tests bind to a wrapped form of themselves, as in `fib = lru_cache(fib)`."""
    found: set[str] = set()
    for node in statements:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            found |= _names(node.targets) & _names(node.value.args)
    return found


def _caught(node: ast.AST) -> set[str]:
    kinds: list[ast.expr] = []
    if isinstance(node, ast.ExceptHandler) and node.type is not None:
        kinds = [node.type]
    elif isinstance(node, ast.Call) and "raises" in str(getattr(node.func, "attr", _names([node.func]))).lower():
        kinds = node.args[:1]
    return {name for kind in kinds for name in _names(kind.elts if isinstance(kind, ast.Tuple) else [kind])}


def _called(nodes: list[ast.AST], free: set[str], *, is_sure: bool) -> set[str]:
    """Of the free names: what tests call or read attributes of like of a class, without names of the usual imports,
    unless nothing else can be meant. is_sure: whether other names are the code's for sure."""
    called: set[str] = set()
    passed: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            function = _names([node.func])
            arguments = _names([*node.args, *(word.value for word in node.keywords)])
            is_builtin = any(hasattr(builtins, name) for name in function)  # map(double, xs), isinstance(x, Point)
            called |= function | (arguments if is_builtin else set())
            passed |= arguments
        elif isinstance(node, ast.Attribute | ast.Subscript):
            called |= {name for name in _names([node.value]) if _is_capitalised(name)}
    found = called & free
    if not found and not is_sure:
        found = passed & free  # check(add)
    return found if len(found) == 1 and not is_sure else found - _HELPERS


def _is_class(name: str, defined: Mapping[str, str], nodes: list[ast.AST]) -> bool:
    """Whether the tests build objects by this name. A function may have such a name too (`Extract`), so this needs an
    attribute that no plain data has, a call without arguments, or the row's word."""
    if not _is_capitalised(name) or name in defined:
        return _is_capitalised(name) and defined[name] == "class"
    calls = [node for node in nodes if isinstance(node, ast.Call) and name in _names([node.func])]
    assigned = [node.targets for node in nodes if isinstance(node, ast.Assign) and node.value in calls]
    holders = {name, *_names(target for targets in assigned for target in targets)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in _NOT_EVIDENCE:
            if node.value in calls or holders & _names([node.value]):
                return True
        elif (isinstance(node, ast.Subscript) and name in _names([node.value])) or (
            isinstance(node, ast.Call) and "isinstance" in _names([node.func]) and name in _names(node.args[1:])
        ):
            return True
    return any(not node.args and not node.keywords for node in calls)


def _is_capitalised(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _imports(texts: Iterable[str]) -> Iterator[str]:
    """The packages that the texts import outside `try`."""
    for text in texts:
        waiting: list[ast.AST] = [ast.parse(text)]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]
            elif not isinstance(node, ast.Try):
                waiting += ast.iter_child_nodes(node)
