"""Programs for the judge: what tests may say of honest code, and code that tries to look right without being so."""

from __future__ import annotations

HONEST: dict[str, tuple[str, str]] = {  # what is said -> code, test
    "a changed keyword argument, and lists in a tuple": (
        """
def f(nums, pair=()):
    nums.sort()
    for each in pair: each.append(9)
""",
        """
a, b = [2, 1], [3]
f(nums=a, pair=(b,))
assert (a, b) == ([1, 2], [3, 9])
""",
    ),
    "a deep copy of a named tuple": (
        """
from collections import namedtuple
def f(): return namedtuple('P', 'x y')(1, [2])
""",
        """
import copy
kept = f()
other = copy.deepcopy(kept)
other.y.append(3)
assert (kept, copy.copy(kept).y, other.y) == ((1, [2]), [2], [2, 3])
""",
    ),
    "an ordered dict's values as an argument": (
        """
from collections import OrderedDict
def f(): return OrderedDict(a=1, b=2)
def g(x): return sum(x)
""",
        """
assert g(f().values()) == 3
""",
    ),
    "objects as arguments": (
        """
class Node:
    def __init__(self, v, next=None): self.v, self.next = v, next
def total(n): return n.v + total(n.next) if n else 0
""",
        """
n = Node(1, Node(2))
n.v = 5
assert total(n) == 7 and n.next.v == 2 and n.next.next is None
""",
    ),
    "a main program that is not run": (
        """
if __name__ == '__main__': 1 / 0
def f(): return input
""",
        """
assert callable(f())
""",
    ),
    "the main program of unittest": (
        "def f(x): return x + 1",
        """
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(3), 4)
if __name__ == '__main__': unittest.main()
""",
    ),
    "an exit, and a module of the code": (
        "def f(x): return x + 1",
        """
import sys
import solution
from solution import f as g
assert solution.f(3) == g(3) == 4
sys.exit(0)
""",
    ),
    "arguments and attributes of exceptions": (
        "class Denied(Exception):\n    def __init__(self, code): super().__init__('denied', code); self.code = code\n"
        "def f(x): raise Denied(x)\ndef g(x): return {}[x]\ndef h(x): return open('/no/such')",
        "try: f(5)\nexcept Denied as e: assert e.code == 5 and e.args == ('denied', 5)\nelse: assert False\n"
        "try: g('k')\nexcept KeyError as e: assert str(e) == \"'k'\" and e.args[0] == 'k'\nelse: assert False\n"
        "try: h(1)\nexcept FileNotFoundError as e: assert str(e) and '/no/such' in str(e)\nelse: assert False",
    ),
    "a class for pytest": (
        "class Stack:\n    def __init__(self): self.items = []\n    def put(self, x): self.items.append(x)",
        "class TestStack:\n    def setup_method(self): self.stack = Stack()\n    def test_put(self):\n"
        "        self.stack.put(3)\n        assert self.stack.items == [3]\n"
        "    def test_new(self): assert self.stack.items == []",
    ),
    "functions for pytest": ("def f(x): return x + 1", "def test_f():\n    assert f(3) == 4"),
    "linked lists": (
        """
class Solution:
    def merge(self, a: 'Optional[ListNode]', b):
        first = last = ListNode()
        while a and b:
            if a.val < b.val: last.next, a = a, a.next
            else: last.next, b = b, b.next
            last = last.next
        last.next = a or b
        return first.next
    def entry(self, node):
        seen = set()
        while node and id(node) not in seen: seen.add(id(node)); node = node.next
        return node
""",
        """
class ListNode:
    def __init__(self, val=0, next=None): self.val, self.next = val, next
def made(values):
    first = None
    for value in reversed(values): first = ListNode(value, first)
    return first
def read(node): return [node.val, *read(node.next)] if node else []
assert read(Solution().merge(made([1, 3]), made([2]))) == [1, 2, 3]
ring = made(list(range(2000)))
ring.next.next.next = ring.next
assert Solution().entry(ring) is ring.next and Solution().entry(made([1])) is None
""",
    ),
    "trees, changed in place": (
        """
class Solution:
    def mirrored(self, root):
        if root: root.left, root.right = self.mirrored(root.right), self.mirrored(root.left)
        return root
""",
        """
tree = TreeNode(1, TreeNode(2), TreeNode(3))
result = Solution().mirrored(tree)
assert result is tree and tree.left.val == 3 and tree == TreeNode(1, TreeNode(3), TreeNode(2))
assert tree != TreeNode(1, TreeNode(2), TreeNode(3))
""",
    ),
    "exceptions of the code": (
        """
class Overdrawn(ValueError): pass
class Account:
    def __init__(self, x): self.x = x
    def __enter__(self): return self
    def __exit__(self, *ended): self.x = 0
    def append(self, x):
        if x < 0: raise Overdrawn('below zero')
        self.x += x
        return self
    def pop(self): return self.x
""",
        """
try: Account(3).append(-1)
except Overdrawn as error: assert str(error) == 'below zero' and isinstance(error, ValueError)
else: assert False
a = Account(1)
assert a.append(1).append(2) is a and a.pop() == 4
with a as b: assert b.x == 4
assert a.x == 0
""",
    ),
    "operators": (
        """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
    def __mul__(self, k):
        return self.x * k.x + self.y * k.y if isinstance(k, Vector) else Vector(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __lt__(self, other): return abs(self) < abs(other)
    def __contains__(self, x): return x in (self.x, self.y)
    def __str__(self): return f'({self.x}, {self.y})'
""",
        """
v, w = Vector(1, 2), Vector(3, 4)
assert v + w == Vector(4, 6) and abs(w) == 5.0 and v * w == 11 and v * 2 == Vector(2, 4) == 2 * v
assert v < w and 2 in v and str(v + w) == '(4, 6)' and isinstance(v + w, Vector) and not isinstance(3, Vector)
""",
    ),
}

