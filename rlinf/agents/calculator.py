"""A calculator: exact arithmetic on what a model writes, which is never executed as a program."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from pydantic import Field

from rlinf.agents.tool import Tool, ToolConfig, ToolError

_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DEPTH = 120  # of operations inside operations: far from the stack's end
_LEGAL = re.compile(r"[0-9.+\-*/%() ]+")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


class CalculatorConfig(ToolConfig):
    """Numbers, + - * / %, and brackets."""

    implementation = "rlinf.agents.calculator:Calculator"
    type: Literal["calculator"] = "calculator"
    """Which tool this section configures."""
    max_length: int = Field(default=200, ge=1, le=1000)
    """Characters of the longest expression; it bounds time and size of a result too."""
    decimals: int = Field(default=6, ge=0, le=100)
    """Decimal places of a result that is not whole."""


class Calculator(Tool):
    """Evaluates with exact fractions; × ÷ − stand for * / -, a comma for thousands."""

    alphabet = "abcdefghijklmnopqrstuvwxyz :.-"

    def __init__(self, config: CalculatorConfig) -> None:
        self._config = config

    def call(self, arguments: str) -> str:
        """The value of an expression, rounded where it is not whole.

        >>> Calculator(CalculatorConfig()).call("(12 + 3) * 4 / 8")
        '7.5'
        """
        written = _THOUSANDS.sub("", arguments.translate(_SIGNS).strip())
        if len(written) > self._config.max_length:
            raise ToolError("too long")
        if not _LEGAL.fullmatch(written):
            raise ToolError("not an expression")
        try:
            tree = ast.parse(written, mode="eval")
        except SyntaxError:
            raise ToolError("not an expression") from None
        except (RecursionError, MemoryError):
            raise ToolError("too deep") from None
        return self._written(_value(tree.body, written, _DEPTH))

    def _written(self, value: Fraction) -> str:
        rounded = round(value, self._config.decimals)
        sign, size = "-" if rounded < 0 else "", abs(rounded)
        whole, rest = divmod(size, 1)
        places = int(rest * 10**self._config.decimals)
        digits = f"{places:0{self._config.decimals}d}".rstrip("0") if places else ""
        return f"{sign}{whole}" + (f".{digits}" if digits else "")


def _value(node: ast.expr, written: str, depth: int) -> Fraction:
    """The value of a part of an expression, of which nothing but arithmetic is known."""
    if not depth:
        raise ToolError("too deep")
    match node:
        case ast.Constant(value=int() | float()):  # and not `...`, which Python takes for one
            # From the text, as a float of the same digits is another number.
            return Fraction(written[node.col_offset : node.end_col_offset])
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            value = _value(operand, written, depth - 1)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            first, second = (_value(side, written, depth - 1) for side in (left, right))
            if not second and isinstance(op, ast.Div | ast.Mod):
                raise ToolError("division by zero")
            return Fraction(_OPERATIONS[type(op)](first, second))
        case _:
            raise ToolError("not an expression")
