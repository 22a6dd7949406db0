"""Functions of the user's own in files: what the files may do, and which cannot be called."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf.config.user_function import UserFunctionConfig
from rlinf.errors import ConfigError


@pytest.fixture(autouse=True)
def path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def function(folder: Path, text: str, name: str = "own", **options: Any) -> Any:
    """The function of a file with this text."""
    file = folder / "mine.py"
    file.write_text(text)
    return UserFunctionConfig(function=f"{file}:{name}", options=options).load()


def test_a_file_defines_data_classes_and_what_is_pickled(tmp_path: Path) -> None:
    own = function(
        tmp_path,
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Hit:\n"
        "    text: str\n"
        "def own(text):\n"
        "    return Hit(text)\n",
    )
    hit = own("a")
    assert hit.text == "a"
    assert pickle.loads(pickle.dumps(hit)) == hit
    assert pickle.loads(pickle.dumps(own)) is own


def test_a_file_imports_its_neighbours_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "own_neighbour.py").write_text("DOCUMENTS = ['one', 'two']\n")
    own = function(tmp_path, "from own_neighbour import DOCUMENTS\ndef own(n): return DOCUMENTS[n]")
    assert own(1) == "two"
    with pytest.raises(ConfigError, match="there is no module own_stranger"):
        function(tmp_path, "import own_stranger\ndef own(n): ...")


def test_each_load_has_a_state_of_its_own(tmp_path: Path) -> None:
    text = "seen = []\ndef own(item):\n    seen.append(item)\n    return len(seen)\n"
    first, second = function(tmp_path, text), function(tmp_path, text)
    assert [first(1), first(1), second(1)] == [1, 2, 1]


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError"):
        function(tmp_path, "def own(item): ...\n1 / 0\n")
    assert not {name for name in set(sys.modules) - before if "mine" in name}


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        ("async def own(a): ...", {}, r"own is `async`.*asyncio\.run"),
        ("def own(): ...", {}, r"own\(\) cannot be called as own\(…\): too many positional"),
        ("def own(a, b): ...", {}, "missing a required argument: 'b'"),
        (
            "def own(a, *, most=1): ...",
            {"least": 2},
            r"called as own\(…, least=…\): got an unexpected keyword argument 'least'",
        ),
        ("class own: ...", {}, "cannot be called"),
    ],
)
def test_what_cannot_be_called_is_refused(
    tmp_path: Path, text: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        function(tmp_path, text, **options)
    assert refused.value.key == "function"


def test_how_it_is_called_is_known_without_running_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    config = UserFunctionConfig(function=f"{file}:own", options={"most": 2})
    ran = "raise RuntimeError('it ran')\n"
    for text, why in [
        ("async def own(a, most): ...", "own is `async`"),
        (
            "def own(a: 1 / 0, *, least=ran()): ...",
            r"own\(a, \*, least=Ellipsis\) cannot be .*most=…",
        ),
    ]:
        file.write_text(f"{ran}{text}\n")
        with pytest.raises(ConfigError, match=why) as refused:
            config.check()
        assert refused.value.key == "function"
    for text in [
        "def own(a: 1 / 0, *, most=ran()): ...",
        "@given_more\ndef own(): ...",
        "def own(): ...\nown = given_more(own)",
        "if quick:\n    def own(): ...\nelse:\n    from slow import own",
    ]:
        file.write_text(f"{ran}{text}\n")
        config.check()


def test_what_can_be_called_is_taken(tmp_path: Path) -> None:
    text = "def own(a, *, most=1, **rest): return most"
    assert function(tmp_path, text, most=3, other=1)("a", most=3) == 3
    assert function(tmp_path, "own = int")("3") == 3
    assert UserFunctionConfig(function="json:loads").load()("3") == 3
