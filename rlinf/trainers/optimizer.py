"""The optimizer of a trainer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rlinf.trainers.config import OptimizerConfig


def build_optimizer(
    policy: torch.nn.Module,
    value_parameters: Iterable[torch.nn.Parameter],
    config: OptimizerConfig,
) -> torch.optim.Optimizer:
    """AdamW with one group for the policy and one for the value network.

    The base rate of each group is kept under ``base_lr`` for the schedule.
    """
    values = list(value_parameters)
    value_ids = {id(parameter) for parameter in values}
    rest = [p for p in policy.parameters() if p.requires_grad and id(p) not in value_ids]
    rates = [(rest, config.lr), (values, config.value_lr or config.lr)]
    groups = [{"params": group, "lr": lr, "base_lr": lr} for group, lr in rates if group]
    return torch.optim.AdamW(
        groups,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,  # one kernel for all parameters; small networks are bound by call overhead
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Scale every group's base rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
