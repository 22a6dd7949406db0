"""What a specification says of reward functions does not depend on where their files lie."""

from __future__ import annotations

from pathlib import Path

from rlinf.rewards.config import RewardConfig


def specified(function: str) -> object:
    section = {
        "functions": {"mine": {"type": "function", "function": function, "options": {"a": 1}}}
    }
    return RewardConfig.model_validate(section).specified()["mine"]


def test_a_file_is_told_by_its_name_and_what_it_holds(tmp_path: Path) -> None:
    found = []
    for folder, text in (
        ("a", "def f(sample): ..."),
        ("b", "def f(sample): ..."),
        ("c", "f = max"),
    ):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "mine.py"
        file.write_text(text)
        found.append(specified(f"{file}:f"))
    assert found[0] == found[1] != found[2]
    assert str(tmp_path) not in str(found)
    assert "mine.py:f " in str(found[0])
    assert "math:sin" in str(specified("math:sin"))
