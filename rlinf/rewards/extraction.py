"""Where the answer stands in a completion."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\f?boxed\s*\{")
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """Return what the last ``\\boxed{…}`` holds, or None if there is none.

    Braces inside are matched; a box that the end of the text cuts off does not count.
    """
    for start in reversed([match.end() for match in _BOXED.finditer(text)]):
        depth = 1
        position = start
        while position < len(text) and depth:
            character = text[position]
            if character == "\\":
                position += 1  # the next character is not a brace that groups
            elif character in "{}":
                depth += 1 if character == "{" else -1
            position += 1
        if depth == 0:
            return text[start : position - 1]
    return None


def last_answer(text: str) -> str | None:
    """Return what the last ``<answer>…</answer>`` holds, or None if there is none."""
    found = _ANSWER.findall(text)
    return found[-1] if found else None


def last_line(text: str) -> str | None:
    """Return the last line that is not empty, or None if all are."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def references(answer: object) -> list[str]:
    """Return the references of an answer: a text, a number, or a list of such.

    Raises:
        ValueError: It is something else, or empty.
    """
    items = answer if isinstance(answer, list | tuple) else [answer]
    found = [str(item) for item in items if isinstance(item, str | int | float) and item != ""]
    if not found or len(found) != len(items):
        raise ValueError(f"the answer is no text, number or list of such: {str(answer)[:100]!r}")
    return found


def code_block(text: str) -> str | None:
    """Return the last fenced block of Python, or without one the last fenced block of any kind."""
    blocks = re.findall(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```", text, re.DOTALL | re.MULTILINE)
    if not blocks:
        return None
    python = [code for kind, code in blocks if kind.strip().lower() in ("python", "py", "python3")]
    found: str = python[-1] if python else blocks[-1][1]
    return found
