"""Every metric that the code names has its line on the page of metrics; the page has no other."""

from __future__ import annotations

import re

from .pages import ROOT

PREFIXES = "actor|critic|rollout|env|eval|train|validation|time|reward|replay"
_LITERAL = re.compile(rf'"((?:{PREFIXES})/[a-z_]+)"')
_TOLD = re.compile(rf"`((?:{PREFIXES})/[A-Za-z_@/]+)`")
_WORD = re.compile(r'["/]([a-z_]+)"')
MADE = ("/NAME", "/KIND", "/TASK", "/STAGE", "/K", "@K")
"""How the page writes what a recipe names."""


def test_every_metric_is_explained_and_no_other() -> None:
    code = "\n".join(path.read_text() for path in sorted((ROOT / "rlinf").rglob("*.py")))
    written = set(_LITERAL.findall(code))
    told = set(_TOLD.findall((ROOT / "docs" / "metrics.md").read_text()))
    assert len(written) > 60
    assert written - told == set()
    words = set(_WORD.findall(code))
    for name in told - written:
        assert name.endswith(MADE) or name.partition("/")[2] in words, f"{name} is no metric"
