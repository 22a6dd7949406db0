"""Types are strict, YAML's forms are accepted, and a written config reads back equal."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pydantic
import pytest
from pydantic import Field

from rlinf.config.base import StrictModel
from rlinf.config.dump import config_hash, to_data, to_yaml
from rlinf.config.validate import validate
from rlinf.config.yaml_source import read_yaml
from rlinf.errors import ConfigError
from tests.config.sample import GOOD, Grpo, Ppo, Recipe


class Colour(Enum):
    RED = "red"


class Forms(StrictModel):
    ratio: float = 1
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (0, "")
    nested: tuple[tuple[int, int], ...] | None = None
    path: Path | None = None
    colour: Colour = Colour.RED
    table: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    paths: list[Path] = Field(default_factory=list)
    options: dict[str, Any] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("ratio", 2, 2.0),
        ("sizes", [1, 2], (1, 2)),
        ("pair", [1, "a"], (1, "a")),
        ("nested", [[1, 2], [3, 4]], ((1, 2), (3, 4))),
        ("nested", None, None),
        ("path", "a/b", Path("a/b")),
        ("colour", "red", Colour.RED),
        ("table", {"a": [1, 2.5]}, {"a": (1.0, 2.5)}),
        ("paths", ["a"], [Path("a")]),
    ],
)
def test_yaml_forms_are_accepted(key: str, given: Any, expected: Any) -> None:
    assert getattr(Forms(**{key: given}), key) == expected


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("ratio", "1"),
        ("ratio", True),
        ("ratio", float("inf")),
        ("ratio", float("nan")),
        ("sizes", ["1"]),
        ("sizes", [1.0]),
        ("sizes", 1),
        ("pair", [1]),
        ("nested", [1, 2]),
        ("path", 3),
        ("colour", "blue"),
        ("unknown", 1),
    ],
)
def test_nothing_else_is_converted(key: str, given: Any) -> None:
    with pytest.raises(pydantic.ValidationError):
        Forms(**{key: given})


def test_numbers_that_are_not_finite_are_refused_in_free_options_too() -> None:
    assert Forms(options={"range": [0.7, 1e9], "on": True}).options["range"] == [0.7, 1e9]
    for number in ("inf", "-inf", "nan"):
        given = {"options": {"arguments": {"range": [0.7, float(number)]}}}
        with pytest.raises(ConfigError, match=r"options\.arguments\.range\.1 = .*be a finite"):
            validate(Forms, given, "forms")


def test_keys_that_are_no_text_are_refused_in_free_options_too() -> None:
    """JSON, by which options travel, makes them texts, and a function would not find them."""
    for given in ({1: 0.5}, {"labels": {1: 0.5}}, {"labels": [{"a": {1: 0.5}}]}):
        with pytest.raises(ConfigError, match=r'\.1: the keys .*in quotes: "1"'):
            validate(Forms, {"options": given}, "forms")
    with pytest.raises(ConfigError, match='in quotes: "true"'):
        validate(Forms, {"options": {"labels": {True: 0.5}}}, "forms")
    assert Forms(options={"labels": {"1": 0.5}}).options["labels"] == {"1": 0.5}


def test_config_is_immutable_and_described() -> None:
    config = Recipe(**GOOD)
    with pytest.raises(pydantic.ValidationError):
        config.seed = 2
    assert Recipe.model_fields["seed"].description == "Seed of everything."


def test_component_section_has_the_class_of_its_type() -> None:
    assert isinstance(Recipe(**GOOD).algorithm, Ppo)
    grpo = {"type": "grpo", "group_size": 4}
    assert isinstance(Recipe(**{**GOOD, "algorithm": grpo}).algorithm, Grpo)
    assert Recipe(seed=1, algorithm=Ppo(type="ppo", clip=0.2)).algorithm == Ppo(
        type="ppo", clip=0.2
    )


def test_written_config_reads_back_equal() -> None:
    config = Recipe(
        seed=1,
        name="1:30",
        algorithm=Ppo(type="ppo", clip=1e-5),
        optimizer={"learning_rate": 1e-8, "pairs": [[1, 0.5]], "warm_start": "a/b"},
        limits={"a": [1]},
    )
    data, _ = read_yaml(to_yaml(config), "written")
    assert validate(Recipe, data, "written") == config


@pytest.mark.parametrize("text", ["1e-3", "0x10", "010", "yes", "null", "1_000", "~", "", "0-3"])
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    config = Recipe(**{**GOOD, "name": text})
    assert read_yaml(to_yaml(config), "written")[0]["name"] == text


def test_hash_depends_on_values_alone() -> None:
    first = Recipe(seed=1, algorithm={"type": "ppo", "gamma": 1})
    second = Recipe(algorithm={"gamma": 1.0, "type": "ppo"}, seed=1, samples=800)
    assert config_hash(first) == config_hash(second)
    assert len(config_hash(first)) == 64
    assert config_hash(first) != config_hash(Recipe(**GOOD))
    assert to_data(first)["algorithm"]["gae_lambda"] == 0.95
