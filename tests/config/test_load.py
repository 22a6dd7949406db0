"""Recipes: found, stacked, overridden, and refused with the place of the mistake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rlinf.config import load
from rlinf.config.dump import to_data, to_yaml
from rlinf.config.load import find_recipe, load_recipe, recipe_names
from rlinf.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory beside a folder of ready recipes."""
    (tmp_path / "ready" / "robots").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(load, "recipes_directory", lambda: tmp_path / "ready")
    monkeypatch.chdir(tmp_path / "work")
    write(tmp_path / "ready/quickstart.yaml", "seed: 1\nmodel: {type: mlp, hidden: [64, 64]}\n")
    write(tmp_path / "ready/robots/arm.yaml", "base: quickstart\nmodel: {hidden: [8]}\n")
    return tmp_path / "work"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_value_may_be_left_to_the_recipe_above(folder: Path) -> None:
    write(folder / "template.yaml", "base: quickstart\nmodel:\n  hidden: ???\n")
    write(folder / "mine.yaml", "base: template.yaml\nmodel: {hidden: [8]}\n")
    assert load_recipe("mine.yaml").data["model"]["hidden"] == [8]
    assert load_recipe("template.yaml", ["model.hidden=[4]"]).data["model"]["hidden"] == [4]


def test_recipe_is_found_by_name_and_by_file(folder: Path) -> None:
    assert recipe_names() == ["quickstart", "robots/arm"]
    by_name = load_recipe("robots/arm")
    assert by_name.data == {"seed": 1, "model": {"type": "mlp", "hidden": [8]}}
    assert by_name.name == "recipes/robots/arm.yaml"
    assert load_recipe("recipes/robots/arm.yaml").data == by_name.data
    write(folder / "mine.yaml", "base: robots/arm\nseed: 2\n")
    assert load_recipe("mine.yaml").data == {**by_name.data, "seed": 2}


def test_a_long_recipe_looks_for_what_it_replaces_only_where_that_was_a_section() -> None:
    """Not through all that was said before, for every key."""

    class Sources(dict[str, Any]):
        reads = 0

        def __iter__(self) -> Iterator[str]:
            self.reads += 1
            return super().__iter__()

    layers, sources = load._Layers(), Sources()
    layers.sources = sources
    layers.add({"a": {f"b{n}": n for n in range(200)}, "c": {"d": 1}}, "low", {})
    layers.add({"a": {f"b{n}": -n for n in range(200)}, "c": 3}, "top", {})
    assert "c.d" not in sources
    assert str(sources["a.b7"]) == "top"
    assert sources.reads <= 4


def test_base_is_relative_to_the_file_that_names_it(folder: Path) -> None:
    (folder / "sub").mkdir()
    write(folder / "sub/low.yaml", "a: {b: 1, c: 2}\n")
    write(folder / "sub/top.yaml", "base: low.yaml\na: {c: 3}\n")
    recipe = load_recipe("sub/top.yaml")
    assert recipe.data == {"a": {"b": 1, "c": 3}}
    assert str(recipe.source_of("a.b")) == "sub/low.yaml line 1"
    assert str(recipe.source_of("a.c")) == "sub/top.yaml line 2"


def test_a_file_can_drop_what_its_base_says(folder: Path) -> None:
    write(folder / "mine.yaml", "base: quickstart\nwithout: [model]\nmodel: {type: cnn}\n")
    assert load_recipe("mine.yaml").data == {"seed": 1, "model": {"type": "cnn"}}
    assert load_recipe("quickstart", ["~model.hidden"]).data["model"] == {"type": "mlp"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("-1.5E3", -1500.0),
        ("1.", 1.0),
        ("0-3", "0-3"),
        ("0:0-1", "0:0-1"),
        ("1:30", "1:30"),
        ("0-1:0-3,3-5", "0-1:0-3,3-5"),
        ("null", None),
        ("", None),
        ("true", True),
        ("on", "on"),
        ("'3'", "3"),
        ("[1, 2]", [1, 2]),
        ("{a: 1}", {"a": 1}),
        ("door-close-v3", "door-close-v3"),
        ("a=b", "a=b"),
        ("010", 10),
        (".inf", float("inf")),
    ],
)
def test_override_values_are_typed_as_yaml(folder: Path, text: str, expected: Any) -> None:
    recipe = load_recipe("quickstart", [f"model.x={text}"])
    assert recipe.data["model"]["x"] == expected
    assert type(recipe.data["model"]["x"]) is type(expected)
    assert recipe.source_of("model.x").where == "command line"


def test_a_list_takes_the_place_of_a_section_in_a_list_and_the_other_way_round(
    folder: Path,
) -> None:
    """Which is wrong there is told by the config that it is checked against."""
    write(folder / "mine.yaml", "env: [{options: {a: 1}, names: [x]}]\n")
    data = load_recipe("mine.yaml", ["env.0.options=[2]", "env.0.names={b: 3}"]).data
    assert data["env"] == [{"options": [2], "names": {"b": 3}}]


