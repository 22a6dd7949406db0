"""The worker groups of a reasoning run and the flows that they execute."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from rlinf.checkpoint.manifest import FileRecord
from rlinf.data.sequences import Completion, PromptGroup, Score
from rlinf.flow.graph import Flow, Stage
from rlinf.flow.running_step import Arguments
from rlinf.flow.stage_worker import StageWorker
from rlinf.models.language_config import LanguageModelConfig
from rlinf.runners.answering_system import AnsweringSystem
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.rescaling import HANDING_OVER, rescaled_training, step_arguments
from rlinf.runners.weight_handover import WeightHandover
from rlinf.scheduler import Channel
from rlinf.weight_sync.protocol import Parties
from rlinf.workers.critic import CriticSetup, CriticWorker
from rlinf.workers.generation import GenerationReport, GenerationSetup, GenerationWorker
from rlinf.workers.language_actor import LanguageActorSetup, LanguageActorWorker
from rlinf.workers.reward import RewardReport, RewardSetup, RewardWorker


def training_flow(config: ReasoningConfig) -> Flow:
    """One training step: groups are generated and scored until every slot has one to train on.

    Where the algorithm needs a critic, it gives the batch its advantages before the actor trains;
    where they depend on the log-probs of the reference policy, the actor computes these first.
    """
    flow = Flow("train")
    flow.loop(
        "rollout",
        Stage("rollout", "generate", inputs=("scored",), outputs=("completions", "groups")),
        Stage("reward", "score", inputs=("completions",), outputs=("scored",)),
        ahead=True,
    )
    batch = ("groups",)
    if config.critic is not None and config.algorithm.kl_reward_beta:
        log_probs = ("log_probs",)
        stage = Stage("actor", "infer", batch, log_probs, replicated=batch, key="inference")
        flow.stage("inference", stage)
        batch = log_probs
    if config.critic is not None:
        advantages = ("advantages",)
        flow.stage("critic", Stage("critic", "train", batch, advantages, replicated=batch))
        batch = advantages
    flow.stage("train", Stage("actor", "train", inputs=batch, replicated=batch))
    return flow


Setup = GenerationSetup | RewardSetup | LanguageActorSetup | CriticSetup


class ReasoningSystem(AnsweringSystem):
    """Generation, reward and actor workers on a cluster; a context manager that ends them.

    Args:
        config: The run's configuration.
        model: Directory of the model that every worker loads.
        failures: Directory for batches that could not be trained on.
    """

    records = (PromptGroup, Completion, Score, GenerationReport, RewardReport)

    def __init__(self, config: ReasoningConfig, model: LanguageModelConfig, failures: Path) -> None:
        super().__init__(config)
        self.config = config
        self._model = model
        self._failures = failures
        self._parties = Parties(
            sender="actor", receiver="rollout", receivers=config.world_size("rollout")
        )
        self.parameters = 0

    def _start(self) -> None:
        workers: dict[str, type[StageWorker]] = {
            "rollout": GenerationWorker,
            "reward": RewardWorker,
            "actor": LanguageActorWorker,
            "critic": CriticWorker,
        }
        self._launch({name: (workers[name], self._setup(name)) for name in self.config.components})
        starting, found = {}, {}
        for name, group in self._groups.items():
            starting[name] = group.start(*self._meeting(name), **self._hooks(name))
            if self._plan.components[name].residency == "offload":
                # What shares its devices begins with their memory.
                found[name] = starting.pop(name).wait()
                group.offload().wait()
        found |= {name: handle.wait() for name, handle in starting.items()}
        self.parameters = found["actor"][0]["parameters"]
        self._weights = WeightHandover(
            self._groups["actor"].send_weights, self._groups["rollout"].receive_weights
        )
        rollout = self.config.rollout
        rescaled = self.config.cluster.auto_scheduler
        self._training = self._new_executor(
            training_flow(self.config),
            rollout.prompts,
            depth=rollout.max_staleness + 1,
            handing_over=HANDING_OVER if rescaled else (),
        )
        if rescaled:
            run = uuid.uuid4().hex[:8]
            self._mailboxes = [
                Channel.create(f"rollout-{run}/{rank}", host=f"rollout:{rank}")
                for rank in range(self.config.world_size("rollout"))
            ]

    def _meeting(self, component: str) -> tuple[str, ...]:
        """Where the ranks of a trainer find each other; nothing for others, and for one rank."""
        if component not in {"actor", "critic"} or self.config.world_size(component) == 1:
            return ()
        return tuple(self._groups[component].execute_on(0).meeting().wait())

    def _hooks(self, component: str) -> dict[str, Any]:
        """What acts beside the training of a component."""
        rescaled = component == "actor" and self.config.cluster.auto_scheduler
        return {"hook": rescaled_training()} if rescaled else {}

    def _setup(self, component: str) -> Setup:
        config = self.config
        if component == "rollout":
            return GenerationSetup(
                model=self._model,
                engine=config.rollout.engine,
                sampling=config.rollout.sampling,
                algorithm=config.algorithm,
                group_size=config.rollout.group_size,
                seed=config.seed,
                weight_sync=config.weight_sync,
                parties=self._parties,
                partial=config.rollout.partial,
                tells_progress=config.actor.order == "length",
                agent=config.rollout.agent,
            )
        if component == "reward":
            return RewardSetup(reward=config.reward, model=self._model)
        if component == "critic" and config.critic is not None:
            return CriticSetup(
                model=self._model,
                algorithm=config.algorithm,
                critic=config.critic,
                total_steps=config.training_steps,
                seed=config.seed,
                failure_directory=self._failures,
            )
        partial = config.rollout.partial
        masks = partial is not None and partial.too_old == "mask"
        return LanguageActorSetup(
            slots=config.rollout.prompts,
            max_token_staleness=partial.max_token_staleness if partial and masks else None,
            model=self._model,
            algorithm=config.algorithm,
            actor=config.actor,
            temperature=config.rollout.sampling.temperature,
            total_steps=config.training_steps,
            seed=config.seed,
            failure_directory=self._failures,
            weight_sync=config.weight_sync,
            parties=self._parties,
        )

    # -- what a runner does with it -------------------------------------------------------------

    def _arguments(self, step: int) -> Arguments:
        arguments = {name: {"step": step} for name in ("rollout", "critic", "actor")}
        if self.config.cluster.auto_scheduler:
            for name, more in step_arguments(self.config, self._mailboxes).items():
                arguments[name] = {**arguments[name], **more}
        return arguments

    @property
    def _trained(self) -> list[str]:
        return [name for name in ("actor", "critic") if name in self._groups]

    def state(self) -> dict[str, Any]:
        """State of every worker, for a checkpoint."""
        handles = {
            name: self._groups[name].state(whole=name not in self._divided)
            for name in self._trained
        }
        rollout = self._groups["rollout"].state()
        trained = {name: handle.wait()[0] for name, handle in handles.items()}
        return {**trained, "rollout": rollout.wait()}

    @property
    def _divided(self) -> list[str]:
        """Trainers each of whose ranks writes its part of a checkpoint."""
        sharded = self.config.checkpoint.layout == "sharded"
        return [name for name in self._trained if sharded and self.config.world_size(name) > 1]

    @property
    def writes_parts(self) -> bool:
        """See :attr:`WorkerSystem.writes_parts`."""
        return bool(self._divided)

    def save_parts(self, checkpoint: Path) -> dict[str, FileRecord]:
        """See :meth:`WorkerSystem.save_parts`."""
        handles = [self._groups[name].save_parts(checkpoint) for name in self._divided]
        return {
            name: record
            for handle in handles
            for files in handle.wait()
            for name, record in files.items()
        }

    def load_state(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Continue from :meth:`state`."""
        trained = [self._groups[name].load_state(state[name], checkpoint) for name in self._trained]
        for handle in (*trained, self._groups["rollout"].load_state(state["rollout"])):
            handle.wait()

    def save_model(self, directory: Path) -> None:
        """Write the trained model in the format of transformers."""
        for written in self._groups["actor"].save_model(directory).wait():
            if written is not None:
                written.bring(directory)

    def _closing(self) -> tuple[str, ...]:
        return self.config.components
