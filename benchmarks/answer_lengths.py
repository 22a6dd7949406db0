"""A model of random weights whose answers are short or long by kind of prompt, for benchmarks.

The lengths of a mixture of geometric distributions fall off slowly, as those of trained models do:
most answers are short, a few take as long as many others together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from reasoning import LETTERS, write_model
from transformers import AutoModelForCausalLM

from rlinf.data.tokenizer import EOS
from rlinf.models.language import load_tokenizer, save_language_model
from rlinf.models.language_config import LanguageModelConfig

_CERTAIN = 16.0  # logit of the tokens of the present kind; others of the vocabulary have about 0
_LITTLE = 0.1  # factor on what layers add, which could change the means by a fifth


def write_kinds(
    directory: Path, hidden: int, layers: int, means: Sequence[float]
) -> LanguageModelConfig:
    """A model that goes on in the kind of the last token, and ends so that answers have a mean.

    The letters are divided evenly into kinds. A letter's embedding is the direction of its kind, to
    which the layers of random weights add little; the output layer reads it. Two models of the same
    arguments are equal.

    Args:
        directory: Is made; gets the files of transformers.
        hidden: Size of the model, a power of 2 or several times one above the number of kinds.
        layers: Of the model.
        means: [kinds] mean tokens of an answer.
    """
    config = write_model(directory, hidden, layers)
    tokenizer = load_tokenizer(config)
    model = AutoModelForCausalLM.from_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(hidden, len(means), generator=generator)
    directions = torch.linalg.qr(directions)[0].T * hidden**0.5
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    end = tokenizer.convert_tokens_to_ids(EOS)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(_LITTLE)
            layer.mlp.down_proj.weight.mul_(_LITTLE)
        outputs.zero_()
        for direction, letters, mean in zip(directions, _divided(len(means)), means, strict=True):
            tokens = tokenizer.convert_tokens_to_ids(list(letters))
            inputs[tokens] = direction
            outputs[tokens] = _CERTAIN / hidden * direction
            outputs[end] += (_CERTAIN + np.log(len(tokens) / (mean - 1))) / hidden * direction
    save_language_model(model, directory, tokenizer=tokenizer)
    return config


def write_prompts_of_kinds(path: Path, steps: int, counts: Sequence[int]) -> None:
    """Prompts for so many steps as JSON lines, each with so many of every kind, spread evenly.

    So every engine gets its share of the long answers, as it would of many more prompts.
    """
    rng = np.random.default_rng(0)
    letters = _divided(len(counts))
    kinds = np.repeat(np.arange(len(counts)), counts)
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    with path.open("w") as file:
        for _ in range(steps):
            for kind in kinds[np.argsort(places, kind="stable")]:
                text = "".join(rng.choice(list(letters[kind]), rng.integers(8, 17)))
                file.write(json.dumps({"prompt": text, "solutions": "x"}) + "\n")


def _divided(kinds: int) -> list[str]:
    size = len(LETTERS) // kinds
    return [LETTERS[size * kind : size * (kind + 1)] for kind in range(kinds)]
