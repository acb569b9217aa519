"""Code that writes the messages of the link itself, and objects that lie: each with tests that it must not pass."""

from __future__ import annotations

SERVE = """
import json, os, builtins
def serve(answer, start={'value': None}):
    os.write(3, json.dumps(start).encode() + b'\\n')
    rest = b''
    while part := os.read(3, 65536):
        *lines, rest = (rest + part).split(b'\\n')
        for line in lines: os.write(3, json.dumps(answer(*json.loads(line))).encode() + b'\\n')
F, O, I = {'function': [0, 'add']}, {'object': [1, 'int']}, {'iterator': [2, 'list_iterator']}
"""
VALUES: dict[str, str] = {  # what every call returns
    "an object for everything": "O",
    "a type for an answer": "{'type': 'bool'}",
    "an iterator without an end": "[0] * 999 if operation == 'next' else I",
    "an iterator of nothing": "[] if operation == 'next' else I",
    "a fraction that takes for ever": "{'Fraction': '1e999999999'}",
    "a decimal that raises when compared": "{'Decimal': 'sNaN'}",
    "not a number": "float('nan')",
    "numbers that take for ever": "{'int': 'f' * 4000000}",
    "numbers of one hash": "[i * (2 ** 61 - 1) for i in range(20000)]",
}
FORGERS: dict[str, str] = {
    **{
        name: f"serve(lambda operation, given: {{'value': F if operation == 'name' else {value}}})"
        for name, value in VALUES.items()
    },
    "a function for everything, which says True": """
serve(lambda operation, given: {'value': True if operation in ('bool', 'less', 'equal') else F})
""",
    "a record whose names are methods": """
R = {'record': [5, 'R', ['startswith', 'x', '__float__', '__eq__', 'issubset'], [F, F, F, F, F]]}
serve(lambda operation, given: {'value': F if operation == 'name' else R})
""",
    "builtins with the first message": """
names = {'dict': [[name, F] for name in (*dir(builtins), '__builtins__', 'math', 'check')]}
serve(lambda operation, given: {'value': True, 'names': names, 'args': [F], '__builtins__': names}, {'names': names})
""",
    "a module for an answer": "serve(lambda operation, given: {'module': 'cmath', 'value': F})",
    "a function of the judge's by its name": """
serve(lambda operation, given: {'value': {'global': ['builtins', 'exec']}})
""",
    "an exception that ends loops": """
serve(lambda operation, given: {'value': F} if operation == 'name' else {'raised': ['X', 'StopIteration', '']})
""",
    "exceptions that are none of the code's": """
serve(lambda operation, given: {'value': F} if operation == 'name' else {'raised': ['LinkClosed', 'SystemExit', '']})
""",
    "an exception in no form": "serve(lambda operation, given: {'value': F} if operation == 'name' else {'raised': 5})",
    "arguments that were changed to what is asked for": """
serve(lambda operation, given: {'value': F} if operation == 'name' else {'value': O, 'args': [O, O, O]})
""",
    "a nesting past all depth": """
serve(lambda operation, given: None, {'value': None, 'x': 0})
os.write(3, b'{"value":' + b'[' * 400000 + b']' * 400000 + b'}\\n')
""",
    "a nesting that is just read": """
def deep(n): return [deep(n - 1)] if n else []
serve(lambda operation, given: {'value': F if operation == 'name' else deep(300)})
""",
    "no line's end": "serve(lambda operation, given: os.write(3, b' ' * 99999999))",
    "a first message that is huge": "os.write(3, b'{\"value\": [' + b'[],' * 1000000 + b'[]]}\\n')",
    "names that raise": "serve(lambda operation, given: {'raised': ['KeyError', 'KeyError', 'x']})",
}
FORGED_TESTS = r"""
assert add(1, 2) == 3

assert abs(add(0.5, 0.25) - 0.75) < 1e-9

import math
assert math.isclose(add(1, 0.5), 1.5)

assert sorted(add([3, 1], [2])) == [1, 2, 3]

from decimal import Decimal
assert Decimal(add(1, 2)) == Decimal(3)

def check(candidate):
    assert candidate(1, 2) == 3
    assert abs(candidate(1.0, 2.0) - 3) < 1e-6
check(add)

assert add('x', 'y').startswith('xy')

assert all(map(lambda x: add(x, x) == 2 * x, [1, 2]))

assert add({1}, {2}).issubset({1, 2, 3})

assert float(add(1, 2)) == 3.0

assert str(add(1, 2)) == '3'

assert math.isclose(add(1, 2), 3)

assert 'a' in add('a', 'b') and len(add('a', 'b')) == 2

try: assert add(1, 2) == 3
except ValueError: pass

xs = [3, 1]
add(xs, xs)
assert xs == [1, 3]
""".strip().split("\n\n")

