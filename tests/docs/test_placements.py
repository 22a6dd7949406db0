"""The placements of the page of concepts are those that a recipe takes."""

from __future__ import annotations

import re

import pytest

from rlinf.config.yaml_source import read_value
from rlinf.scheduler.component_grammar import parse_component_placement

from .pages import ROOT

_ROW = re.compile(r"^\| `(\{.*?\})`.*\| (\w+) \|$", re.MULTILINE)
TABLE = _ROW.findall((ROOT / "docs" / "concepts.md").read_text())


@pytest.mark.parametrize(("text", "called"), TABLE)
def test_a_placement_is_legal_and_called_by_its_name(text: str, called: str) -> None:
    entries = parse_component_placement(read_value(text, "docs/concepts.md"))
    assert {name for entry in entries for name in entry.components} == {"env", "rollout", "actor"}
    used = [device for entry in entries for ranks in entry.processes() for device in ranks]
    kind = "collocated" if len(entries) == 1 else "hybrid"
    assert called == ("disaggregated" if len(set(used)) == len(used) == 3 else kind)


def test_each_kind_of_placement_is_shown() -> None:
    assert {called for _, called in TABLE} == {"collocated", "hybrid", "disaggregated"}
