"""The calculator: exact, and safe whatever a model writes."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from rlinf.agents.calculator import CalculatorConfig
from rlinf.agents.tool import ToolError

CALCULATOR = CalculatorConfig().build()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2", "3"),
        (" 12 × 3 ÷ 8 ", "4.5"),
        ("5−8", "-3"),
        ("1,234+1", "1235"),
        ("1,234,567.5", "1234567.5"),
        ("0.1+0.2", "0.3"),
        ("(1-5)/3", "-1.333333"),
        ("2/3", "0.666667"),
        ("-(2+3)%4", "3"),
        ("1/1000000", "0.000001"),
        ("-1/10000000", "0"),
        ("99999*99999", "9999800001"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert CALCULATOR.call(expression) == value


def test_whole_numbers_of_any_size_are_exact() -> None:
    numbers = random.Random(0)
    for _ in range(200):
        first, second = (numbers.randrange(10**40) for _ in range(2))
        sign = numbers.choice("+-*")
        value = {"+": first + second, "-": first - second, "*": first * second}[sign]
        assert CALCULATOR.call(f"{first}{sign}{second}") == str(value)


def test_places_are_those_of_the_exact_value() -> None:
    calculator = CalculatorConfig(decimals=3).build()
    numbers = random.Random(1)
    for _ in range(200):
        first, second = numbers.randrange(-(10**6), 10**6), numbers.randrange(1, 10**4)
        found = Fraction(calculator.call(f"({first})/{second}"))
        assert abs(found - Fraction(first, second)) <= Fraction(1, 2000)


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "()", "1+", "2**9999999", "9//2", "1 2", "007", "1.5.2", "1e9", "abs(1)", "a",
        "__import__('os')", "(1).real", "1 if 1 else 2", "[1]", "3(4)", "(" * 150, "1;2", "1\n2",
        "1\0", "٣+1", "½", "...", "2 + ...",
        "1,2", "12,3456", "1,23", ",123",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_an_error(expression: str) -> None:
    with pytest.raises(ToolError, match="not an expression"):
        CALCULATOR.call(expression)


@pytest.mark.parametrize("expression", ["1/0", "5%0", "1/(2-2)"])
def test_division_by_zero(expression: str) -> None:
    with pytest.raises(ToolError, match="division by zero"):
        CALCULATOR.call(expression)


def test_an_expression_is_bounded() -> None:
    assert CALCULATOR.call("+".join("1" * 100)) == "100"
    with pytest.raises(ToolError, match="too long"):
        CALCULATOR.call("9*" * 100 + "9")


@pytest.mark.parametrize(
    "expression", ["-" * 999 + "1", "(" * 300 + "1" + ")" * 300, "1%" * 499 + "1", "1-(" * 330]
)
def test_deep_expressions_end_as_errors(expression: str) -> None:
    calculator = CalculatorConfig(max_length=1000).build()
    with pytest.raises(ToolError, match=r"not an expression|too deep"):
        calculator.call(expression)
