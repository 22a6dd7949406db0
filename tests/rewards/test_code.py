"""Programs against tests: right, wrong, and forged."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.rewards.code_tests import CodeConfig, read_tests, same_output
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.grading.values import decode, encode
from rlinf.rewards.pool import RewardPool
from rlinf.rewards.protocol import RewardInput

DOUBLE = {"pairs": [["2", "4\n"], ["5", "10"]]}
ADD = {"asserts": ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]}
HONEST_ADD = "def add(a, b):\n    return a + b"


@pytest.fixture(scope="module")
def reward():
    return CodeConfig(wall_seconds=5.0, cpu_seconds=1).build()


@pytest.fixture(scope="module")
def fraction():
    return CodeConfig(value="fraction", min_value=-1.0, wall_seconds=3.0).build()


def sample(program: str, answer) -> RewardInput:
    completion = f"Here it is:\n```python\n{program}\n```\n"
    return RewardInput(prompt="", completion=completion, num_tokens=9, answer=answer)


@pytest.mark.parametrize(
    ("program", "answer", "value"),
    [
        ("print(2 * int(input()))", DOUBLE, 1.0),
        ("print(2 * int(input()), '\\n')", DOUBLE, 1.0),
        ("print(4)", DOUBLE, 0.0),
        ("print(2 * int(input())); raise SystemExit(1)", DOUBLE, 0.0),
        ("import sys\nprint(2 * int(sys.stdin.read()))", {"inputs": ["3"], "outputs": ["6"]}, 1.0),
        ("while True: pass", {"pairs": [["", ""]]}, 0.0),
        ("def (", DOUBLE, 0.0),
        (HONEST_ADD, ADD, 1.0),
        (HONEST_ADD + "\nif __name__ == '__main__':\n    input()", ADD, 1.0),
        ("def add(a, b):\n    return a - b", ADD, 0.0),
        ("def plus(a, b):\n    return a + b", ADD, 0.0),
        ("raise ValueError", ADD, 0.0),
        (HONEST_ADD + "\nprint(add(*map(int, input().split())))", ADD, 0.0),
        (HONEST_ADD + "\ntry: print(sum(map(int, input().split())))\nexcept EOFError: pass",
         {**ADD, "pairs": [["1 2", "3"]]}, 1.0),
    ],
)  # fmt: skip
def test_programs(reward, program, answer, value):
    assert reward(sample(program, answer)) == value


def test_no_program_is_worth_nothing(reward):
    text = RewardInput(prompt="", completion="I cannot", num_tokens=2, answer=ADD)
    assert reward(text) == 0.0


@pytest.mark.parametrize(
    ("program", "answer", "value"),
    [
        ("def add(a, b): return 3", ADD, 0.0),
        (HONEST_ADD, ADD, 1.0),
        ("print(4)", {"pairs": [["2", "4"], ["5", "10"], ["1", "2"], ["2", "4"]]}, 0.0),
        ("x = 1", ADD, -1.0),
        pytest.param(
            "def add(a, b):\n    if a == 1: return 3\n    import time; time.sleep(99)",
            ADD,
            0.0,
            marks=pytest.mark.slow,
        ),
        ("def add(a, b):\n    if a == 1: return 3\n    import os; os._exit(0)", ADD, 0.0),
    ],
)
def test_the_share_of_tests_that_pass(fraction, program, answer, value):
    """Between −1 and 1: one of two asserts is worth 0, two of four pairs as well."""
    assert fraction(sample(program, answer)) == value


RICH = """
from collections import Counter, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
Point = namedtuple("Point", "x y")
PI = 3.14
class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
def count(text): return Counter(text)
def point(): return Point(1, 2)
def sort(values): values.sort()
def numbers(n): yield from range(n)
def fail(): raise ValueError("bad")
class Own(Exception): pass
def fail_oddly(): raise Own("odd")
def third(): return Fraction(1, 3)
def price(): return Decimal("1.50")
def keys(): return {(1, 2): {3}, None: b"x"}
def unusual(): return float("nan"), float("inf"), 2**100, 1 + 2j, frozenset([1])
def same(value): return value
"""


ASSERTS = [
    "assert PI == 3.14",
    "s = Stack()\ns.push(1).push(2)\nassert s.pop() == 2 and len(s) == 1 and list(s) == [1]",
    "assert Stack([1, 2]).items == [1, 2]",
    "assert Stack([1]) and not Stack()",
    "assert count('aab') == {'a': 2, 'b': 1}",
    "assert point() == (1, 2)",
    "values = [3, 1, 2]\nsort(values)\nassert values == [1, 2, 3]",
    "assert list(numbers(3)) == [0, 1, 2]\nassert next(iter(numbers(1))) == 0",
    "assert 2 in numbers(3)",
    "try:\n    fail()\n    assert False, 'no error'\nexcept ValueError as error:\n"
    "    assert str(error) == 'bad'",
    "try:\n    fail_oddly()\nexcept Exception as error:\n    assert 'odd' in str(error)",
    "import math\nassert math.isclose(third(), 1 / 3)",
    "from decimal import Decimal\nassert price() == Decimal('1.5')",
    "assert keys() == {(1, 2): {3}, None: b'x'}",
    "a, b, c, d, e = unusual()\nassert a != a and b > c > 2**99 and d.imag == 2 and e == {1}",
    "assert same(s := Stack()) == s",
    "assert same(value=(1, [2])) == (1, [2])",
    "assert type(same(True)) is bool and type(same(1)) is int and type(same((1,))) is tuple",
]


def test_what_asserts_may_do(fraction):
    """Of all in one run; a share below 1 says how many do not pass."""
    assert fraction(sample(RICH, {"asserts": ASSERTS})) == 1.0


@pytest.mark.parametrize(
    ("body", "value"), [("return a + b", 1.0), ("raise ValueError('\u00fc' * 1000)", 0.0)]
)
def test_verdicts_are_not_counted_as_output_of_the_program(body, value):
    reward = CodeConfig(value="fraction", output_kib=1, wall_seconds=5.0).build()
    program = f"def add(a, b):\n    {body}"
    assert reward(sample(program, {"asserts": ["assert add(1, 2) == 3"] * 100})) == value


def test_numbers_of_many_digits_are_values_like_others(fraction):
    """Python writes and reads none of over 4300 of them without being told to."""
    program = "def power(n): return -(10**n)\ndef last(n): return n % 7"
    asserts = [
        "assert power(5000) == -(10**5000)",
        "assert last(10**5000) == pow(10, 5000, 7)",
        "from fractions import Fraction as F\nassert last(F(7, 10**5000)) == F(7, 10**5000)",
        "assert power(1) == -10",
    ]
    assert fraction(sample(program, {"asserts": asserts})) == 1.0


def test_setup_and_entry_point(reward):
    answer = {
        "setup": "def check(candidate):\n    assert candidate(1, 2) == 3",
        "asserts": ["check(candidate)"],
        "entry_point": "sum",
    }
    assert reward(sample("def sum(a, b): return a + b", answer)) == 1.0
    assert reward(sample("def sum(a, b): return a * b", answer)) == 0.0


FORGERIES = {
    "prints the verdict": "print('passed'); print('{\"passed\": true}')",
    "ends with success": "import os; os._exit(0)",
    "exits with success": "raise SystemExit(0)",
    "equal to everything": """
