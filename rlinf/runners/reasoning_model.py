"""The model that a reasoning run begins with, as a directory that every worker loads."""

from __future__ import annotations

import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rlinf.agents.tool_use import ToolUse
from rlinf.data.prompts.dataset import PromptDataset, PromptSets
from rlinf.data.tasks import ANSWER_TAGS, PromptItem
from rlinf.data.tokenizer import train_tokenizer
from rlinf.engines.config import EngineConfig, SamplingConfig, local_directory
from rlinf.engines.weights import sizes_of
from rlinf.errors import ConfigError, in_section
from rlinf.models.language import load_tokenizer
from rlinf.models.language_config import LanguageModelConfig
from rlinf.runners.initial_model import write_initial_model
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.trainers.sequences import fine_tune, text_batch


def initial_model(config: ReasoningConfig, directory: Path) -> LanguageModelConfig:
    """The section of the model to load: the given one, or that of a model that is created.

    Args:
        config: The run's configuration.
        directory: Where a created model is kept; one that is there is used.
    """
    model = config.model
    if model.architecture is None and config.warm_start is None:
        return model
    return write_initial_model(
        model,
        directory,
        seed=config.seed,
        tokenizer=partial(_tokenizer, config),
        teach=partial(_warm_start, config),
    )


def _tokenizer(config: ReasoningConfig, directory: Path) -> Any:
    if config.model.path is not None:
        return load_tokenizer(config.model)
    texts = chain.from_iterable((item.prompt, item.target) for item in task_items(config))
    agent = config.rollout.agent
    if agent is None:
        return train_tokenizer(texts, directory)
    alphabets = (section.build().alphabet for section in agent.tools.values())
    whole = (*ANSWER_TAGS, *agent.whole)
    return train_tokenizer(chain(texts, alphabets), directory, whole=whole)


def task_items(config: ReasoningConfig) -> tuple[PromptItem, ...]:
    """The training items of a generated task."""
    if config.data.task is None:
        raise ValueError("the prompts of this run are read from files")
    return config.data.task.items("train")


def _warm_start(config: ReasoningConfig, network: Any, tokenizer: Any) -> None:
    """Supervised training on the targets of the task, where it is asked for."""
    if config.warm_start is None:
        return
    items = task_items(config)
    prompts = tokenizer([item.prompt for item in items], add_special_tokens=False)["input_ids"]
    agent = config.rollout.agent
    if agent is None:
        targets = tokenizer([item.target for item in items], add_special_tokens=False)["input_ids"]
        learnt = None
    else:
        use = ToolUse(agent, tokenizer)
        shown = [use.demonstration(item.target) for item in items]
        targets, masks = zip(*shown, strict=True)
        learnt = [[*mask, True] for mask in masks]
    ended = [[*target, tokenizer.eos_token_id] for target in targets]
    texts = text_batch(list(zip(prompts, ended, strict=True)), learnt)
    print(f"warm start: {config.warm_start.steps} supervised steps", flush=True)
    begin = time.perf_counter()
    steps = fine_tune(network, texts, config.warm_start, seed=config.seed, compute=config.actor)
    losses = [metrics["warm_start/loss"] for metrics in steps]
    print(
        f"warm start took {time.perf_counter() - begin:.1f} s, "
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}",
        flush=True,
    )


def check_lengths(config: ReasoningConfig, model: LanguageModelConfig, sets: PromptSets) -> None:
    """Refuse prompts and answers that exceed the context of the model.

    Raises:
        ConfigError: The longest prompt of a set leaves too little.
    """
    own, sampling = config.validation.sampling, config.rollout.sampling
    validated = ("rollout.sampling", sampling) if own is None else ("validation.sampling", own)
    for prompts, (key, limits) in (
        (sets.train, ("rollout.sampling", sampling)),
        (sets.validation, validated),
    ):
        if prompts is not None:
            check_context(prompts, limits, model=model, engine=config.rollout.engine, key=key)


def check_context(
    prompts: PromptDataset,
    sampling: SamplingConfig,
    *,
    model: LanguageModelConfig,
    engine: EngineConfig,
    key: str,
) -> None:
    """Refuse what an engine would refuse once the longest prompt is drawn.

    Args:
        prompts: All that may be drawn.
        sampling: How many tokens an answer may have.
        model: Its files say how long prompt and answer may be together.
        engine: May bound that further.
        key: Of the section of ``sampling``, for the message.

    Raises:
        ConfigError: The longest prompt leaves too little, or the model's configuration cannot be
            read.
    """
    if model.path is None:
        raise ValueError("a model without files has no context yet")
    try:
        own = sizes_of(local_directory(model.path))[1]
    except (OSError, ValueError, KeyError) as error:
        reason = f"the configuration of the model cannot be read: {error}"
        raise ConfigError(reason, key="model.path") from error
    known = [limit for limit in (own, engine.context) if limit is not None]
    longest, new = prompts.longest, sampling.max_new_tokens
    if not known or longest + new <= min(known):
        return
    left, room = min(known) - longest, min(known) - new
    nearest = [f"max_new_tokens: {left}"] if left > 0 else []
    nearest += [f"data.max_prompt_length: {room}"] if room > 0 else []
    raise ConfigError(
        f"{new} new tokens after the longest prompt, which has {longest}, exceed the context of "
        f"{min(known)}; nearest: {' or '.join(nearest) or 'a model with a longer context'}",
        key=f"{key}.max_new_tokens",
    )


def prompt_sets(config: ReasoningConfig, tokenizer: Any) -> PromptSets:
    """The prompts of training and validation; says how many there are and what was left out.

    Raises:
        ConfigError: Nothing is left, or a record or prompt is refused.
    """
    with in_section("data"):
        sets = config.data.build(tokenizer)
    print(f"training: {sets.train.report}")
    if sets.validation is not None:
        shared = f"; {sets.shared} of them are trained on, too" if sets.shared else ""
        print(f"validation: {sets.validation.report}{shared}", flush=True)
    return sets
