"""One solution with functions of many return types, and what tests may say of each: all of it is right."""

from __future__ import annotations

SOLUTION = """
import collections, dataclasses, datetime, enum, functools, itertools, math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

Pair = namedtuple('Pair', 'left right')
class Measure(NamedTuple):
    size: int
    unit: str = 'm'
    def doubled(self): return Measure(2 * self.size, self.unit)
class Negative(ValueError): pass

def pair(): return Pair(1, [2])
def measure(): return Measure(3)
def unit(m): return m.unit
def counts(x): return Counter(x)
def groups(words):
    found = defaultdict(list)
    for word in words: found[len(word)].append(word)
    return found
def ordered(): return OrderedDict(b=1, a=2)
def window(n): return deque(range(9), maxlen=n)
def keys(d): return d.keys()
def values(d): return d.values()
def items(d): return d.items()
def span(n): return range(1, n, 2)
def third(): return Fraction(1, 3)
def cents(x): return Decimal(x).quantize(Decimal('0.01'))
def root(): return (-1 + 0j) ** 0.5
def power(n): return 10 ** n
def nothing(): return None
def not_a_number(): return float('nan')
def endless(): return [math.inf, -math.inf]
def raw(): return bytearray(b'ab'), b'\\x00\\xff', memoryview(b'xy').tobytes()
def lone(): return '\\ud800\\u00e9\\n\\x00'
def nested(): return {(1, 2): [{'a': {3}}, frozenset({4})], None: True, 1.5: ((),)}
def day(y): return datetime.date(y, 2, 1), datetime.datetime(y, 2, 1, 3), datetime.timedelta(hours=36)
def kind(x): return type(x)
def mapped(x): return map(str, x)
def zipped(a, b): return zip(a, b)
def squares():
    n = 0
    while True:
        yield n * n
        n += 1
def many(n): return (x for x in range(n))
def echo():
    said = None
    while True: said = yield said
def failing():
    yield 1
    raise KeyError('late')
def adder(n): return lambda x: x + n
def composed(*functions): return lambda x: functools.reduce(lambda value, f: f(value), functions, x)
def apply(f, x): return f(x)
def root_of(x):
    if x < 0: raise Negative('below zero')
    return math.sqrt(x)
def sort_in_place(rows):
    rows.sort()
    for row in rows: row.sort()
def rotate(d): d.rotate(1)
def fill(d): d.setdefault('x', []).append(1)
def encode(text): return text[::-1]
def decode(text): return encode(text)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
def words(text): return iter(text.split())
def flag(x): return x > 0
def sum_all(*args, scale=1, **more): return scale * (sum(args) + sum(more.values()))
class countdown:
    def __init__(self, n): self.n = n
    def __iter__(self): return iter(range(self.n, 0, -1))
def counter():
    class Tally:
        total = 0
        def increment(self): self.total += 1; return self.total
    return Tally()
def parsed():
    book = counter()
    book.title, book.count = 'Ulysses', 3
    return book
LIMIT = 7
TABLE = {'a': (1, 2)}
"""
TESTS = r"""
assert pair() == (1, [2]) and pair().left == 1 and pair()[1] == [2] and isinstance(pair(), tuple)

left, right = pair()
assert left == 1 and right == [2] and pair()._asdict() == {'left': 1, 'right': [2]}

assert measure() == (3, 'm') and measure().doubled() == (6, 'm') and unit(measure()) == 'm'

assert [measure()] == [(3, 'm')] and {measure()} == {(3, 'm')}

assert counts('aab') == {'a': 2, 'b': 1} and counts('aab').most_common(1) == [('a', 2)] and counts('a')['z'] == 0

assert groups(['a', 'bc', 'd']) == {1: ['a', 'd'], 2: ['bc']} and groups([])[5] == []
assert isinstance(groups([]), dict)

assert list(ordered()) == ['b', 'a'] and ordered().popitem() == ('a', 2)

from collections import deque
assert window(2) == deque([7, 8]) and window(2).maxlen == 2 and list(window(1)) == [8]

assert keys({'a': 1}) == {'a'} and list(values({'a': 1})) == [1] and ('a', 1) in items({'a': 1})

assert span(6) == range(1, 6, 2) and list(span(4)) == [1, 3] and len(span(6)) == 3

from fractions import Fraction
assert third() == Fraction(1, 3) and third() + third() == Fraction(2, 3)

from decimal import Decimal
assert cents('1.005') == Decimal('1.00') and str(cents('2')) == '2.00'

assert abs(root() - 1j) < 1e-9 and root().imag == 1.0

assert power(5000) == 10 ** 5000 and power(5000) % 7 == pow(10, 5000, 7) and -power(400) == -(10 ** 400)

assert nothing() is None and not nothing()

import math
assert math.isnan(not_a_number()) and not_a_number() != not_a_number()

assert max(endless()) == float('inf')

assert raw() == (bytearray(b'ab'), b'\x00\xff', b'xy') and type(raw()[0]) is bytearray

assert lone() == '\ud800\u00e9\n\x00' and len(lone()) == 4

assert nested() == {(1, 2): [{'a': {3}}, frozenset({4})], None: True, 1.5: ((),)}

import datetime
assert day(2024) == (datetime.date(2024, 2, 1), datetime.datetime(2024, 2, 1, 3), datetime.timedelta(1.5))

assert kind(3) is int and kind('') == str and isinstance(3, kind(4))

assert list(mapped([1, 2])) == ['1', '2'] and ''.join(mapped([1, 2])) == '12'
assert dict(zipped('ab', [1, 2]))['b'] == 2

from itertools import islice
assert list(islice(squares(), 30)) == [n * n for n in range(30)]

g = squares()
assert next(g) == 0 and next(g) == 1 and 16 in g and next(g) == 25

import types
assert sum(many(5000)) == 12497500 and isinstance(many(1), types.GeneratorType) and list(many(0)) == []

g = many(2)
assert list(g) == [0, 1] and list(g) == [] and next(g, 'end') == 'end'

e = echo()
assert next(e) is None and e.send(4) == 4 and e.send('x') == 'x'

g = failing()
assert next(g) == 1
try: next(g)
except KeyError as error: assert 'late' in str(error)
else: assert False

assert adder(2)(3) == 5 and callable(adder(2)) and list(map(adder(1), [1, 2])) == [2, 3]
assert adder(2).__name__ == '<lambda>'

import math
assert apply(len, 'abc') == 3 and apply(adder(1), 4) == 5 and apply(math.sqrt, 16) == 4.0 and apply(int, '7') == 7

assert composed(adder(1), adder(2))(0) == 3 and apply(str.upper, 'a') == 'A'

assert 'adder' in globals() and globals().get('nobody') is None and globals()['adder'](1)(1) == 2

try: root_of(-1)
except ValueError as error: assert 'below zero' in str(error)
else: assert False

import unittest
class Case(unittest.TestCase):
    def test(self):
        self.assertAlmostEqual(root_of(2) ** 2, 2)
        with self.assertRaises(ValueError): root_of(-1)
assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Case)).wasSuccessful()

rows = [[3, 1], [2]]
assert sort_in_place(rows) is None and rows == [[1, 3], [2]] or rows == [[2], [1, 3]]

from collections import deque
d = deque([1, 2, 3])
rotate(d)
assert list(d) == [3, 1, 2]

d = {}
fill(d)
fill(d)
assert d == {'x': [1, 1]}

METADATA = {'author': 'x'}
def check(candidate):
    from random import randint
    for n in range(5):
        text = ''.join(chr(97 + randint(0, 25)) for _ in range(n))
        assert candidate(encode(text)) == text
check(decode)

from functools import lru_cache
fib = lru_cache(fib)
assert [fib(n) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]

assert eval('adder(1)(1)') == 2

assert sorted(words('b a')) == ['a', 'b'] and list(enumerate(words('x y'))) == [(0, 'x'), (1, 'y')]

assert flag(1) is True and flag(-1) is False and not flag(0)

assert sum_all(1, 2, scale=10, z=3) == 60 and sum_all(*range(4)) == 6 and sum_all(*[], **{'y': 1}) == 1

c = countdown(3)
assert list(c) == [3, 2, 1] and list(c) == [3, 2, 1] and 2 in c and max(c) == 3

c = counter()
assert c.increment() == 1 and c.increment() == 2 and c.total == 2

assert parsed().title == 'Ulysses' and parsed().count == 3

assert LIMIT == 7 and TABLE['a'] == (1, 2)

assert math.isclose(root_of(2) ** 2, 2)

first, *rest = squares_of = [n for n, _ in zip(squares(), range(4))]
assert first == 0 and rest == [1, 4, 9] and squares_of[1] == 1
""".strip().split("\n\n")
CALLS = [
    ("pair", [], [1, [2]]),
    ("counts", ["aab"], {"a": 2, "b": 1}),
    ("ordered", [], {"b": 1, "a": 2}),
    ("groups", [["a"]], {"1": ["a"]}),
    ("power", [30], 10**30),
    ("root_of", [2], 1.414213562373095),
    ("nothing", [], None),
    ("flag", [1], True),
    ("encode", ["ab"], "ba"),
    ("adder(2)", [3], 5),
]

