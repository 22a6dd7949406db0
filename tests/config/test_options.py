"""Dataclasses of options are explained like sections."""

from __future__ import annotations

import dataclasses

from rlinf.config.explain import explain
from rlinf.config.options import field_descriptions
from rlinf.envs.metaworld.adapter import MetaWorldOptions
from rlinf.runners.embodied_config import EmbodiedConfig


@dataclasses.dataclass(frozen=True)
class WithArgs:
    """Options.

    Args:
        size: Height and width
            in pixels.
        camera (str): Which one: front, or back.

    Raises:
        ValueError: never.
    """

    size: int
    camera: str = "front"
    undescribed: bool = False


def test_descriptions_come_from_docstrings_below_the_fields_or_from_args() -> None:
    assert field_descriptions(WithArgs) == {
        "size": "Height and width in pixels.",
        "camera": "Which one: front, or back.",
    }
    described = field_descriptions(MetaWorldOptions)
    assert list(described) == [field.name for field in dataclasses.fields(MetaWorldOptions)]
    assert described["task"] == "Task of MT50, for example ``reach-v3``."


def test_an_option_is_explained_with_type_default_and_description() -> None:
    found = {each.owner: each for each in explain(EmbodiedConfig, "env.train.options.task")}
    assert {"metaworld", "maniskill", "robosuite"} <= found.keys()
    task = found["metaworld"]
    assert (task.owner, task.kind, task.default) == ("metaworld", "text", "required")
    assert task.description == "Task of MT50, for example `reach-v3`."
    assert ("quickstart", "'window-open-v3'") in task.settings
    sizes = {each.owner: each for each in explain(EmbodiedConfig, "options.image_size")}
    size = sizes["metaworld"]
    assert (size.key, size.kind, size.default) == (
        "env.train.options.image_size",
        "whole number",
        "128",
    )


def test_the_options_of_every_adapter_are_listed() -> None:
    (options,) = explain(EmbodiedConfig, "env.train.options")
    assert options.kind == "options of one env type"
    children = dict(options.children)
    assert children["task (metaworld)"] == "Task of MT50, for example `reach-v3`."
    assert "kwargs (gymnasium)" in children
