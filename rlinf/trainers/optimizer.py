"""AdamW over a few vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim.adamw import adamw

from rlinf.trainers.config import OptimizerConfig

_STATE = ("exp_avg", "exp_avg_sq", "step")


def parameter_groups(
    policy: torch.nn.Module, value_parameters: Iterable[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
    """What is trained: the parameters of the policy, then those that only the values depend on."""
    values = list(value_parameters)
    value_ids = {id(parameter) for parameter in values}
    rest = [p for p in policy.parameters() if p.requires_grad and id(p) not in value_ids]
    return [rest, values]


class VectorAdamW:
    """AdamW (Loshchilov and Hutter 2019) for parameters that lie in a vector per group.

    The arithmetic is torch's functional AdamW. Its class of that name imports the compiler on the
    first step, which costs a second and 65 MB per process, and twice the time of every step.

    Args:
        vectors: Parameters of the policy and of the value network, each as one vector; the second
            may be empty.
        config: Rates and moments.
    """

    def __init__(self, vectors: Sequence[torch.Tensor], config: OptimizerConfig) -> None:
        self._config = config
        self._vectors = list(vectors)
        self._rates = (config.lr, config.value_lr or config.lr)
        self._factor = 1.0
        self._state: list[dict[str, torch.Tensor]] = [
            {
                "exp_avg": torch.zeros_like(vector),
                "exp_avg_sq": torch.zeros_like(vector),
                "step": torch.zeros((), dtype=torch.float32, device=vector.device),
            }
            for vector in self._vectors
        ]

    def set_factor(self, factor: float) -> None:
        """Scale every group's learning rate, for the schedule."""
        self._factor = factor

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Apply one gradient per vector, of its shape."""
        config = self._config
        for vector, gradient, rate, state in zip(
            self._vectors, gradients, self._rates, self._state, strict=True
        ):
            if not vector.numel():
                continue
            adamw(
                [vector],
                [gradient],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                fused=True,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=rate * self._factor,
                weight_decay=config.weight_decay,
                eps=config.eps,
                maximize=False,
            )

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Moments and step count by number of the vector, in host memory."""
        return {
            str(number): {name: tensor.cpu() for name, tensor in state.items()}
            for number, state in enumerate(self._state)
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Continue from :meth:`state_dict`."""
        for number, own in enumerate(self._state):
            for name in _STATE:
                own[name].copy_(state[str(number)][name])
