"""Reads the Markdown pages of the project: code blocks, links, commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0] if self.text else ''}"


def blocks() -> list[Block]:
    """Every fenced block of every page."""
    return [
        Block(page, match["info"].strip(), match["text"])
        for page in PAGES
        for match in FENCE.finditer(page.read_text(encoding="utf-8"))
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page: Path) -> Iterator[str]:
    """What stands between single backquotes outside of blocks."""
    yield from re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


def commands() -> Iterator[tuple[Path, str]]:
    """Every command line of ``rlinf``, in blocks and in prose."""
    for block in blocks():
        for line in block.text.splitlines():
            found = re.match(r"^(?:\$ )?(?:\.venv/bin/)?(rlinf .*)$", line)
            if found:
                yield block.page, found[1]
    for page in PAGES:
        yield from ((page, code) for code in inline_code(page) if code.startswith("rlinf "))


def titled(title: str) -> list[Block]:
    """Blocks that are marked with the name of a file."""
    return [block for block in blocks() if f'title="{title}"' in block.info]
