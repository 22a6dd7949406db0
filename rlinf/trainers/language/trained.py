"""A module with its gradients and optimizer, and the way of keeping it on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf.checkpoint.compatibility import check_compatible
from rlinf.trainers.config import OptimizerConfig
from rlinf.trainers.language.adamw import ListAdamW
from rlinf.trainers.language.config import ComputeConfig
from rlinf.trainers.language.offloading import Offloaded

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Source = list[Tensor]
"""Numbers for every trained parameter (weights, moments, a copy), as a rank keeps them."""


class TrainedModule(ABC):
    """A scoring module whose parameters are trained.

    Attributes:
        module: What is called in forward passes.
        named: The trained parameters by their names in ``module``.
        optimizer: Steps the ``master`` source.
    """

    module: nn.Module
    named: dict[str, nn.Parameter]
    optimizer: ListAdamW

    def __init__(self, config: ComputeConfig) -> None:
        self._config = config
        self._away: dict[str, Offloaded] = {}

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro batch; ``last``: of the global batch."""

    @abstractmethod
    def gradients(self) -> Source:
        """Summed gradients."""

    @abstractmethod
    def gradient_norm(self) -> float:
        """Global L2 norm, the same on every rank."""

    @abstractmethod
    def discard_gradients(self) -> None:
        """Begin a global batch."""

    @abstractmethod
    def changed(self) -> None:
        """Bring what was written to the sources into the forward passes."""

    def keep_gathered(self) -> None:
        """Gather the weights that ranks have parts of, all at once; where there is memory for it.

        They stay as they are until :meth:`forget_gathered` or :meth:`changed`.
        """

    def forget_gathered(self) -> None:
        """Let the next forward pass read what was written to :meth:`used`."""

    @abstractmethod
    def used(self) -> Source:
        """The numbers that forward passes read."""

    @abstractmethod
    def master(self) -> Source:
        """The float32 weights."""

    @abstractmethod
    def part(self, name: str, source: Source) -> Tensor:
        """One parameter's part of a source; distributed where there are ranks. Shares memory."""

    @abstractmethod
    def whole(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter or part, gathered from the ranks, which all take part; converted first."""

    @abstractmethod
    def fill(self, name: str, source: Source, value: Tensor) -> None:
        """Write one whole parameter into a source."""

    @abstractmethod
    def _buffers(self, kind: str) -> list[Tensor]:
        """What ``weights``, ``gradients`` or ``optimizer`` occupy."""

    @property
    def dtype(self) -> torch.dtype:
        """Number format of forward passes."""
        return DTYPES[self._config.precision.param]

    def sources(self) -> dict[str, Source]:
        """What training goes on from."""
        return {
            "master": self.master(),
            "exp_avg": self.optimizer.averages,
            "exp_avg_sq": self.optimizer.squares,
        }

    def restart_optimizer(self, config: OptimizerConfig, *, blank: bool = False) -> None:
        """Forget all moments; ``blank``: they are going to be set, and need not be 0."""
        self.optimizer = ListAdamW(self.master(), config, blank=blank)

    def apply_step(self, *, norm: float, factor: float) -> None:
        """Clip the gradients of this norm and step."""
        limit = self.optimizer.config.max_grad_norm
        gradients = self.gradients()
        if limit is not None and norm > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        self.optimizer.step(gradients, factor=factor)
        self.changed()

    def offload(self) -> None:
        """Take from the device what the config names."""
        for kind in ("weights", "gradients", "optimizer"):
            if getattr(self._config.offload, kind) and kind not in self._away:
                self._away[kind] = Offloaded(self._buffers(kind), keep=kind != "gradients")

    def onload(self, *kinds: str) -> None:
        """Bring everything back, or only some of ``weights``, ``gradients``, ``optimizer``."""
        for kind in kinds or tuple(self._away):
            part = self._away.pop(kind, None)
            if part is not None:
                part.restore()

    @property
    def offloaded(self) -> bool:
        """Whether something is away."""
        return bool(self._away)

    def gather(
        self, source: Source, *, keep: bool, copy: bool = False, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Every parameter of a source, whole, on the CPU; see :meth:`state_dict`."""
        column = {}
        for name in self.named:
            tensor = self.whole(self.part(name, source), dtype)
            if keep:
                column[name] = tensor.to("cpu", copy=copy)
        return column

    def state_dict(self, *, keep: bool, copy: bool = False) -> dict[str, Any]:
        """Weights and moments whole, by name, on the CPU; they may share memory with this.

        Args:
            keep: False on ranks that only take part.
            copy: Give copies even of what lies there.
        """
        sources = self.sources().items()
        columns = {kind: self.gather(source, keep=keep, copy=copy) for kind, source in sources}
        return {"steps": self.optimizer.steps, **columns} if keep else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            CheckpointError: The weights are of another model.
        """
        check_compatible({n: tuple(p.shape) for n, p in self.named.items()}, state["master"])
        for kind, source in self.sources().items():
            for name in self.named:
                self.fill(name, source, state[kind][name])
        self.optimizer.steps = int(state["steps"])
        self.changed()


class PlainModule(TrainedModule):
    """On one rank without a process group.

    The trained parameters become views of one vector, and their gradients of another, so that
    clipping and the optimizer are a few calls. In bfloat16 a float32 vector stands behind them.

    Args:
        module: Its trained parameters are rebound, the others brought to ``precision.param``.
        config: Precision and optimizer.
        blank: Weights and moments are going to be set, so that nothing is written now.
    """

    def __init__(self, module: nn.Module, config: ComputeConfig, *, blank: bool = False) -> None:
        super().__init__(config)
        self.module = module
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(self.dtype)
        self._slices: dict[str, slice] = {}
        first = 0
        for name, parameter in self.named.items():
            self._slices[name] = slice(first, first + parameter.numel())
            first += parameter.numel()
        if blank:
            self._master = torch.empty(first, device=next(module.parameters()).device)
        else:
            self._master = torch.cat([p.detach().flatten().float() for p in self.named.values()])
        single = self.dtype == torch.float32
        self._used = self._master if single else self._master.to(self.dtype)
        # What is blank is set to 0 before it is used.
        make = torch.empty_like if blank else torch.zeros_like
        self._gradient = make(self._used)
        # In bfloat16 micro batches are summed in float32, as ranks are.
        self._sum = self._gradient if single else make(self._master)
        for name, parameter in self.named.items():
            parameter.grad = None
            parameter.data = self.part(name, [self._used])
            parameter.grad = self.part(name, [self._gradient])
        self.restart_optimizer(config.optim, blank=blank)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See :meth:`TrainedModule.backward`."""
        del last
        if self._sum is self._gradient:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        self._gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self._sum.add_(self._gradient)

    def gradients(self) -> Source:
        """One vector."""
        return [self._sum]

    def gradient_norm(self) -> float:
        """See :meth:`TrainedModule.gradient_norm`."""
        return float(torch.linalg.vector_norm(self._sum))

    def discard_gradients(self) -> None:
        """See :meth:`TrainedModule.discard_gradients`."""
        self._sum.zero_()

    @torch.no_grad()
    def changed(self) -> None:
        """Round the float32 weights to what is used."""
        if self._used is not self._master:
            self._used.copy_(self._master)

    def used(self) -> Source:
        """One vector."""
        return [self._used]

    def master(self) -> Source:
        """One vector."""
        return [self._master]

    def part(self, name: str, source: Source) -> Tensor:
        """A view."""
        return source[0][self._slices[name]].view(self.named[name].shape)

    def whole(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor itself, where it need not be converted."""
        return tensor.detach() if dtype is None else tensor.detach().to(dtype)

    @torch.no_grad()
    def fill(self, name: str, source: Source, value: Tensor) -> None:
        """See :meth:`TrainedModule.fill`."""
        self.part(name, source).copy_(value)

    def release_parameters(self) -> None:
        """Give every trained parameter float32 memory of its own with the present weights."""
        for name, parameter in self.named.items():
            parameter.grad = None
            parameter.data = self.part(name, [self._master]).clone()

    def _buffers(self, kind: str) -> list[Tensor]:
        if kind == "weights":
            frozen = [p.data for p in self.module.parameters() if not p.requires_grad]
            return [self._master, self._used, *frozen]
        if kind == "gradients":
            return [self._gradient, self._sum]
        return [*self.optimizer.averages, *self.optimizer.squares]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor itself, without a copy."""
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.detach()
