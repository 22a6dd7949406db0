"""The part of a recipe by which a language model answers prompts and learns from rewards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from rlinf.agents.tool import AgentConfig
from rlinf.algorithms.base_config import TokenAlgorithm
from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.nearest import did_you_mean
from rlinf.data.prompts.config import ChatTemplateConfig, PromptDataConfig
from rlinf.engines import config as engines
from rlinf.engines.config import EngineConfig, HFEngineConfig, SamplingConfig
from rlinf.errors import in_section
from rlinf.models.language_config import LanguageModelConfig, LoraConfig
from rlinf.rewards.config import RewardConfig
from rlinf.trainers.config import (
    REGISTRY,
    CriticTrainerConfig,
    LanguageTrainerConfig,
    SupervisedConfig,
)
from rlinf.weight_sync.config import AutoConfig, WeightSyncSection
from rlinf.workers.config.language import LanguageRunConfig

EngineSection = Annotated[EngineConfig, Component(engines.REGISTRY)]
TrainerSection = Annotated[LanguageTrainerConfig, Component(REGISTRY)]


class PartialRolloutConfig(StrictModel):
    """More groups are generated than a step has positions; what is unfinished when these are filled
    is interrupted, and goes on in the next step under the weights of that one."""

    only_with: ClassVar = {"too_old": "max_token_staleness"}

    oversample: float = Field(default=1.25, gt=1, le=1000)
    """Groups that are generated at the same time, over the positions of a step."""
    schedule: Literal["fifo", "longest_first", "history"] = "fifo"
    """Which interrupted groups go on first: those that were drawn first, those with most tokens,
    or those of which earlier answers to the same prompt let expect most. New prompts follow, and
    with `history` they are ordered in the same way."""
    max_token_staleness: int | None = Field(default=None, ge=1)
    """Most training phases between the weights that sampled a token and its training; null: any
    number."""
    too_old: Literal["mask", "drop"] = "mask"
    """What becomes of tokens beyond that: they do not count in the loss, or their group is
    generated anew."""


class ReasoningRolloutConfig(StrictModel):
    """How completions are generated."""

    prompts: int = Field(ge=1)
    """Prompts of a training step."""
    group_size: int = Field(ge=1)
    """Completions of each prompt."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    engine: EngineSection = HFEngineConfig()
    """What generates."""
    max_staleness: int = Field(default=0, ge=0)
    """How many training phases may lie between the weights that sample and the training: with 0
    each rollout waits for the training step before it, with k it runs up to k steps ahead."""
    partial: PartialRolloutConfig | None = None
    """Interrupt the longest answers of a step and go on with them in the next; null: every step
    waits for its last answer."""
    agent: AgentConfig | None = None
    """Tools that answers may call, turn by turn; null: an answer is one turn."""

    @property
    def sequences(self) -> int:
        """Completions of a training step."""
        return self.prompts * self.group_size

    @property
    def longest_answer(self) -> int:
        """Most tokens that a model samples for a completion, over all its turns."""
        longest, agent = self.sampling.max_new_tokens, self.agent
        if agent is None or agent.max_turn_tokens is None:
            return longest
        return min(longest, agent.max_turns * agent.max_turn_tokens)


class AnsweringConfig(LanguageRunConfig):
    """A run in which a language model is trained on its answers to prompts."""

    model: LanguageModelConfig
    rollout: ReasoningRolloutConfig
    reward: RewardConfig
    algorithm: TokenAlgorithm
    actor: TrainerSection
    critic: CriticTrainerConfig | None = None
    """Trainer of the value network; only for an algorithm that needs one."""
    weight_sync: WeightSyncSection = AutoConfig()

    @property
    @abstractmethod
    def template_arguments(self) -> dict[str, Any]:
        """What a chat template is told beside the messages."""

    @property
    @abstractmethod
    def training_steps(self) -> int:
        """Training phases of the run."""


