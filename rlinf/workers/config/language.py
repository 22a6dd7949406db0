"""What recipes of language models have in common: pictures in prompts, ranks, tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

from rlinf.config.component import illegal
from rlinf.data.pictures import check_folder
from rlinf.errors import ConfigError, in_section
from rlinf.flow.placed_config import PlacedConfig
from rlinf.models.language_config import LanguageModelConfig
from rlinf.trainers.config import SequenceConfig

if TYPE_CHECKING:
    from rlinf.workers.config.answering import ReasoningRolloutConfig

Trainers = Mapping[str, SequenceConfig | None]
"""Sections of trainers by their keys."""


class LanguageRunConfig(PlacedConfig):
    """A run of a language model."""

    model: LanguageModelConfig

    @property
    def has_pictures(self) -> bool:
        """Whether prompts may have pictures."""
        return False

    @property
    def trainers(self) -> Trainers:
        """Those of the run."""
        return {}

    def check(self) -> None:
        """Look at the files, also at what says how pictures are read, and whether ranks can share
        the layers of the models."""
        super().check()
        for name, trainer in self.trainers.items():
            if trainer is not None:
                with in_section(name):
                    trainer.check_heads((getattr(trainer, "model", None) or self.model).kv_heads)
        path = self.model.path
        if self.has_pictures and path is not None and self.model.architecture is None:
            with in_section("model"):
                check_folder(path.expanduser())

    # -- rules between sections, for the validator of a task's config ----------------------------

    def trainer_problems(self) -> Iterator[PydanticCustomError]:
        """What stands against the ranks of trainers."""
        for name, trainer in self.trainers.items():
            if trainer is None:
                continue
            ranks = self.world_size(name)
            if self.cluster.runtime == "local" and ranks > 1:
                yield illegal(
                    "cluster.component_placement",
                    f"places {ranks} {name} ranks, which need a process each",
                    hint=f"cluster.runtime: ray, or one {name} rank",
                )
            try:
                trainer.check_ranks(ranks)
            except ConfigError as error:
                yield illegal(f"{name}.{error.key}", error.reason)

    def model_problems(self, *, generated: bool) -> Iterator[PydanticCustomError]:
        """What stands against the section of the model; ``generated``: the texts are of a task."""
        if self.model.lora is not None:
            yield illegal("model.lora", "has no effect here", hint="write it as actor.lora")
        if self.model.path is None and not generated:
            yield illegal(
                "model.path",
                "is missing: a tokenizer is trained on generated tasks only",
                hint="the directory of a model or tokenizer",
            )


def picture_problems(
    model: LanguageModelConfig, trainers: Trainers
) -> Iterator[PydanticCustomError]:
    """Of a model that must read pictures, and of its trainers."""
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
