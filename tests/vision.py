"""Tiny models that read pictures, and prompts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlinf.data.pictures import PictureReader
from rlinf.data.prompts.config import PromptDataConfig
from rlinf.data.prompts.dataset import Prompt
from rlinf.data.tasks import SquaresTask
from rlinf.models.language import build_language_model, picture_reader
from rlinf.models.language_config import LanguageModelConfig
from rlinf.workers.initial_model import write_initial_model

TASK = SquaresTask(levels=(2, 3), size=8, held_out=4)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "vision": {"hidden_size": 16, "heads": 2, "intermediate_size": 32, "patch_size": 8},
}


def write_model(family: str, folder: Path) -> LanguageModelConfig:
    """A model with large random weights, so that pictures and positions matter."""

    def texts() -> Any:
        for item in TASK.items("train"):
            yield from (item.prompt, item.target)
        yield "0123456789+=abcdefghijklmnopqrstuvwxyz <image>?"

    section = LanguageModelConfig(architecture={"type": family, **SIZES})
    return write_initial_model(section, folder, 0, texts=texts)


def picture_prompts(
    section: LanguageModelConfig, tokenizer: Any, task: SquaresTask
) -> tuple[PictureReader, list[Prompt]]:
    """What reads pictures, and the prompts of a task."""
    reader = picture_reader(section, tokenizer)
    sets = PromptDataConfig(task=task, max_prompt_length=64).build(tokenizer, reader)
    return reader, list(sets.train)


class Tiny:
    """A model, its tokenizer, what reads its pictures, and prompts with one or two of them."""

    def __init__(self, family: str, folder: Path) -> None:
        self.section = write_model(family, folder)
        self.model, self.tokenizer = build_language_model(self.section, seed=0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3)
        self.model.eval()
        assert self.section.path is not None
        self.path = self.section.path
        self.reader, self.prompts = picture_prompts(self.section, self.tokenizer, TASK)

    def said(self, prompt: Prompt, answer: Any) -> torch.Tensor:
        """[L] log-probs of an answer by the library's own forward pass over the whole text."""
        ids, arguments = self.arguments(prompt, answer)
        logits = self.model(input_ids=ids, **arguments).logits.log_softmax(-1)
        wanted = torch.as_tensor(answer)[:, None]
        found: torch.Tensor = logits[0, len(prompt.tokens) - 1 : -1].gather(-1, wanted)[:, 0]
        return found.detach()

    def arguments(self, prompt: Prompt, answer: Any = ()) -> tuple[torch.Tensor, dict[str, Any]]:
        """What the library's model is given for a prompt with an answer behind it."""
        ids = torch.tensor([[*prompt.tokens.tolist(), *map(int, answer)]])
        pixels, grids = self.reader.pixels(prompt.pictures)
        kinds = torch.zeros_like(ids).int()
        for picture in prompt.pictures:
            kinds[0, picture.first : picture.first + picture.tokens] = 1
        return ids, {
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.from_numpy(pixels),
            "image_grid_thw": torch.from_numpy(grids),
            "mm_token_type_ids": kinds,
        }
