"""The optimizer of a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rlinf.trainers.config import OptimizerConfig


def parameter_groups(
    policy: torch.nn.Module, value_parameters: Iterable[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
    """What is trained: the parameters of the policy, then those that only the values depend on."""
    values = list(value_parameters)
    value_ids = {id(parameter) for parameter in values}
    rest = [p for p in policy.parameters() if p.requires_grad and id(p) not in value_ids]
    return [rest, values]


def build_optimizer(
    groups: Sequence[torch.nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW with one group for the policy and one for the value network, where there is one.

    The base rate of each group is kept under ``base_lr`` for the schedule.

    Args:
        groups: All parameters of each group as one vector.
        config: Rates and moments.
    """
    rates = (config.lr, config.value_lr or config.lr)
    return torch.optim.AdamW(
        [
            {"params": [group], "lr": lr, "base_lr": lr}
            for group, lr in zip(groups, rates, strict=True)
            if group.numel()
        ],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,  # one kernel for a whole group; small networks are bound by call overhead
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Scale every group's base rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
