"""Rules of recipes whose prompts have pictures: what reads them, and what does not yet."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from rlinf.config.component import illegal
from rlinf.data.pictures import check_folder
from rlinf.errors import in_section
from rlinf.models.language_config import LanguageModelConfig
from rlinf.trainers.config import SequenceConfig
from rlinf.workers.config.answering import ReasoningRolloutConfig


def model_problems(
    model: LanguageModelConfig, trainers: dict[str, SequenceConfig | None]
) -> Iterator[PydanticCustomError]:
    """Of a model that must read pictures, and of its trainers by their sections."""
    if model.architecture is not None and model.architecture.vision is None:
        yield illegal(
            "model.architecture.type",
            f"a model of the family {model.architecture.type} reads text only, and prompts have "
            "pictures",
            hint="qwen2_5_vl or qwen3_vl",
        )
    for name, trainer in trainers.items():
        if trainer is not None and trainer.tensor_parallel_size > 1:
            yield illegal(
                f"{name}.tensor_parallel_size",
                "the part that reads pictures is not divided so",
                hint="nearest: 1, with more ranks",
            )


def rollout_problems(rollout: ReasoningRolloutConfig) -> Iterator[PydanticCustomError]:
    """Of what answers prompts with pictures."""
    if not rollout.engine.reads_pictures:
        why = f"the engine {rollout.engine.type} is given no pictures here"
        yield illegal("rollout.engine.type", why, hint="nearest: hf")
    if rollout.agent is not None:
        why = "conversations with tools have no pictures"
        yield illegal("rollout.agent", why, hint="leave the section out")


def check_model(model: LanguageModelConfig) -> None:
    """Look at the files of a model that must read pictures; ConfigError where it cannot."""
    if model.path is not None and model.architecture is None:
        with in_section("model"):
            check_folder(model.path.expanduser())
