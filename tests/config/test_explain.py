"""Explain gives type, default, legal values, description, children and the recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from rlinf.config import explain as explain_module
from rlinf.config.base import StrictModel
from rlinf.config.explain import explain
from rlinf.config.reasons import first_sentence
from rlinf.errors import ConfigError
from tests.config.sample import Recipe


@pytest.fixture(autouse=True)
def _ready_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ppo, grpo = tmp_path / "ppo.yaml", tmp_path / "grpo.yaml"
    ppo.write_text("algorithm: {type: ppo, gamma: 0.9}\n", encoding="utf-8")
    grpo.write_text("algorithm: {type: grpo, gamma: 1}\n", encoding="utf-8")
    monkeypatch.setattr(explain_module, "recipe_names", lambda: [str(ppo), str(grpo)])


def test_a_value() -> None:
    (found,) = explain(Recipe, "optimizer.learning_rate")
    assert (found.kind, found.default, found.legal) == ("number", "0.0003", "> 0")
    assert found.description == "Step size."
    (found,) = explain(Recipe, "aggregation")
    assert found.kind == "token_mean | sequence_mean"
    (found,) = explain(Recipe, "hidden")
    assert (found.kind, found.default) == ("list of whole number", "[64, 64]")
    (found,) = explain(Recipe, "seed")
    assert found.default == "required"


def test_text_has_one_backtick_around_what_is_written_so() -> None:
    class Marked(StrictModel):
        file: str
        """Ends in ``.jsonl``."""

    (found,) = explain(Marked, "file")
    assert found.description == "Ends in `.jsonl`."
    assert first_sentence(Marked.model_fields["file"].description or "") == "Ends in `.jsonl`."


def test_a_key_of_several_components_is_explained_for_each() -> None:
    grpo, ppo = explain(Recipe, "algorithm.gamma")
    assert [ppo.owner, grpo.owner] == ["ppo", "grpo"]
    assert [value for _, value in ppo.settings] == ["0.9"]
    assert [value for _, value in grpo.settings] == ["1"]


def test_keys_with_the_same_end_are_explained_each() -> None:
    class Part(StrictModel):
        rate: float = 0.1

    class Whole(StrictModel):
        one: Part = Part()
        two: Part = Part()

    assert [each.key for each in explain(Whole, "rate")] == ["one.rate", "two.rate"]


def test_a_section_lists_its_keys() -> None:
    (found,) = explain(Recipe, "optimizer")
    assert ("learning_rate", "Step size.") in found.children
    (found,) = explain(Recipe, "algorithm")
    assert found.legal == "type: grpo, ppo"
    assert ("gae_lambda (ppo)", "Weight of longer returns.") in found.children


def test_sections_by_names_and_places_of_the_users_choice() -> None:
    class Part(StrictModel):
        size: int = 1
        """How large."""
        double: int = Field(default=2, exclude=True)
        """Follows from the size."""

    class Whole(StrictModel):
        named: dict[str, Part]
        """Parts by name."""
        listed: list[Part]
        """Parts in order."""

    for key, inner in (("named", "named.first.size"), ("listed", "listed.0.size")):
        (found,) = explain(Whole, key)
        assert found.children == (("size", "How large."),)
        (found,) = explain(Whole, inner)
        assert (found.key, found.default) == (f"{key}.size", "1")
    with pytest.raises(ConfigError, match=r"no key `named\.double`"):
        explain(Whole, "named.first.double")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gae_lamda", "did you mean `algorithm.gae_lambda`"),
        ("optimiser", "did you mean `optimizer`"),
        ("qqq", "known: algorithm, global_batch_size"),
    ],
)
def test_unknown_keys_get_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="no key") as caught:
        explain(Recipe, key)
    assert hint in str(caught.value)
