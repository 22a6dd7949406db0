"""One message names every problem: file, key, value, why, and the nearest legal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from rlinf.config.base import StrictModel
from rlinf.config.load import load_recipe
from rlinf.config.nearest import nearest_divisors, nearest_multiples
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from tests.config.sample import GOOD, Recipe


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"optimizer.learning_rate": 0.1},
            "a key with dots is one name in a file; write `optimizer: {learning_rate: 0.1}`",
        ),
        ({"sed": 1}, "sed = 1: the config has no key `sed`; did you mean `seed`?"),
        (
            {"gae_lambda": 0.9},
            "gae_lambda = 0.9: the config has no key `gae_lambda`; "
            "did you mean `algorithm.gae_lambda`?",
        ),
        (
            {"algorithm": {"type": "ppo", "gae_lamda": 0.9}},
            "algorithm.gae_lamda = 0.9: section `algorithm` of type ppo has no key "
            "`gae_lamda`; did you mean `gae_lambda`?",
        ),
        (
            {"algorithm": {"type": "grpo", "group_size": 2, "gae_lambda": 0.9}},
            "section `algorithm` of type grpo has no key `gae_lambda`; known: gamma, group_size",
        ),
        (
            {"algorithm": {"type": "pppo"}},
            "algorithm.type = 'pppo': unknown algorithm `pppo`; did you",
        ),
        ({"algorithm": {}}, "algorithm.type: the section does not say which algorithm"),
        ({"algorithm": "ppo"}, "algorithm = 'ppo': must be a section with a `type` key"),
        ({"algorithm": {"type": "grpo"}}, "algorithm.group_size: is required"),
        ({"seed": -1}, "seed = -1: must be >= 0; nearest: 0"),
        ({"seed": None}, "seed = null: must be a whole number; it is empty"),
        ({"seed": "3"}, "seed = '3': must be a whole number, not text; without quotes: 3, or"),
        ({"seed": "None"}, "seed = 'None': must be a whole number; for no value write null"),
        ({"seed": 2.5}, "seed = 2.5: must be a whole number; nearest: 2"),
        ({"seed": True}, "seed = true: must be a whole number, not true"),
        ({"name": 7}, 'name = 7: must be text; in quotes: "7"'),
        (
            {"optimizer": None},
            "optimizer = null: must be a section (key: value); it is empty; leave it out "
            "(`~optimizer` drops what a recipe says)",
        ),
        ({"optimizer": {"fused": "yes"}}, "must be true or false, not text; write true"),
        ({"optimizer": {"learning_rate": 0}}, "optimizer.learning_rate = 0: must be > 0"),
        (
            {"optimizer": {"hidden": 64}},
            "optimizer.hidden = 64: must be a list, for example [64]",
        ),
        ({"optimizer": {"hidden": "(64, 32)"}}, "must be a list, for example [64, 32]"),
        ({"optimizer": {"learning_rate": float("inf")}}, "must be a finite number"),
        ({"optimizer": {"learning_rate": "nan"}}, "must be a number, not text"),
        ({"optimizer": {"hidden": [64, "x"]}}, "optimizer.hidden.1 = 'x': must be a whole"),
        ({"optimizer": {"warm_start": 3}}, "optimizer.warm_start = 3: must be a path"),
        (
            {"algorithm": {"type": "ppo", "aggregation": "token-mean"}},
            "must be one of: token_mean, sequence_mean; did you mean `token_mean`?",
        ),
        (
            {"algorithm": {"type": "ppo", "target": "x"}},
            "a whole number, not text, or must be auto",
        ),
        (
            {"global_batch_size": 300},
            "global_batch_size = 300: does not divide 800 samples; nearest: 200, 400",
        ),
        ({"samples": 801}, "global_batch_size: does not divide 801 samples; nearest: 89, 267"),
    ],
)
def test_each_problem_is_named(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Recipe, {**GOOD, **change}, "r")
    assert line in str(caught.value)


def test_all_problems_come_at_once_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "seed: x\nalgorithm:\n  type: ppo\n  gamma: 2\noptimizer: {fussed: true}\n",
        encoding="utf-8",
    )
    recipe = load_recipe(str(path), ["samples=1.5"])
    with pytest.raises(ConfigError) as caught:
        validate(Recipe, recipe.data, recipe)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: 4 problems"
    assert f"seed = 'x' ({path} line 1)" in lines[1]
    assert "samples = 1.5 (command line)" in lines[2]
    assert f"optimizer.fussed = true ({path} line 5)" in lines[3]
    assert f"algorithm.gamma = 2 ({path} line 4): must be <= 1" in lines[4]


def test_nearest_divisors_and_multiples_against_brute_force() -> None:
    for total in range(1, 60):
        divisors = [d for d in range(1, total + 1) if total % d == 0]
        for wanted in range(-2, 70):
            below = max((d for d in divisors if d <= wanted), default=None)
            above = min((d for d in divisors if d >= wanted), default=None)
            expected = [d for d in dict.fromkeys((below, above)) if d is not None]
            assert nearest_divisors(total, wanted) == expected
    assert nearest_divisors(0, 3) == []
    assert nearest_multiples(8, 30) == [24, 32]
    assert nearest_multiples(8, 32) == [32]
    assert nearest_multiples(8, 3) == [8]


class Sizes(StrictModel):
    sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "r: 1 problem\n  sizes = []: must hold at least 1 item"),
        ([0], "r: 1 problem\n  sizes.0 = 0: must be >= 1; nearest: 1"),
    ],
)
def test_items_that_are_wrong_are_not_missing_as_well(sizes: list[int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Sizes, {"sizes": sizes}, "r")
    assert str(caught.value) == message
