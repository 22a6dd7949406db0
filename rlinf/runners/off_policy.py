"""The off-policy task: a policy acts, a replay remembers, and losses draw from all it holds."""

from __future__ import annotations

from typing import ClassVar

from rlinf.flow.graph import Flow, Stage
from rlinf.runners.embodied import Acting
from rlinf.workers.config.off_policy import OffPolicyConfig


class OffPolicy(Acting[OffPolicyConfig]):
    """Trains a policy in simulators on transitions of the whole run.

    A rollout may run ahead of the training by up to ``rollout.max_staleness`` steps: the training
    of step s draws from the rollouts up to s either way.
    """

    config_class = OffPolicyConfig
    groups: ClassVar = {
        "env": "rlinf.workers.env:EnvWorker",
        "rollout": "rlinf.workers.rollout:RolloutWorker",
        "replay": "rlinf.workers.replay:ReplayWorker",
        "actor": "rlinf.workers.actor:ActorWorker",
    }
    figures = (
        *Acting.figures,
        ("temperature", "actor/temperature", ".4f"),
        ("Q", "critic/values", ".2f"),
    )

    @classmethod
    def step(cls, flow: Flow, config: OffPolicyConfig) -> None:
        """Environments and policy answer each other; the replay takes that in and draws batches of
        all it holds; the actor trains on these."""
        cls.collect(flow)
        flow.stage("replay", Stage("replay", "sample", ("trajectories",), ("batches",)))
        flow.stage("train", Stage("actor", "train_on", ("batches",), replicated=("batches",)))
