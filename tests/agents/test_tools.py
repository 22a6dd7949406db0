"""Tools by name: those of the project, and those of packages outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from rlinf.agents.tool import REGISTRY, AgentConfig
from rlinf.cli.main import main
from tests.packages import write_entry_points

MODULE = '''
"""Says how long a text is."""

from typing import Literal

from rlinf.agents.tool import Tool, ToolConfig, ToolError


class LengthConfig(ToolConfig):
    """Counts characters."""

    implementation = "length_tool:Length"
    type: Literal["length"] = "length"
    """Which tool this section configures."""
    most: int = 9
    """Longest text."""


class Length(Tool):
    """Counts characters."""

    alphabet = "to long"

    def __init__(self, config: LengthConfig) -> None:
        self._most = config.most

    def call(self, arguments: str) -> str:
        """The number of characters."""
        if len(arguments) > self._most:
            raise ToolError("too long")
        return str(len(arguments))
'''


def test_the_project_has_a_calculator(capsys: pytest.CaptureFixture[str]) -> None:
    assert "calculator" in REGISTRY.names()
    assert main(["list", "tools"]) == 0
    assert "Numbers, + - * / %, and brackets." in capsys.readouterr().out


def test_a_tool_of_a_package_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "length_tool.py").write_text(MODULE)
    points = {"rlinf.tools": {"length": "length_tool:LengthConfig"}}
    write_entry_points(tmp_path, "length-tool", points)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = AgentConfig(tools={"len": {"type": "length", "most": 4}})
    assert config.whole == ("<len>", "</len>", "<result>", "</result>")
    assert config.tools["len"].build().call("abc") == "3"
    with pytest.raises(ValidationError, match="most_"):
        AgentConfig(tools={"len": {"type": "length", "most_": 4}})


def test_marks_of_the_form_of_a_reply_are_whole() -> None:
    config = AgentConfig(tools={"calc": {"type": "calculator"}}, reply="<a>\n<b>tool {}</b><a>")
    assert config.whole == ("<calc>", "</calc>", "<a>", "<b>", "</b>")
    assert config.around_reply == ("<a>\n<b>tool ", "</b><a>")


@pytest.mark.parametrize("form", ["<result></result>", "{}{}", "{}", ""])
def test_a_form_has_one_place_for_the_reply(form: str) -> None:
    with pytest.raises(ValidationError, match=r"needs one \{\}"):
        AgentConfig(tools={"calc": {"type": "calculator"}}, reply=form)


@pytest.mark.parametrize("name", ["Calc", "calc>", "", "result", "answer", "1st"])
def test_names_that_cannot_be_marks(name: str) -> None:
    with pytest.raises(ValidationError, match="cannot be the name of a tool"):
        AgentConfig(tools={name: {"type": "calculator"}})


def test_unknown_and_no_tools() -> None:
    with pytest.raises(ValidationError, match="unknown tool `calculater`"):
        AgentConfig(tools={"calc": {"type": "calculater"}})
    with pytest.raises(ValidationError, match="tools"):
        AgentConfig(tools={})
