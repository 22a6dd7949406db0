"""What libyaml reads and writes is what PyYAML does."""

from __future__ import annotations

import pytest

from rlinf.config import yaml_source
from rlinf.config.load import find_recipe, recipe_names
from rlinf.config.yaml_source import read_yaml, write_yaml
from rlinf.errors import ConfigError

WRITTEN = {
    "a": ["x" * 100 + " " + "y" * 100, "two\nlines\n", "ünï ✓", "a: b", "", " before", "tab\t"],
    "b": ["'q'", '"q" ' + "w " * 80, "# none", "- x", None, [], {}, "1e-3", "0:30", "on", 1e-5],
    "c": [float("inf"), True, "\u2028 x", "\x07", "a\n\n b\n", "behind \n x", {"x" * 200: 1}],
}


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_source, "_FastLoader", yaml_source._RecipeLoader)
    monkeypatch.setattr(yaml_source, "_FastDumper", yaml_source._RecipeDumper)


def test_recipes_are_read_alike(request: pytest.FixtureRequest) -> None:
    texts = [find_recipe(name).read_text() for name in recipe_names()[::4]]
    texts.append("a: &b {c: 1e-3, d: 010}\ne: {<<: *b, d: 0:30}\nf:\n- {g: on}\n")
    fast = [read_yaml(text, "here") for text in texts]
    request.getfixturevalue("by_python")
    assert fast == [read_yaml(text, "here") for text in texts]
    assert fast[-1][0]["e"] == {"c": 0.001, "d": "0:30"}
    assert fast[-1][1]["f.0.g"] == 4


def test_values_are_written_alike(request: pytest.FixtureRequest) -> None:
    fast = write_yaml(WRITTEN)
    assert read_yaml(fast, "here")[0] == WRITTEN
    request.getfixturevalue("by_python")
    assert fast == write_yaml(WRITTEN)


def test_all_characters_are_written_as_they_are() -> None:
    assert write_yaml({"a": "😀"}) == "a: 😀\n"


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "-\t", "? "])
def test_what_is_nested_too_deep_is_refused(opening: str) -> None:
    """Libyaml would leave its stack, and end the process."""
    with pytest.raises(ConfigError, match="not readable as YAML"):
        read_yaml(opening * 50_000, "here")
