"""The model that a reasoning run begins with, as a directory that every worker loads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rlinf.data.prompts.config import Part
from rlinf.data.prompts.dataset import PromptDataset
from rlinf.data.tasks import ANSWER_TAGS, PromptTask
from rlinf.engines.config import EngineConfig, SamplingConfig, local_directory
from rlinf.engines.weight_files import sizes_of
from rlinf.errors import ConfigError, UserError, in_section
from rlinf.flow.executor import Arguments
from rlinf.flow.graph import Flow, Stage
from rlinf.models.language import load_tokenizer, picture_reader
from rlinf.models.language_config import LanguageModelConfig
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.pool import RewardPool
from rlinf.rewards.protocol import RewardInput
from rlinf.runners.groups import Groups
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.task import Task
from rlinf.workers.config.answering import WarmStartConfig
from rlinf.workers.initial_model import write_initial_model

_TARGETS = 4
"""Right answers that the reward must give a number for before others are learnt."""


class PromptReader:
    """Reads prompts for the model that a run begins with.

    Raises:
        ConfigError: No prompt is left, one is refused, or the longest leaves too little of the
            model's context for an answer.
    """

    def __init__(self, config: ReasoningConfig, run: Path) -> None:
        self._config, self.model = config, _initial_model(config, run)
        """The section of that model, with its files."""
        with in_section("model"):
            self.tokenizer: Any = load_tokenizer(self.model)
            self._pictures = (
                picture_reader(self.model, self.tokenizer) if config.has_pictures else None
            )

    def read(self, part: Part) -> PromptDataset:
        """The prompts of a part."""
        config = self._config
        with in_section("data"):
            prompts = config.data.build_part(part, self.tokenizer, self._pictures)
        sampling, key = config.rollout.sampling, "rollout.sampling"
        if part == "validation" and config.validation.sampling is not None:
            sampling, key = config.validation.sampling, "validation.sampling"
        engine = config.rollout.engine
        check_context(prompts, sampling, model=self.model, engine=engine, key=key)
        return prompts


def _initial_model(config: ReasoningConfig, run: Path) -> LanguageModelConfig:
    """The section of the model to load: the given one, or that of a model that is created."""
    model = config.model
    if model.architecture is None and config.warm_start is None:
        return model
    agent, task = config.rollout.agent, config.data.task

    def texts() -> Iterator[str]:
        assert task is not None, "a rule of the config"
        for item in task.items("train"):
            yield from (item.prompt, item.target)
        for section in () if agent is None else agent.tools.values():
            yield section.build().alphabet
        yield from () if agent is None else agent.around_reply

    return write_initial_model(
        model,
        run,
        config.seed,
        texts=None if model.path else texts,
        whole=ANSWER_TAGS if agent is None else (*ANSWER_TAGS, *agent.whole),
        teach=None if config.warm_start is None else partial(warm_start, config, run),
    )


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
        sampling: How many tokens an answer may have, and which end it.
        model: Its files say how long prompt and answer may be together.
        engine: May bound that further.
        key: Of the section of ``sampling``, for the message.
    """
    if model.path is None:
        raise ValueError("a model without files has no context yet")
    try:
        vocabulary, own = sizes_of(local_directory(model.path))
    except (OSError, ValueError, KeyError, TypeError) as error:  # a type: JSON of something else
        reason = f"the configuration of the model cannot be read: {error}"
        raise ConfigError(reason, key="model.path") from error
    for token in sampling.stop_token_ids or ():
        if token >= vocabulary:
            raise ConfigError(
                f"{token} is no token of the model, which has 0 to {vocabulary - 1}; nearest: "
                "null, its own end tokens",
                key=f"{key}.stop_token_ids",
            )
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


def require_scores_of_targets(task: PromptTask, reward: RewardConfig) -> None:
    """Refuse functions of single completions that give no number for one that is right; of those
    that compare completions nothing is known before there are some.

    Raises:
        UserError: Not one of the first targets could be scored.
    """
    functions = {name: each for name, each in reward.functions.items() if not each.of_groups}
    samples = [
        RewardInput(
            prompt=item.prompt, completion=item.target, num_tokens=len(item.target),
            answer=item.answer,
        )
        for item in task.items("train")[:_TARGETS]
    ]  # fmt: skip
    if not functions:
        return
    with RewardPool(reward.model_copy(update={"functions": functions}), processes=1) as pool:
        found = pool.score(samples)
    if not any(each.valid for each in found):
        raise UserError(
            f"no right answer of the task could be scored; the first: {found[0].reason}"
        )


class WarmStart(Task[WarmStartConfig]):
    """Supervised steps on the targets of a generated task."""

    config_class = WarmStartConfig
    groups: ClassVar = {
        "source": "rlinf.workers.source:WarmStartSource",
        "actor": "rlinf.workers.fit:WarmStartWorker",
    }
    weights = None

    @classmethod
    def step(cls, flow: Flow, config: WarmStartConfig) -> None:
        """The source hands out a global batch, and the actor fits it."""
        edges = ("batches", "held_out")
        flow.stage("draw", Stage("source", "draw", outputs=edges), ahead=True)
        flow.stage("fit", Stage("actor", "fit", inputs=edges, replicated=edges))

    def arguments(self, step: int) -> Arguments:
        """Both are told the number of the step."""
        return {name: {"step": step} for name in self.config.components}


def warm_start(
    config: ReasoningConfig, run: Path, model: LanguageModelConfig, directory: Path
) -> None:
    """Teach a model on the first device of the actor, or of several nodes on that of the first.

    What is taught is written to ``directory``; ``run`` is that of the run.
    """
    learning, actor, task = config.warm_start, config.actor, config.data.task
    assert learning is not None, "only called where the recipe asks for it"
    assert task is not None, "only generated tasks have targets"
    # The files are written where the worker is, and read where the driver is: on its own node.
    alone = config.cluster.num_nodes == 1
    place = {"source,actor": str(config.plan.components["actor"].devices[0]) if alone else "0"}
    placed = {
        "plan": None,
        "residency": {},
        "component_placement": place,
        "auto_scheduler": False,
    }
    teaching = {
        "optim": learning.optim,
        "lr_sched": learning.lr_sched,
        "max_skipped_updates": learning.max_skipped_updates,
        "lora": None,
        "tensor_parallel_size": 1,
    }
    if config.rollout.agent is None:  # what functions make of calls is seen where there are some
        require_scores_of_targets(task, config.reward)
    own = WarmStartConfig(
        seed=config.seed,
        runner=config.runner,
        cluster=config.cluster.model_copy(update=placed),
        data=config.data,
        agent=config.rollout.agent,
        model=model,
        learning=learning,
        actor=actor.model_copy(update=teaching),
        adapter=actor.lora,
    )
    print(f"warm start: {learning.steps} supervised steps", flush=True)
    begin = time.perf_counter()
    losses = []
    with Groups(WarmStart(own, run)) as groups:
        for step in range(learning.steps):
            report = groups.start_step(step, synchronise=False).wait()
            losses.append(report.results("actor")[0]["train/loss"])
        groups.save_model(directory)
    print(
        f"warm start took {time.perf_counter() - begin:.1f} s, "
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}",
        flush=True,
    )
