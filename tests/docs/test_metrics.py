"""Every metric that the code names has its line on the page of metrics; the page has no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .pages import ROOT

PREFIXES = "actor|critic|rollout|env|eval|train|validation|time|reward|replay"
_LITERAL = re.compile(rf'"((?:{PREFIXES})/[a-z_]+)"')
_TOLD = re.compile(rf"`((?:{PREFIXES})/[A-Za-z_@/]+)`")
_WORD = re.compile(r'["/]([a-z_]+)"')
MADE = ("/NAME", "/KIND", "/TASK", "/STAGE", "/K", "@K")
"""How the page writes what a recipe names."""


def composed(code: str) -> set[str]:
    """Names of metrics whose prefix is put before the keys of a dict: by ``_means``, which takes
    it, or by ``{f"actor/{name}": … for name, each in numbers.items()}``."""
    functions = [f for f in ast.walk(ast.parse(code)) if isinstance(f, ast.FunctionDef)]
    return {
        f"{prefix}/{key}"
        for function in functions
        for prefix, dictionary in _prefixed(function)
        if prefix in PREFIXES.split("|")
        for key in _keys(function, dictionary)
    }


def _prefixed(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Prefixes, and the local names of the dicts whose keys they are put before."""
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(attr="_means"), args=[ast.Name(id=name), *_]):
                yield "actor", name
            case ast.DictComp(
                key=ast.JoinedStr(values=[ast.Constant(value=str(prefix)), *_]),
                generators=[
                    ast.comprehension(iter=ast.Call(func=ast.Attribute(value=ast.Name(id=name))))
                ],
            ):
                yield prefix.rstrip("/"), name


def _keys(function: ast.FunctionDef, dictionary: str) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)):
                found = [each for each in keys if name == dictionary]
            case ast.Subscript(value=ast.Name(id=name), slice=key, ctx=ast.Store()):
                found = [key] if name == dictionary else []
            case _:
                continue
        yield from (each.value for each in found if isinstance(each, ast.Constant))


def test_every_metric_is_explained_and_no_other() -> None:
    files = [path.read_text() for path in sorted((ROOT / "rlinf").rglob("*.py"))]
    code = "\n".join(files)
    put_together = {name for file in files for name in composed(file)}
    assert {"actor/teacher_kl", "actor/dual_clip_fraction", "actor/drift"} < put_together
    written = set(_LITERAL.findall(code)) | put_together
    told = set(_TOLD.findall((ROOT / "docs" / "metrics.md").read_text()))
    assert len(written) > 60
    assert written - told == set()
    words = set(_WORD.findall(code))
    for name in told - written:
        assert name.endswith(MADE) or name.partition("/")[2] in words, f"{name} is no metric"
