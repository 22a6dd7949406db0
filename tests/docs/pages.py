"""Reads the Markdown pages of the project: code blocks, links, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
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
        for line in _joined(block).splitlines():
            found = re.match(r"^(?:\$ )?(?:\.venv/bin/)?(rlinf .*)$", line)
            if found:
                yield block.page, found[1]
    for page in PAGES:
        yield from ((page, code) for code in inline_code(page) if code.startswith("rlinf "))


def _joined(block: Block) -> str:
    """The text with lines that a backslash continues in one."""
    return re.sub(r"\\\n *", " ", block.text)


def files_of(block: Block) -> dict[str, str]:
    """Recipes that the page shows before: blocks marked with a file name without a folder."""
    found = {}
    for other in blocks():
        title = re.search(r'title="([\w.-]+\.yaml)"', other.info)
        if other.page == block.page and title:
            found[title[1]] = other.text
    return found


def trainings(recipes: Iterable[str]) -> list[tuple[Block, str]]:
    """Shell lines that train by a ready recipe, or by one that their page shows."""
    found = []
    for block in blocks():
        for line in _joined(block).splitlines() if block.info == "bash" else ():
            words = shlex.split(line, comments=True)
            known = {*recipes, *files_of(block)}
            if (
                words[:2] == ["rlinf", "train"]
                and known & {*words[2:3]}
                and "DIRECTORY" not in line
            ):
                found.append((block, line))
    return found
