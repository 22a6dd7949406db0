"""Configuration of answers in turns; imports no torch, so that recipes are checked at once."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from rlinf.agents.registry import REGISTRY
from rlinf.agents.tool import ToolConfig
from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal

RESULT_TAGS = ("<result>", "</result>")
"""What stands around the reply to a call."""
_TAKEN = {"answer", "result", "think"}


class AgentConfig(StrictModel):
    """Answers in turns: `<NAME>…</NAME>` ends a turn and calls the tool of that name, the reply
    follows as `<result>…</result>`, and the model goes on."""

    tools: dict[str, Annotated[ToolConfig, Component(REGISTRY)]] = Field(min_length=1)
    """The tools by the names under which the model calls them."""
    max_turns: int = Field(default=4, ge=1)
    """Turns of an answer; a call in the last one cuts the answer off."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Tokens at which a turn, and with it the answer, is cut off; null: only
    `rollout.sampling.max_new_tokens` bounds them, which counts replies too."""
    max_reply_tokens: int = Field(default=64, ge=1)
    """Tokens of a reply between its tags; what is longer is cut off."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name in self.tools:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in _TAKEN:
                raise illegal(
                    f"tools.{name}",
                    "cannot be the name of a tool",
                    hint="small letters, digits and _, and none of " + ", ".join(sorted(_TAKEN)),
                )
        return self

    @property
    def whole(self) -> tuple[str, ...]:
        """Texts that a tokenizer that is trained for the run should take for one token each."""
        return (*(t for name in self.tools for t in (f"<{name}>", f"</{name}>")), *RESULT_TAGS)
