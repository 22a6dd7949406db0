"""How the verbs write to the terminal: plain text to pipes, tables, and errors in full lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def say(text: str = "") -> None:
    """Write a line to standard output, never wrapped, colours and markup left alone."""
    Console(highlight=False, soft_wrap=True).print(Text(text))


def complain(text: str, *, label: str = "error") -> None:
    """Write a message to standard error under a label."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble((f"{label}: ", "bold red"), text))


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    widths: Sequence[int] | None = None,
) -> None:
    """Write a table to standard output, without a head where all columns are empty.

    ``widths``, of which 0 is any, are the least ones of the columns: tables of the same widths
    continue each other.
    """
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for column, width in zip(columns, widths or [0] * len(columns), strict=True):
        table.add_column(column, overflow="fold", min_width=width or None)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