def test_later_layers_win_and_lists_are_replaced(folder: Path) -> None:
    recipe = load_recipe("quickstart", ["seed=2", "model.hidden=[1]", "seed=3"])
    assert recipe.data == {"seed": 3, "model": {"type": "mlp", "hidden": [1]}}
    assert recipe.source_of("model.type").line == 2


def test_a_placement_of_components_is_replaced_and_its_entries_are_not(folder: Path) -> None:
    placed = "seed: 1\ncluster: {cpus: 4, component_placement: {'actor,rollout': 0-1, env: 2}}\n"
    write(folder / "base.yaml", placed)
    other = write(
        folder / "other.yaml", "base: base.yaml\ncluster: {component_placement: {actor: 1}}\n"
    )
    assert load_recipe(str(other)).data["cluster"] == {
        "cpus": 4,
        "component_placement": {"actor": 1},
    }
    for word in ("cluster.component_placement={env: 0}", "cluster={component_placement: {env: 0}}"):
        loaded = load_recipe(str(other), [word])
        assert loaded.data["cluster"] == {"cpus": 4, "component_placement": {"env": 0}}
        assert str(loaded.source_of("cluster.component_placement.env")) == "command line"
    added = load_recipe(str(other), ["cluster.component_placement.env=0", "cluster.cpus=2"])
    assert added.data["cluster"] == {"cpus": 2, "component_placement": {"actor": 1, "env": 0}}


def test_an_interpolation_that_is_not_known_is_told_of_those_that_are(folder: Path) -> None:
    (folder / "own.yaml").write_text('seed: "${subtract:20,4}"\n')
    with pytest.raises(ConfigError, match=r"type subtract; known: \$\{a.b\} of another key"):
        load_recipe(str(folder / "own.yaml"))


def test_interpolation_takes_a_value_that_is_written_once(folder: Path) -> None:
    write(folder / "mine.yaml", "a: 3\nb: {c: '${a}'}\n")
    assert load_recipe("mine.yaml", ["a=4"]).data == {"a": 4, "b": {"c": 4}}


def test_a_section_takes_what_another_says_and_changes_some_of_it(folder: Path) -> None:
    write(folder / "r.yaml", "a: &a\n  x: 1\n  y: {z: 2}\nb:\n  <<: *a\n  x: 3\n")
    loaded = load_recipe("r.yaml", ["c={<<: {d: 1}, d: 2}"])
    assert loaded.data["b"] == {"x": 3, "y": {"z": 2}}
    assert loaded.data["c"] == {"d": 2}
    assert [str(loaded.source_of(f"b.{key}"))[-6:] for key in ("x", "y.z")] == ["line 6", "line 3"]


@pytest.mark.parametrize("text", ["${seed}", r"\${seed} a\\${b:c}\d\\", "${", "$x", "a: 'b'"])
def test_a_config_that_is_written_reads_back_equal(folder: Path, text: str) -> None:
    class Config(BaseModel):
        seed: int = 3
        text: str
        several: list[dict[str, str]]

    config = Config(text=text, several=[{"x": text}])
    write(folder / "r.yaml", to_yaml(config))
    assert load_recipe("r.yaml").data == to_data(config)