class WarmStartConfig(LanguageRunConfig):
    """What a model is taught before the first step of a run, as a run of its own."""

    task: Literal["warm_start"] = "warm_start"
    data: PromptDataConfig
    """The generated task whose targets are learnt, and how its prompts become tokens."""
    agent: AgentConfig | None
    """Tools that reply to the calls in them; the replies are not learnt."""
    model: LanguageModelConfig
    learning: SupervisedConfig
    actor: LanguageTrainerConfig
    adapter: LoraConfig | None
    """What the run trains of the model then, whose layers must be there."""

    @property
    def has_pictures(self) -> bool:
        """Whether prompts may have pictures."""
        return self.data.has_pictures

    @property
    def components(self) -> tuple[str, ...]:
        """Worker groups of the run."""
        return ("source", "actor")

    @property
    def training_steps(self) -> int:
        """Optimizer steps."""
        return self.learning.steps


def calling_problems(
    agent: AgentConfig | None, prompts: ChatTemplateConfig, section: str
) -> Iterator[PydanticCustomError]:
    """Whether tools are called in the form of prompts, and are those that the template tells the
    model of; ``section`` precedes the keys of prompts."""
    if agent is None or agent.calls != "chat_template":
        return
    if not prompts.apply_chat_template:
        yield illegal(
            "rollout.agent.calls",
            "is chat_template where prompts are not in the chat template",
            hint=f"write {section}apply_chat_template: true, or calls: tags",
        )
    described = _described(prompts)
    for name in (each for each in described if each not in agent.tools):
        yield illegal(
            f"{section}chat_template_kwargs.tools",
            f"tells the model of a tool `{name}` that it cannot call",
            hint=f"{did_you_mean(name, agent.tools)} (rollout.agent.tools)",
        )
    for name in (each for each in agent.tools if described and each not in described):
        yield illegal(
            f"rollout.agent.tools.{name}",
            f"is a tool of which {section}chat_template_kwargs.tools does not tell the model",
            hint="describe it there, or leave it out",
        )


def check_described(agent: AgentConfig | None, prompts: ChatTemplateConfig) -> None:
    """Refuse tools that cannot be called with the arguments that the template tells the model
    of."""
    if agent is None or agent.calls != "chat_template":
        return
    for name, arguments in _described(prompts).items():
        if arguments is not None:
            with in_section(f"rollout.agent.tools.{name}"):
                agent.tools[name].check_described(arguments)


def _described(prompts: ChatTemplateConfig) -> dict[str, list[str] | None]:
    """The tools that the template tells the model of, by their names, with the names of their
    arguments, or None where it does not say these; empty: none, or in a form of its own."""
    found: dict[str, list[str] | None] = {}
    for tool in _list(prompts.chat_template_kwargs.get("tools")):
        function = _mapping(_mapping(tool).get("function", tool))
        if not isinstance(function.get("name"), str):
            return {}
        properties = _mapping(function.get("parameters")).get("properties")
        said = isinstance(properties, Mapping)
        found[function["name"]] = [str(each) for each in _mapping(properties)] if said else None
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def unserved_problems(
    engine: EngineConfig, sampling: SamplingConfig, section: str
) -> Iterator[PydanticCustomError]:
    """What of a sampling the engine does otherwise than it says; ``section`` precedes keys."""
    if (found := engine.unserved(sampling)) is not None:
        yield illegal(f"{section}sampling.{found.key}", found.why, hint=found.hint)


def equal_samples_problems(
    sampling: SamplingConfig, samples: int, section: str
) -> Iterator[PydanticCustomError]:
    """Whether several completions of a prompt are wanted where all are the same; ``section``
    precedes keys."""
    if sampling.greedy and samples > 1:
        yield illegal(
            f"{section}samples",
            f"{samples} greedy completions are all the same",
            hint=f"nearest: 1, or {section}sampling.greedy: false",
        )
