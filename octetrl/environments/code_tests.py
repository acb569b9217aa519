"""The tests of a task, in one of three forms, and the code of a completion.

A row of the file is {"prompt": ..., "tests": [...]}, where each test is

    "assert add(1, 2) == 3"                        statements, as many as a text holds; they may import and define
    {"args": [1, 2], "expected": 3}                a call of the row's "function": an expression such as "add" or
                                                   "Solution().add"; "kwargs" if wanted
    {"stdin": "1 2\\n", "stdout": "3\\n"}            a whole program

all of one form in a row. Asserts of a function that is named like a builtin need "function" too. "entry_point" is
another word for "function". Expected values are compared as JSON has them: a tuple is a list, floats are equal to nine
digits. Expected output is compared line by line, without white space at the ends of lines and of the text.

Which names of the tests belong to the code is known before a run, so that `octetrl check` refuses other names. A name
that the tests bind anywhere is never the code's, and neither is a builtin or a module of the standard library. Of the
names that are left, the code's are

1. what the row names: `function`, an import `from solution import add`, and what its prompt, starter code or solution
   defines;
2. if it has no `function`: what the tests call, subclass-check or catch, unless it is a name that tests usually import
   (`isclose`, `Counter`, `approx`) and the code has another name too.

Any other name is bound nowhere. That is a fault of the task: the code could define such a name to its advantage.
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
from typing import Any, Literal

from octetrl.process.judge.judging import never_run
from octetrl.process.judge.link import CHANGES, PLAIN_NAMES
from octetrl.process.judge.wire import NODE_FIELDS
from octetrl.records import Task
from octetrl.system.errors import UserError

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
    imported = {name for node in nodes for name in _solution_names(node)}
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
        with warnings.catch_warnings(action="ignore"):
            look(symtable.symtable(text, "test", "exec"), is_top=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in _IMPORTED:
                bound.update(dir(importlib.import_module(node.module)))
    return read, bound


def _solution_names(node: ast.AST) -> Iterator[str]:
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
    """The free names that tests call or read attributes of like of a class, without names of the usual imports,
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
    ours = called & free
    if not ours and not is_sure:
        ours = passed & free  # check(add)
    return ours if len(ours) == 1 and not is_sure else ours - _HELPERS


def _is_class(name: str, defined: Mapping[str, str], nodes: list[ast.AST]) -> bool:
    """Whether the tests build objects by this name. A function may have such a name too (`Extract`), so this needs an
    attribute that no plain data has, a call without arguments, or the row's word."""
    if not _is_capitalised(name) or name in defined:
        return _is_capitalised(name) and defined[name] == "class"
    calls = [node for node in nodes if isinstance(node, ast.Call) and name in _names([node.func])]
    assigned = [node.targets for node in nodes if isinstance(node, ast.Assign) and node.value in calls]
    holders = {name, *_names(target for targets in assigned for target in targets)}
    for node in nodes:
        match node:
            case ast.Attribute() if node.attr not in _NOT_EVIDENCE and (
                node.value in calls or holders & _names([node.value])
            ):
                return True
            case ast.Subscript() if name in _names([node.value]):
                return True
            case ast.Call() if "isinstance" in _names([node.func]) and name in _names(node.args[1:]):
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