@pytest.mark.parametrize(
    ("files", "arguments", "parts"),
    [
        ({}, ["quikstart"], ["no recipe 'quikstart'", "did you mean `quickstart`?"]),
        ({}, ["nowhere.yaml"], ["no file or recipe 'nowhere.yaml'", "rlinf list recipes"]),
        ({"mine.yaml": "a: 1\n"}, ["mine"], ["no recipe 'mine'", "the file `mine.yaml`?"]),
        ({"in/mine.yaml": "a: 1\n"}, ["in/mien.yml"], ["did you mean the file `in/mine.yaml`?"]),
        ({"r.yaml": "a: 1\na: 2\n"}, ["r.yaml"], ["r.yaml line 2", "`a` is given twice"]),
        ({"r.yaml": "a:\n  b: 1\n  b: 2\n"}, ["r.yaml"], ["line 3", "`a.b` is given twice"]),
        (
            {"r.yaml": "b:\n  <<: {c: 1}\n  d: 2\n  d: 3\n"},
            ["r.yaml"],
            ["line 4", "`b.d` is given"],
        ),
        ({"r.yaml": "a: {true: 8}\n"}, ["r.yaml"], ["the key `true` is true or false", "quotes"]),
        ({"r.yaml": "a:\n  ~: 8\n"}, ["r.yaml"], ["the key `~` is null to YAML", "(line 2)"]),
        ({"r.yaml": "a: [1\n"}, ["r.yaml"], ["r.yaml", "not readable as YAML"]),
        ({"r.yaml": "\tb: 1\n"}, ["r.yaml"], ["r.yaml", "a tab in line 1", "by spaces"]),
        ({"r.yaml": "a:\n\tb: 1\n"}, ["r.yaml"], ["r.yaml", "a tab in line 2", "by spaces"]),
        ({"r.yaml": "- 1\n"}, ["r.yaml"], ["must be a mapping"]),
        ({"r.yaml": "a: &a [*a]\n"}, ["r.yaml"], ["r.yaml", "not readable", "recursive"]),
        ({"r.yaml": "a: &a {b: *a}\n"}, ["r.yaml"], ["r.yaml", "not readable", "recursive"]),
        ({"r.yaml": f"a: {'9' * 5000}\n"}, ["r.yaml"], ["r.yaml", "not readable", "digits"]),
        ({"r.yaml": f"a: {'[' * 5000}\n"}, ["r.yaml"], ["r.yaml", "not readable", "recursion"]),
        ({"folder/r.yaml": "a: 1\n"}, ["folder"], ["'folder' is a directory", "ends in .yaml"]),
        ({"r.yaml": "base: gone\n"}, ["r.yaml"], ["r.yaml line 1", "no recipe 'gone'"]),
        ({"r.yaml": "base: [a]\n"}, ["r.yaml"], ["r.yaml line 1", "must be one recipe"]),
        (
            {"a.yaml": "base: b.yaml\n", "b.yaml": "base: a.yaml\n"},
            ["a.yaml"],
            ["form a circle", "a.yaml -> b.yaml -> a.yaml"],
        ),
        ({"r.yaml": "a: ${b}\n"}, ["r.yaml"], ["`a`", "'b' not found"]),
        ({"r.txt": "a: 1\n"}, ["r.txt"], ["must end in .yaml"]),
        ({"r.yaml": "without: [x.y]\n"}, ["r.yaml"], ["r.yaml line 1", "nothing sets `x.y`"]),
        ({"r.yaml": "without: x\n"}, ["r.yaml"], ["must be a list of keys"]),
        ({}, ["quickstart", "seed"], ["command line", "'seed'", "form key=value"]),
        ({}, ["quickstart", "=3"], ["form key=value"]),
        ({}, ["quickstart", "a..b=3"], ["form key=value"]),
        ({}, ["quickstart", "seed=[1"], ["command line: seed", "not a YAML value"]),
        ({}, ["quickstart", "seed=\0"], ["command line: seed", "not a YAML value"]),
        ({}, ["quickstart", "seed=\udcff"], ["command line: seed", "not a YAML value"]),
        ({}, ["quickstart", "a={b:1}"], ["command line: a", "`b:1` needs a space"]),
        ({}, ["quickstart", "a={b: 1, b: 2}"], ["command line: a", "`b` is given twice"]),
        (
            {"r.yaml": "base: quickstart\nmodel:\n  type: ???\n"},
            ["r.yaml"],
            ["r.yaml line 3", "`model.type`", "`???` stands for a value that is missing"],
        ),
        ({}, ["quickstart", "seed=???"], ["command line: `seed`", "give one"]),
        ({}, ["quickstart", "a=[{b: {c: 1, c: 1}}]"], ["command line: a", "`c` is given twice"]),
        ({"r.yaml": "a: {b: {c:d}}\n"}, ["r.yaml"], ["`c:d` needs a space", "line 1"]),
        ({}, ["quickstart", "seed.x=1"], ["`seed` is the value 1", "quickstart.yaml line 1"]),
        (
            {"r.yaml": "sets: [{path: a}, {path: b}]\n"},
            ["r.yaml", "~sets.1"],
            ["`sets.1` is an entry of a list", "sets=…"],
        ),
        (
            {"r.yaml": "sets: [{path: a}]\n"},
            ["r.yaml", "sets.0.path=!!timestamp 2020-01-01"],
            ["command line: Value 'date' is not a supported primitive type"],
        ),
        ({}, ["quickstart", "seed=!!timestamp 2020"], ["seed", "that the tag before it"]),
        ({"r.yaml": "a: !!bool x\n"}, ["r.yaml"], ["r.yaml", "that the tag before it"]),
        (
            {"r.yaml": "defaults:\n  - a@b: c\nx: ${subtract:${y}, 1}\n"},
            ["r.yaml"],
            ["r.yaml line 1: `defaults` is of Hydra", "compose it first", "--resolve", "`base:`"],
        ),
        (
            {"r.yaml": "seed: 1\nhydra:\n  searchpath: ['file://${oc.env:NO_SUCH}/x']\n"},
            ["r.yaml"],
            ["r.yaml line 2: `hydra` is of Hydra", "compose it first"],
        ),
        ({}, ["quickstart", "~model.hiden"], ["nothing sets", "did you mean `model.hidden`?"]),
    ],
)
def test_refusals_name_the_place_and_the_remedy(
    folder: Path, files: dict[str, str], arguments: list[str], parts: list[str]
) -> None:
    for name, text in files.items():
        write(folder / name, text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(arguments[0], arguments[1:])
    for part in parts:
        assert part in str(caught.value)


def test_unreadable_files_are_refused(folder: Path) -> None:
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.yaml: cannot be read"):
        load_recipe("bytes.yaml")


def test_every_ready_recipe_can_be_read() -> None:
    for name in recipe_names():
        assert find_recipe(name).is_file()
        assert "task" in load_recipe(name).data
