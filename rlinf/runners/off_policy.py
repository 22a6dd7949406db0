"""The off-policy task: a policy acts, a replay remembers, and losses draw from all it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlinf.flow.graph import Flow, Stage
from rlinf.runners.embodied import Acting
from rlinf.workers.off_policy_config import OffPolicyConfig

if TYPE_CHECKING:
    from rlinf.flow.running_step import Arguments


class OffPolicy(Acting[OffPolicyConfig]):
    """Trains a policy in simulators on transitions of the whole run.

    Synchronous, or with rollouts that run ahead of training by up to ``rollout.max_staleness``
    steps: training step s draws from the rollouts up to s either way.
    """

    config_class = OffPolicyConfig
    groups: ClassVar = {
        "env": "rlinf.workers.env:EnvWorker",
        "rollout": "rlinf.workers.rollout:RolloutWorker",
        "replay": "rlinf.workers.replay:ReplayWorker",
        "actor": "rlinf.workers.off_policy_actor:OffPolicyActor",
    }
    figures = (
        *Acting.figures,
        ("return", "env/return", ".2f"),
        ("temperature", "actor/temperature", ".4f"),
        ("Q", "critic/values", ".2f"),
    )

    @classmethod
    def step(cls, flow: Flow, config: OffPolicyConfig) -> None:
        """Environments and policy answer each other; the replay takes that in; batches of what it
        holds are trained on."""
        cls.rollout(flow)
        flow.stage(
            "replay",
            Stage("replay", "sample", ("trajectories",), ("batches",)),
        )
        flow.stage("train", Stage("actor", "train", ("batches",), replicated=("batches",)))

    def arguments(self, step: int) -> Arguments:
        """Who draws random numbers, or counts training phases, is told the number of the step."""
        return {name: {"step": step} for name in ("rollout", "replay", "actor")}