LIARS: dict[str, tuple[str, str]] = {  # what lies -> code, test
    "a method of texts": (
        "class L:\n    def startswith(self, *a): return True\ndef f(x): return L()",
        "assert f('ab').startswith('ba')",
    ),
    "a method of texts, of what is returned for a class": (
        "class L:\n    def startswith(self, *a): return True\nclass Solution:\n    def f(self, x): return L()",
        "assert Solution().f('ab').startswith('ba')",
    ),
    "a class for a function": (
        "class f:\n    def __init__(self, x): pass\n    def issubset(self, *a): return True",
        "assert f([1]).issubset({1, 2})",
    ),
    "items that differ at the second reading": (
        "class L:\n    n = 0\n    def __iter__(self):\n        self.n += 1\n"
        "        return iter([] if self.n == 1 else [3, 1])\ndef f(x): return L()",
        "r = f([3, 1])\nfirst = list(r)\nassert first == sorted(first) and set(r) == {1, 3}",
    ),
    "an iterator that ends and goes on": (
        "class L:\n    n = 0\n    def __iter__(self): return self\n    def __next__(self):\n"
        "        self.n += 1\n        if self.n < 2: raise StopIteration\n        return 3\ndef f(x): return L()",
        "r = f([3])\nassert list(r) == sorted(r)\nassert next(iter(r)) == 3",
    ),
    "order": ("class L:\n    def __lt__(self, o): return True\ndef f(x): return L()", "assert f(1) < f(2)"),
    "a length": ("class L:\n    def __len__(self): return 2\ndef f(x): return L()", "assert len(f([1, 2])) == 2"),
    "items by number": (
        "class L:\n    def __getitem__(self, at): return 1\ndef f(x): return L()",
        "assert f([2, 1])[0] == 1",
    ),
    "equality with an object": (
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return True\ndef f(x): return P(9)",
        "assert f(3) == P(3)",
    ),
    "equality of objects without fields": (
        "class P:\n    def __init__(self, x): pass\n    def __eq__(self, o): return True\ndef f(x): return P(9)",
        "assert f(3) == P(3)",
    ),
    "equality of iterators": ("def f(x): return iter([x])", "assert f(3) == f(3)"),
    "the class it says to be": (
        "class L(int):\n    __class__ = int\n    def __eq__(self, o): return True\n"
        "    def __hash__(self): return 3\ndef f(x): return L(4)",
        "assert f(3) in (3,) or f(3) in {3} or isinstance(f(3), int)",
    ),
    "a text that equals all": (
        "class L(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef f(x): return [L('z')]",
        "assert f('ab') == ['ba']",
    ),
    "a float near all": (
        "class L(float):\n    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\ndef f(x): return L(1)",
        "assert abs(f(3) - 9) < 1e-6",
    ),
    "a module that the tests forgot to import": (
        "class M:\n    def isclose(self, *a): return True\nmath = M()\ndef f(x): return 7.0",
        "assert math.isclose(f(3), 9.0)",
    ),
    "a function in place of that module": (
        "def math(): pass\nmath.isclose = lambda *a: True\ndef f(x): return 7.0",
        "assert math.isclose(f(3), 9.0)",
    ),
    "the end, where a test takes any exception": (
        "import os\ndef f(x): os._exit(0)",
        "try: f(3)\nexcept: pass\nelse: assert False",
    ),
    "StopIteration in a loop of the test's": (
        "def f(x): raise StopIteration",
        "assert all(map(lambda x: f(x) == 2 * x, [1, 2]))",
    ),
    "a class that numpy would take addresses from": (
        "class P: __array_interface__ = {'data': (1, False)}\ndef f(x): return P()",
        "P()\nassert hasattr(f(3), '__array_interface__')",
    ),
    "the object itself, with a method of texts": (
        "class Solution:\n    def f(self, x): return self\n    def startswith(self, *a): return True",
        "assert Solution().f('abc').startswith('a')",
    ),
    "a method of numbers, where the tests name a class": (
        "class P:\n    def __init__(self, x): self.x = x\n    def bit_length(self): return 2\ndef f(x): return P(1)",
        "assert P(1).x == 1\nassert f(3).bit_length() == 2",
    ),
    "an object that differs from all data": ("class L: pass\ndef f(x): return L()", "assert f(3) != 9"),
    "an object that is in no list": ("class L: pass\ndef f(x): return L()", "assert f(3) not in [9]"),
    "a class that is near every number": (
        "class Area:\n    radius = 3\n    def __init__(self, r): pass\n    def __sub__(self, o): return 0.0\n"
        "    def __abs__(self): return 0.0\n    __rsub__ = __abs__",
        "assert Area(3).radius == 3\nassert abs(Area(3) - 28.27) < 0.1",
    ),
    "an exit that suppresses what the test raises": (
        "class L:\n    def __enter__(self): return 3\n    def __exit__(self, *a): return True\ndef f(x): return L()",
        "with f(3) as y: assert y == 9",
    ),
    "a name that the tests bind only sometimes": (
        "raised = True\ndef f(x): return 3",
        "try: f(-1)\nexcept ValueError: raised = True\nassert raised",
    ),
    "a node that equals all": (
        "class V(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
        "class ListNode:\n    def __init__(self, val, next=None): self.val, self.next = val, next\n"
        "    def __eq__(self, o): return True\ndef f(x): return ListNode(V(3))",
        "assert f(3) == ListNode(9)",
    ),
    "a test that is skipped": (
        "import unittest\ndef f(x): raise unittest.SkipTest('x')",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 9)\nunittest.main()",
    ),
    "tests that nothing runs": ("def f(x): return 3", "def test_f():\n    assert f(3) == 9"),
    "a case that nothing runs": (
        "def f(x): return 3",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 9)",
    ),
    "failures that nothing reads": (
        "def f(x): return 3",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 9)\n"
        "unittest.main(exit=False)",
    ),
    "a class that is its own instance, with methods of texts": (
        "class M(type):\n    def startswith(cls, *a): return True\n"
        "class Solution(metaclass=M):\n    def __new__(cls, *a): return cls\nSolution.f = Solution",
        "assert Solution().f('ab').startswith('ba')",
    ),
    "tests of a class for pytest": (
        "def f(x): return 3",
        "assert f(1) == 3\nclass TestF:\n    def setup_method(self): self.x = 3\n"
        "    def test(self): assert f(self.x) == 9",
    ),
    "an attribute that can't be sent back": ("def f(x): return 'x'", "assert f(f(3).title) == 3"),
}