class Everything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __len__(self): return 2
def add(a, b): return Everything()""",
    "text equal to everything": """
class Everything(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def add(a, b): return Everything()""",
    "number equal to everything": """
class Everything(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return Everything()""",
    "forges answers": """
import os, json
os.write(4, b'{"names": ["add"]}\\n')
os.write(4, b'{"value": {"handle": 0}}\\n')
for _ in range(4):
    os.write(4, b'{"passed": true}\\n')
os._exit(0)""",
    "answers with verdicts": """
import os
for number in range(3, 64):
    try: os.write(number, b'{"passed": true}\\n' * 4)
    except OSError: pass
for number in (1, 2): os.write(number, b'{"passed": true}\\n' * 4)""",
    "changes the encoder": """
import sys
values = sys.modules["rlinf.rewards.grading.solution"]
values.encode = lambda value, other: {"passed": True}
def add(a, b): return 0""",
    "redefines what tests use": """
def all(values): return True
def isinstance(*arguments): return True
def add(a, b): return None""",
    "changes assertions": """
import builtins
builtins.AssertionError = type("Fine", (BaseException,), {})
builtins.all = lambda values: True
def add(a, b): return None""",
    "looks for the expected value": """
import gc, sys
def add(a, b):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "asserts" in thing: return 3
    try: return eval(open("tests.json").read())
    except OSError: pass
    frame = sys._getframe()
    while frame.f_back: frame = frame.f_back
    return frame.f_locals.get("asserts")""",
    "raises what ends tests": """
def add(a, b): raise StopIteration""",
    "raises system exit": """
def add(a, b): raise SystemExit(0)""",
    "raises interrupt": """
def add(a, b): raise KeyboardInterrupt""",
    "floods the tests": """
def add(a, b): return [[0] * 1000] * 100000""",
    "nests without end": """
import os
def add(a, b):
    os.write(4, b'{"value": ' + b'{"list": [' * 100000 + b']}' * 100000 + b'}\\n')""",
    "numbers without end": """
import os
def add(a, b):
    os.write(4, b'{"value": ' + b'9' * 100000 + b'}\\n')""",
    "odd names": """
globals()["__builtins__x"] = 1
globals()["add "] = 2""",
}


QUICK = {
    "ends with success", "equal to everything", "forges answers", "redefines what tests use",
    "changes assertions",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FORGERIES],
)
def test_a_forged_verdict_is_a_failure(reward, name):
    answer = {"asserts": [*ADD["asserts"], "assert all(add(n, n) == 2 * n for n in range(3))"]}
    assert reward(sample(FORGERIES[name], answer)) == 0.0
    pairs = {"pairs": [["17", "289"]]}
    assert reward(sample(FORGERIES[name], pairs)) == 0.0
    assert reward(sample(HONEST_ADD, answer)) == 1.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "no mapping"),
        ({}, "no tests"),
        ({"assert": []}, "unknown keys: assert"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs for 0 outputs"),
        ({"pairs": [["1"]]}, "a pair is"),
        ({"pairs": [["1", 2]]}, "a pair is"),
        ({"inputs": "12", "outputs": "34"}, "`inputs` is a list"),
        ({"pairs": 5}, "`pairs` is a list"),
        ({"asserts": "assert f()"}, "list of statements"),
        ({"asserts": ["assert f()"], "entry_point": 5}, "`entry_point` is the name of a function"),
    ],
)
def test_an_answer_without_tests_is_refused(answer, reason):
    with pytest.raises(ValueError, match=reason):
        read_tests(answer)


def test_tests_of_several_kinds_in_one_column_of_parquet():
    """Where each row has the keys of all."""
    asserts = {"asserts": ["assert f()"], "setup": "f = all"}
    nothing = dict.fromkeys(["pairs", "inputs", "outputs", "entry_point"])
    assert read_tests({**asserts, **nothing}) == read_tests(asserts)
    with pytest.raises(ValueError, match="no tests"):
        read_tests({"asserts": None, "pairs": None})


@pytest.mark.parametrize(
    ("asserts", "reason"),
    [
        (["assert add(1, 2) = 3"], "the tests are no Python"),
        (["assert add(lambda: 1, 2) == 3"], "a test passes a function"),
    ],
)
def test_tests_that_cannot_be_run_are_no_fault_of_the_program(reward, asserts, reason):
    with pytest.raises(ValueError, match=reason):
        reward(sample(HONEST_ADD, {"asserts": asserts}))


@pytest.mark.parametrize(
    "setup", ["import nothing_of_that_name", "x = 1 / 0", "import sys; sys.exit()", "add(min, 1)"]
)
def test_a_setup_that_raises_by_itself_is_no_fault_of_the_program(reward, setup):
    with pytest.raises(ValueError, match=r"the setup of the tests raises|a test passes a"):
        reward(sample(HONEST_ADD, {**ADD, "setup": setup}))


@pytest.mark.parametrize(
    "program",
    ["x = 1", "def add(a, b): return None", "def add(a, b): raise ImportError", "raise SystemExit"],
)
def test_a_setup_that_a_program_fails_is_a_wrong_answer(reward, program):
    answer = {"setup": "import math\nthree = add(1, 2) + 0", "asserts": ["assert three == 3"]}
    assert reward(sample(program, answer)) == 0.0
    assert reward(sample(HONEST_ADD, answer)) == 1.0


def test_a_name_that_a_setup_lacks_is_told_once(caplog):
    reward = CodeConfig().build()
    for _ in range(2):  # the program might have had it
        assert reward(sample(HONEST_ADD, {**ADD, "setup": "x = no_such_name"})) == 0.0
    assert [record.getMessage() for record in caplog.records] == [
        "the setup of tests, or the program, lacks a name: name 'no_such_name' is not defined"
    ]


def test_programs_in_the_pool():
    """From a thread that is not the main one, with a program that outlives its time."""
    config = RewardConfig.model_validate(
        {
            "functions": {
                "code": {"type": "code", "wall_seconds": 1.5, "total_seconds": 3.0},
                "format": {
                    "type": "format",
                    "form": "pattern",
                    "pattern": ".*```\n",
                    "weight": 0.5,
                },
            },
            "deadline": 30.0,
            "processes": 2,
        }
    )
    outputs = []
    samples = [
        sample(HONEST_ADD, ADD),
        sample("import time; time.sleep(99)", ADD),
        sample("def add(a, b): return 3", ADD),
        sample(HONEST_ADD, {"asserts": []}),
    ]
    with RewardPool(config) as pool:
        thread = threading.Thread(target=lambda: outputs.extend(pool.score(samples)))
        thread.start()
        thread.join()
    assert [output.reward for output in outputs] == [1.5, 0.5, 0.5, 0.0]
    assert [output.valid for output in outputs] == [True, True, True, False]
    assert outputs[3].fault == "code/exception"


PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(),
        st.integers(-(2**200), 2**200),
        st.binary(), st.complex_numbers(allow_nan=False), st.fractions(),
        st.decimals(allow_nan=False),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(st.integers() | st.text(), max_size=4),
        st.frozensets(st.integers(), max_size=4),
        st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)  # fmt: skip


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value):
    def refuse(item: object) -> None:
        raise AssertionError(f"{item!r} is plain")

    arrived = decode(encode(value, refuse), lambda number: None)
    assert arrived == value
    assert repr(arrived) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple)


@pytest.mark.parametrize("form", [[1], {}, {"a": 1, "b": 2}, {"what": 1}, {"bytes": "zz"}])
def test_a_form_of_nothing_is_refused(form):
    with pytest.raises(ValueError, match=r"value|hex"):
        decode(form, lambda number: None)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 \n2", "1\n2\n\n", True),
        ("1\r\n2", "1\n2", True),
        (" 1", "1", False),
        ("1\n\n2", "1\n2", False),
        ("", "", True),
        ("12", "1 2", False),
    ],
)
def test_same_output(output, expected, same):
    assert same_output(output, expected) is same
