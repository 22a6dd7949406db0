"""Where figures are from: no figure of a scenario goes without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal


class Origin(StrictModel):
    """Where some figures are from."""

    of: tuple[str, ...] = Field(min_length=1)
    """Their keys; those of a section with dots, such as ``generation.max_running``."""
    kind: Literal["published", "derived", "assumed"]
    """``published`` by others, ``derived`` from what they published, or ``assumed`` by us."""
    why: str = ""
    """Where it is published, how it follows, or why it may be assumed; only what is assumed can
    do without."""

    @model_validator(mode="after")
    def _reason(self) -> Origin:
        if self.kind != "assumed" and not self.why:
            raise illegal("why", f"what is {self.kind} needs a sentence that says where or how")
        return self

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.why else self.kind


def check_origins(
    section: StrictModel, origins: Sequence[Origin], *, without: Sequence[str] = ()
) -> None:
    """Refuse a section in which a figure has no origin, or several, or an origin no figure.

    Args:
        section: The section; what it leaves to a default is no figure.
        origins: Origins of its figures.
        without: Keys that are no figures.

    Raises:
        pydantic_core.PydanticCustomError: It does not add up; the key is named.
    """
    stated = list(_stated(section, without))
    named = Counter(key for origin in origins for key in origin.of)
    for key in stated:
        if named[key] != 1:
            why = "has no origin" if not named[key] else f"has {named[key]} origins"
            raise illegal("origins", f"`{key}` {why}", hint="give each figure one")
    for key in named:
        if key not in stated:
            raise illegal("origins", f"`{key}` is no figure that the section gives")


def _stated(section: StrictModel, without: Sequence[str]) -> Iterator[str]:
    for key in sorted(section.model_fields_set - set(without)):
        value = getattr(section, key)
        if isinstance(value, StrictModel):
            yield from (f"{key}.{inner}" for inner in _stated(value, ()))
        else:
            yield key


def origin_of(origins: Sequence[Origin], *keys: str) -> str:
    """The origins of some figures in one text, each once."""
    found = [str(origin) for origin in origins if set(origin.of) & set(keys)]
    return "; ".join(dict.fromkeys(found))