Form = Literal["asserts", "calls", "programs"]
_KEYS: dict[Form, tuple[set[str], set[str]]] = {  # required and allowed keys
    "calls": ({"args", "expected"}, {"args", "kwargs", "expected"}),
    "programs": ({"stdin", "stdout"}, {"stdin", "stdout"}),
}
_BLANKS = " \t\r"
_OPENED = re.compile(r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*(?P<fence>`{3,}|~{3,})")  # in a list too
_THOUGHT_ENDS = re.compile(r"^[ \t]*</think>|</think>[ \t\r]*(?=$|```)", re.MULTILINE)
_LONGEST_ECHO = 60  # letters of a test or a name, in a message


@dataclass(frozen=True, slots=True)
class TaskTests:
    form: Form
    cases: tuple[Any, ...]
    function: str | None = None  # the function to call; for asserts: a name of the code that is also a builtin's
    names: CodeNames = NO_NAMES  # which names of the tests are the code's


def last_python_block(completion_text: str) -> str | None:
    """The code in the last closed ```python block after the thought, or None. If no block is closed, the last one ends
    with the text. In a list the code loses the indentation of its block."""
    answer = _after_thought(completion_text)
    closed: list[str] | None = None
    block: list[str] | None = None  # the lines of the one that is open; each line is looked at once, however long
    fence, indent, is_python = "", 0, False
    for line in answer.split("\n"):
        opened = _OPENED.match(line)
        marks = opened["fence"] if opened else ""
        rest = line[opened.end() :].strip(_BLANKS) if opened else ""
        if block is not None and marks[:1] == fence[:1] and len(marks) >= len(fence) and not rest:
            closed, block = (block if is_python else closed), None
        elif opened and "`" not in rest and (block is None or _is_python(rest)):  # the one before was left open
            block, fence, indent, is_python = [], marks, opened.start("fence"), _is_python(rest)
        elif block is not None:
            block.append(line[min(indent, len(line) - len(line.lstrip(" \t"))) :])
    if closed is not None:
        return "".join(line + "\n" for line in closed)
    return "\n".join(block) if block is not None and is_python else None


def _after_thought(text: str) -> str:
    """What follows the thought. A thought starts with the text or was opened by the prompt; one without an end leaves
    nothing. Code may name the tag in a line, so an end that no start belongs to must begin or end a line."""
    if text.lstrip().startswith("<think>"):
        return text.partition("</think>")[2]
    end = _THOUGHT_ENDS.search(text)
    return text if end is None else text[end.end() :]


def _is_python(rest: str) -> bool:
    """rest: of a line that opens a block."""
    word = re.match(r"\w*", rest)
    return word is not None and word[0].lower() in ("python", "python3", "py")


def read_tests(task: Task) -> TaskTests:
    """Raises UserError, naming the task, if the tests are missing, have none of the three forms, or use names that are
    neither theirs nor the code's."""
    where, given = f"task '{task.id}'", task.metadata.get("tests")
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not given:
        raise UserError(f"{where}: 'tests' is missing or empty; it must be a list of asserts, calls or programs")
    given = [_without_padding(case) for case in given]
    forms = {_form(case, f"{where}, test {number}") for number, case in enumerate(given, 1)}
    if len(forms) > 1:
        raise UserError(f"{where}: its tests are {' and '.join(sorted(forms))}; they must be of one form")
    form, function = forms.pop(), task.metadata.get("function") or task.metadata.get("entry_point")
    is_needed = form == "calls" or function is not None
    if is_needed and (not isinstance(function, str) or _fault(function, "eval")):
        raise UserError(f"{where}: 'function' is {_echo(function)}; name what its tests call, such as \"add\"")
    if form == "programs":
        return TaskTests(form, tuple(given))
    names = names_of_code([case for case in given if isinstance(case, str)], function, task.metadata, task.text)
    if names.unbound:
        unbound = ", ".join(sorted(names.unbound))
        remedy = "import or define it there; if the code must define it, say so in the prompt or in 'starter_code'"
        raise UserError(f"{where}: its tests use {_echo(unbound)}, which nothing binds; {remedy}")
    if not names.names:
        raise UserError(f"{where}: its tests use no name of the code, so any code would pass; name it in 'function'")
    if idle := never_run([case for case in given if isinstance(case, str)], function, names.names):
        remedy = (
            "call it there (fixtures and parameters of pytest do not exist); for 'check', name the row's 'function'"
        )
        raise UserError(f"{where}: nothing in its tests runs {_echo(idle)}, so any code would pass it; {remedy}")
    return TaskTests(form, tuple(given), function, names)


def _without_padding(case: object) -> object:
    """A test without the keys of other forms, which Parquet and `datasets` add with null. `expected` may be null."""
    if not isinstance(case, Mapping):
        return case
    kept = {"expected"} if case.get("args") is not None else set()
    return {key: value for key, value in case.items() if value is not None or key in kept}


def _form(case: object, where: str) -> Form:
    if isinstance(case, str):
        if fault := _fault(case, "exec"):
            raise UserError(f"{where}: {_echo(case)} {fault}")
        return "asserts"
    if isinstance(case, Mapping):
        for form, (required, allowed) in _KEYS.items():
            if required <= case.keys() <= allowed:
                if form == "programs" and not all(isinstance(text, str) for text in case.values()):
                    raise UserError(f"{where}: 'stdin' and 'stdout' must be texts")
                if form == "calls" and not isinstance(case["args"], list):
                    raise UserError(f"{where}: 'args' must be a list")
                if form == "calls" and not isinstance(case.get("kwargs", {}), Mapping):
                    raise UserError(f"{where}: 'kwargs' must be a mapping of names to values")
                return form
    raise UserError(
        f'{where}: {str(case)[:_LONGEST_ECHO]} is not a test; it must be a text of asserts, {{"args", "expected"}} or'
        ' {"stdin", "stdout"}'
    )


def _fault(source: str, mode: Literal["exec", "eval"]) -> str | None:
    """The reason why the judge can't compile `source` or read its names; None if it can."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of a comparison with `is`, say: no fault
            ast.parse(source, "test", mode)
            compile(source, "test", mode)
    except (SyntaxError, ValueError):
        return "is not valid Python"
    except (RecursionError, MemoryError):
        return "is nested too deeply for Python's compiler; split it"
    return None


def _echo(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_ECHO else text[:_LONGEST_ECHO] + "..."


def output_bytes(expected: str) -> int:
    """Size of the shortest output that equals the expected one."""
    return len("\n".join(_lines(expected)).encode("utf-8", "surrogatepass"))


def same_output(given: str, expected: str) -> bool:
    return _lines(given) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").rstrip().split("\n")]