CLASSES = """
from dataclasses import dataclass, field
from enum import Enum, IntEnum
import functools

@dataclass
class Point:
    x: int
    tags: list = field(default_factory=list)
@dataclass(frozen=True)
class Key:
    name: str
@dataclass
class Cached:
    x: int
    seen: int = field(default=0, compare=False)
class Ratio:
    def __init__(self, a, b): self.a, self.b = a, b
    def __eq__(self, other): return self.a * other.b == self.b * other.a
class Color(Enum):
    RED = 1
    BLUE = 2
class Node:
    def __init__(self, value, next=None, parent=None): self.value, self.next, self.parent = value, next, parent
class Queue(list):
    put = list.append
    def take(self): return self.pop(0)
class Matrix:
    def __init__(self, rows): self.rows = rows
    def __getitem__(self, at): return self.rows[at[0]][at[1]]
    def __setitem__(self, at, value): self.rows[at[0]][at[1]] = value
    def __len__(self): return len(self.rows)
    def __iter__(self): return iter(self.rows)
    def __repr__(self): return f'Matrix({self.rows})'
class Countdown:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if self.n == 0: raise StopIteration
        self.n -= 1
        return self.n + 1
@functools.total_ordering
class Version:
    def __init__(self, text): self.parts = tuple(map(int, text.split('.')))
    def __eq__(self, other): return self.parts == other.parts
    def __lt__(self, other): return self.parts < other.parts
class Account:
    def __init__(self): self._link, self._number = 0, 1
    def deposit(self, x):
        if x <= 0: raise ValueError('deposit')
        self._link += x
        return self
    @property
    def balance(self): return self._link
    @classmethod
    def of(cls, x): return cls().deposit(x)
    @staticmethod
    def currency(): return 'EUR'
    def history(self):
        yield from (1, 2)
class LRU:
    def __init__(self): self.data = {}
    def get(self, key): return self.data.get(key, -1)
    def put(self, key, value): self.data[key] = value
    def pop(self): return self.data.popitem()
    def copy(self): other = LRU(); other.data = dict(self.data); return other
class Solution:
    def twoSum(self, nums, target):
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen: return [seen[target - n], i]
            seen[n] = i
def point(x): return Point(x)
def cached(x): return Cached(x, 9)
def chain(*values): return Node(values[0], chain(*values[1:]) if values[1:] else None)
def ring():
    a, b = Node(1), Node(2)
    a.next, b.next, b.parent = b, a, a
    return a
def red(): return Color.RED
"""
CLASS_TESTS = r"""
assert point(3) == Point(3) and point(3) != Point(4) and [point(3)] == [Point(3)] and point(3) in [Point(3)]

assert point(3).x == 3 and repr(point(3)) == 'Point(x=3, tags=[])' and Point(1, ['a']).tags == ['a']

assert cached(1) == Cached(1) and cached(1) != Cached(2)

assert Ratio(1, 2) == Ratio(2, 4) and Ratio(1, 2) != Ratio(1, 3)

p = Point(1)
p.x = 5
assert p == Point(5) and vars(p) == {'x': 5, 'tags': []}

assert {Key('a'): 1}[Key('a')] == 1 and len({Key('a'), Key('a'), Key('b')}) == 2

assert red() is Color.RED and red() == Color.RED and red() != Color.BLUE and red().name == 'RED'
assert red().value == 1

assert Color(2) is Color.BLUE and [c.name for c in Color] == ['RED', 'BLUE'] and Color['RED'] is Color.RED

n = chain(1, 2, 3)
seen = []
while n: seen, n = [*seen, n.value], n.next
assert seen == [1, 2, 3]

assert chain(1, 2) == Node(1, Node(2)) and chain(1, 2) != chain(1, 3)

a = ring()
assert a.next.next is a and a.next.parent is a and ring() == ring() and ring() != chain(1, 2)

q = Queue()
q.put(1)
q.put('x')
assert q.take() == 1 and len(q) == 1 and list(q) == ['x'] and q[0] == 'x'

m = Matrix([[1, 2], [3, 4]])
m[0, 1] = 9
assert m[0, 1] == 9 and len(m) == 2 and [3, 4] in m and str(m) == 'Matrix([[1, 9], [3, 4]])'

c = Countdown(3)
assert next(c) == 3 and list(c) == [2, 1] and list(c) == [] and sum(Countdown(4)) == 10

assert Version('1.2') < Version('1.10') and Version('1.0') == Version('1.0')

assert sorted([Version('2.0'), Version('1.0')])[0] == Version('1.0')

a = Account()
assert a.deposit(2).deposit(3) is a and a.balance == 5 and a._link == 5 and a._number == 1

assert Account.of(4).balance == 4 and Account.currency() == 'EUR' and list(Account().history()) == [1, 2]

try: Account().deposit(0)
except ValueError: pass
else: assert False

c = LRU()
c.put(1, 'a')
d = c.copy()
assert c.get(1) == 'a' and c.get(2) == -1 and d.data == {1: 'a'} and c.pop() == (1, 'a')

assert Solution().twoSum([2, 7, 11], 9) == [0, 1] and Solution().twoSum(nums=[1, 1], target=2) == [0, 1]
""".strip().split("\n\n")
