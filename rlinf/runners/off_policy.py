"""The off-policy task: a policy acts, a replay remembers, and losses draw from all it holds."""

from __future__ import annotations

from rlinf.flow.graph import Flow, Stage
from rlinf.runners.embodied import Acting
from rlinf.workers.config.off_policy import OffPolicyConfig


class OffPolicy(Acting[OffPolicyConfig]):
    """Trains a policy in simulators on transitions of the whole run.

    The training of step s draws from the rollouts up to s, however far rollouts run ahead.
    """

    config_class = OffPolicyConfig
    figures = (
        *Acting.figures,
        ("temperature", "actor/temperature", ".4f"),
        ("Q", "critic/values", ".2f"),
    )

    @classmethod
    def step(cls, flow: Flow, config: OffPolicyConfig) -> None:
        """Environments and policy answer each other; the replay takes that in and draws batches of
        all it holds; the actor trains on these, and knows of every state that was seen."""
        cls.collect(flow)
        drawn = ("batches", "seen")
        flow.stage("replay", Stage("replay", "sample", ("trajectories",), drawn))
        flow.stage("train", Stage("actor", "train_on", drawn, replicated=drawn))
