"""The warm start: a model is taught worked solutions before the first step of a reasoning run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

from rlinf.flow.executor import Arguments
from rlinf.flow.graph import Flow, Stage
from rlinf.models.language_config import LanguageModelConfig
from rlinf.runners.groups import Groups
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.task import Task
from rlinf.workers.config.answering import WarmStartConfig


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
    """Teach a model on the first device of the actor: the same under every placement.

    What is taught is written to ``directory``; ``run`` is that of the run.
    """
    learning, actor, task = config.warm_start, config.actor, config.data.task
    assert learning is not None, "only called where the recipe asks for it"
    assert task is not None, "only generated tasks have targets"
    place = {"source,actor": str(config.plan.components["actor"].devices[0])}
    placed = {"plan": None, "residency": {}, "component_placement": place}
    teaching = {
        "optim": learning.optim,
        "lr_sched": learning.lr_sched,
        "max_skipped_updates": learning.max_skipped_updates,
        "lora": None,
    }
    own = WarmStartConfig(
        seed=config.seed,
        runner=config.runner,
        cluster=config.cluster.model_copy(update=placed),
        examples=task,
        agent=config.rollout.agent,
        model=model,
        learning=learning,
        actor=actor.model_copy(update=teaching),
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