FAKES = {
    "it says passed": """
print('passed'); print('{"passed": "111", "why": null}')
""",
    "it exits well": """
import sys; sys.exit(0)
""",
    "it exits at once": """
import os; os._exit(0)
""",
    "it exits when called": """
import os
def add(a, b): os._exit(0)
""",
    "it equals everything": """
class Liar:
    def __eq__(self, o): return True
    def __bool__(self): return True
def add(a, b): return Liar()
""",
    "a number that equals everything": """
class Liar(int):
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __hash__(self): return 1
def add(a, b): return Liar(7)
""",
    "an object near every number": """
class Liar:
    def __sub__(self, o): return 0.0
    __rsub__ = __sub__
    def __float__(self): return 0.75
    def __contains__(self, o): return True
def add(a, b): return Liar()
""",
    "it replaces builtins": """
import builtins, math
builtins.abs = lambda x: 0
math.isclose = lambda *a, **k: True
builtins.AssertionError = ZeroDivisionError
abs = lambda x: 0
def all(x): return True
def add(a, b): return 7
""",
    "it replaces unittest": """
import unittest
unittest.TestCase.assertEqual = lambda *a: None
unittest.main = lambda *a: None
def add(a, b): return 7
""",
    "it writes to the link": """
import os
for _ in range(9): os.write(3, b'{"value": true, "passed": "111"}\\n')
def add(a, b): return 7
""",
    "it takes over the link": """
import os, json
os.write(3, b'{"names": {"dict": [["add", {"object": 0}]]}}\\n')
while line := os.read(3, 9999): os.write(3, b'{"value": {"object": 1}}\\n')
""",
    "it sends garbage": """
import os
os.write(3, b'[' * 100000 + b'\\n')
def add(a, b): return 7
""",
    "it sends too much": """
def add(a, b): return 'x' * (9 << 20)
""",
    "it searches memory and stack for the tests": """
import gc, sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, (list, str, dict)) and 'ass' 'ert add' in str(value): return 3
        frame = frame.f_back
    for found in gc.get_objects():
        if isinstance(found, list) and any('ass' 'ert add(1, 2' in str(x) for x in found): return 3
    return 7
""",
    "it looks for files": """
import os
def add(a, b):
    for folder, _, names in os.walk('/tmp'):
        for name in names:
            try: text = open(os.path.join(folder, name)).read()
            except (OSError, ValueError): continue
            if 'assert add(1' in text: return 3
    return 7
""",
    "it raises what a test may expect": """
def add(a, b): raise AssertionError
""",
    "it raises a SystemExit": """
def add(a, b): raise SystemExit(0)
""",
}
