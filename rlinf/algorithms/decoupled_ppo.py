"""Decoupled PPO for stale data (Hilton et al. 2022, eq. 4; Fu et al. 2025, "AReaL", §5.2)."""

from __future__ import annotations

from rlinf.algorithms.config import DecoupledPPOConfig
from rlinf.algorithms.grpo import GroupCredit
from rlinf.algorithms.ppo import PPO, CriticCredit


class DecoupledPPO(PPO):
    """w · max(−A r, −A clip(r)) with r = π / π_proximal and w = π_proximal / π_behaviour.

    The age of the data enters the weight w, which is bounded, and the clip keeps the policy near to
    the proximal one. A term that is left out for its weight counts as a loss of 0: the normaliser
    still counts it, so that the loss does not depend on the split into micro batches. With data of
    the present weights w = 1 and the loss is that of PPO.
    """

    def __init__(self, config: DecoupledPPOConfig, *, group_size: int = 1) -> None:
        self.credit = GroupCredit if config.advantage == "group" else CriticCredit
        super().__init__(config, group_size=group_size)
