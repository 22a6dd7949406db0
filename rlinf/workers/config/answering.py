"""The part of a recipe by which a language model answers prompts and learns from rewards."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

from pydantic import Field

from rlinf.agents.tool import AgentConfig
from rlinf.algorithms.base_config import TokenAlgorithm
from rlinf.config.base import StrictModel
from rlinf.config.component import Component
from rlinf.engines import config as engines
from rlinf.engines.config import EngineConfig, HFEngineConfig, SamplingConfig
from rlinf.flow.placed_config import PlacedConfig
from rlinf.models.language_config import LanguageModelConfig
from rlinf.rewards.config import RewardConfig
from rlinf.trainers.config import REGISTRY, CriticTrainerConfig, LanguageTrainerConfig
from rlinf.weight_sync.config import AutoConfig, WeightSyncSection
from rlinf.workers.config.partial_rollout import PartialRolloutConfig

EngineSection = Annotated[EngineConfig, Component(engines.REGISTRY)]
TrainerSection = Annotated[LanguageTrainerConfig, Component(REGISTRY)]


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


class AnsweringConfig(PlacedConfig):
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
    def training_steps(self) -> int:
        """Training phases of the run."""
