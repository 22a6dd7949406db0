"""A module with its gradients and optimizer, and the way of keeping it whole on a rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.checkpoint.weights import check_compatible
from rlinf.models.language import saved_buffers
from rlinf.models.policy import Policy
from rlinf.trainers.config import OptimizerConfig, TrainerConfig
from rlinf.trainers.optimizer import AdamW, Place, learning_rates, value_names

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Source = list[Tensor]
"""Numbers for every trained parameter (weights, moments, a copy), as a rank keeps them."""


class TrainedModule(ABC):
    """A module whose parameters are trained, or follow those of another one.

    Args:
        module: It.
        config: Precision and offloading.
        optim: Of its optimizer; None: no loss trains it, and all its parameters are kept.

    Attributes:
        module: What is called in forward passes.
        named: The kept parameters by their names in ``module``: those that are trained.
        rates: Learning rate of each tensor of :meth:`master`.
        optimizer: Steps the ``master`` source.
        beside: Other numbers for the parameters, which are on the device and leave it with them.
    """

    named: dict[str, nn.Parameter]
    rates: list[float]
    optimizer: AdamW

    def __init__(
        self, module: nn.Module, config: TrainerConfig, optim: OptimizerConfig | None
    ) -> None:
        self.module, self._config, self._optim = module, config, optim
        self.beside: Source = []
        self._away: dict[str, Offloaded] = {}

    def _kept(self) -> dict[str, nn.Parameter]:
        """See :attr:`named`."""
        kept = self.module.named_parameters()
        return {name: p for name, p in kept if p.requires_grad or self._optim is None}

    def begin_backward(self, *, last: bool) -> None:
        """Get ready to add the gradient of a micro batch; ``last``: of the global batch."""

    def end_backward(self) -> None:
        """The gradient of a micro batch was computed."""

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
    def _place(self, name: str) -> Place:
        """Where a parameter lies in a source."""

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
        """What ``weights`` or ``gradients`` occupy."""

    @property
    def dtype(self) -> torch.dtype:
        """Number format of forward passes."""
        return DTYPES[self._config.precision.param]

    def sources(self) -> dict[str, Source]:
        """What training goes on from."""
        master = {"master": self.master()}
        if self._optim is None:
            return master
        return master | {
            "exp_avg": self.optimizer.averages,
            "exp_avg_sq": self.optimizer.squares,
        }

    def buffers(self) -> dict[str, Tensor]:
        """What belongs to the weights and no gradient reaches, as statistics of observations."""
        return dict(saved_buffers(self.module))

    def restart_optimizer(self, *, blank: bool = False) -> None:
        """Forget all moments; ``blank``: they are going to be set, and need not be 0."""
        if self._optim is None:
            self.optimizer = AdamW([], self._config.optim, rates=[], blank=blank)
            return
        values = value_names(self.module, self.named)
        self.optimizer = AdamW(
            self.master(),
            self._optim,
            rates=self.rates,
            values=[self._place(name) for name in self.named if name in values],
            rest=[self._place(name) for name in self.named if name not in values],
            blank=blank,
        )

    def apply_step(self, *, norm: float, factor: float, values_alone: bool = False) -> None:
        """Clip the gradients of this norm and step, or only what the module names as
        ``value_parameters``."""
        limit = self.optimizer.config.max_grad_norm
        gradients = self.gradients()
        if limit is not None and norm > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        self.optimizer.step(gradients, factor=factor, values_alone=values_alone)
        self.changed()

    def offload(self) -> None:
        """Take from the device what the config names."""
        for kind in ("weights", "gradients", "optimizer"):
            if getattr(self._config.offload, kind) and kind not in self._away:
                self._away[kind] = Offloaded(self._occupied(kind), keep=kind != "gradients")

    def _occupied(self, kind: str) -> list[Tensor]:
        """What leaves the device with ``weights``, ``gradients`` or ``optimizer``."""
        match kind:
            case "optimizer":
                return [*self.optimizer.averages, *self.optimizer.squares]
            case "weights":  # a matrix with an adapter may be a buffer
                return [*self._buffers(kind), *self.buffers().values(), *self.beside]
        return self._buffers(kind)

    def onload(self, *kinds: str) -> None:
        """Bring everything back, or only some of ``weights``, ``gradients``, ``optimizer``."""
        for kind in kinds or tuple(self._away):
            if kind in self._away:
                self._away.pop(kind).restore()

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
        """Weights and moments whole, by name, on the CPU; they may share memory with this, unless
        ``copy``. Ranks without ``keep`` only take part."""
        sources = self.sources().items()
        columns = {kind: self.gather(source, keep=keep, copy=copy) for kind, source in sources}
        if not keep:
            return {}
        buffers = {name: buffer.to("cpu", copy=copy) for name, buffer in self.buffers().items()}
        return {"steps": self.optimizer.steps, "buffers": buffers, **columns}

    def parts(self) -> dict[str, Any]:
        """The same, as this rank keeps it; parts share memory with what they are parts of."""
        columns: dict[str, Any] = {
            kind: {name: self.part(name, source) for name in self.named}
            for kind, source in self.sources().items()
        }
        return {"steps": self.optimizer.steps, "buffers": self.buffers(), **columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a CheckpointError where it is of another model."""
        if isinstance(self.module, Policy):
            self.module.refuse_unknown_tensors(state["master"].keys() - self.named.keys())
        check_compatible({n: tuple(p.shape) for n, p in self.named.items()}, state["master"])
        check_compatible(self.buffers(), state["buffers"])
        for kind, source in self.sources().items():
            for name in self.named:
                self.fill(name, source, state[kind][name])
        for name, buffer in self.buffers().items():
            buffer.copy_(state["buffers"][name])
        self.optimizer.steps = int(state["steps"])
        self.changed()


class PlainModule(TrainedModule):
    """Whole on a rank.

    The kept parameters become views of one vector, and their gradients of another, so that
    clipping and the optimizer are a few calls: what an optimizer does to each parameter of a small
    network costs more in calls than in arithmetic. In bfloat16 a float32 vector stands behind them.
    Other parameters are brought to ``precision.param``. With ``blank`` nothing is written now, as
    weights and moments are going to be set.
    """

    def __init__(
        self,
        module: nn.Module,
        config: TrainerConfig,
        optim: OptimizerConfig | None,
        *,
        blank: bool = False,
    ) -> None:
        super().__init__(module, config, optim)
        kept = self._kept()
        rates = learning_rates(module, kept, optim or config.optim)
        self.rates = list(dict.fromkeys(rates.values())) or [0.0]
        # Those of one learning rate lie side by side.
        self.named = {
            name: kept[name] for rate in self.rates for name in kept if rates[name] == rate
        }
        for parameter in module.parameters():
            if not parameter.requires_grad and optim is not None:
                parameter.data = parameter.data.to(self.dtype)
        self._slices: dict[str, tuple[int, slice]] = {}
        self._sizes = [0] * len(self.rates)
        for name, parameter in self.named.items():
            group = self.rates.index(rates[name])
            first = self._sizes[group]
            self._sizes[group] = first + parameter.numel()
            self._slices[name] = group, slice(first, self._sizes[group])
        if blank:
            self._master = torch.empty(self.size, device=next(module.parameters()).device)
        else:
            parts = [p.detach().flatten().float() for p in self.named.values()]
            self._master = torch.cat(parts) if parts else torch.empty(0)
        single = self.dtype == torch.float32
        self._used = self._master if single else self._master.to(self.dtype)
        # What is blank is set to 0 before it is used.
        make = torch.empty_like if blank else torch.zeros_like
        self._gradient = make(self._used)
        # In bfloat16 micro batches are summed in float32, as ranks are.
        self._sum = self._gradient if single else make(self._master)
        for name, parameter in self.named.items():
            parameter.grad = None
            parameter.data = self.part(name, self.used())
            if optim is not None:
                parameter.grad = self.part(name, self._groups(self._gradient))
        self.restart_optimizer(blank=blank)

    @property
    def size(self) -> int:
        """Kept numbers."""
        return sum(self._sizes)

    def _groups(self, vector: Tensor) -> Source:
        """A view of the part of each learning rate."""
        return list(torch.split(vector, self._sizes))

    def set_gradients(self, vector: Tensor) -> None:
        """Take a summed gradient [``size``], in the order of :attr:`named`."""
        self._sum.copy_(vector)

    def begin_backward(self, *, last: bool) -> None:
        """See :meth:`TrainedModule.begin_backward`."""
        del last
        if self._sum is not self._gradient:
            self._gradient.zero_()

    def end_backward(self) -> None:
        """See :meth:`TrainedModule.end_backward`."""
        if self._sum is not self._gradient:
            self._sum.add_(self._gradient)

    def gradients(self) -> Source:
        """A vector for each learning rate."""
        return self._groups(self._sum)

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
        """A vector for each learning rate."""
        return self._groups(self._used)

    def master(self) -> Source:
        """A vector for each learning rate."""
        return self._groups(self._master)

    def _place(self, name: str) -> Place:
        """A part of the vector of its learning rate."""
        return self._slices[name]

    def part(self, name: str, source: Source) -> Tensor:
        """A view."""
        group, place = self._slices[name]
        return source[group][place].view(self.named[name].shape)

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
            parameter.data = self.part(name, self.master()).clone()

    def _buffers(self, kind: str) -> list[Tensor]:
        if kind == "gradients":
            return [self._gradient, self._sum]
        frozen = [p.data for p in self.module.parameters() if not p.requires_grad]
        return [self._master, self._used, *frozen]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor itself, without a copy."""
    # Of a DTensor; importing its class takes half as long as torch, and only divided runs need it.
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.detach()


class Offloaded:
    """Storages whose contents lie in host memory; every tensor and view of them stays valid, but
    may not be read until :meth:`restore`. Without ``keep`` they come back as zeros. What looks at
    the pages of a file, as frozen weights on the host may, stays."""

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        self._parts: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        for tensor in storages.values():
            storage = tensor.untyped_storage()
            if not storage.resizable():
                continue  # pages of a file, which the kernel takes back by itself
            self._parts.append((storage, storage.nbytes(), _host_copy(tensor) if keep else None))
            storage.resize_(0)

    def restore(self) -> None:
        """Bring the contents back to the same device."""
        for storage, size, copy in self._parts:
            storage.resize_(size)
            target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if copy is None:
                target.zero_()
            else:
                target.copy_(copy)
        self._parts = []


def _host_copy(tensor: Tensor) -> Tensor:
    """All bytes of the storage of a tensor, pinned where the device is an accelerator."""
    storage = tensor.untyped_storage()
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.device.type != "cpu")
    return copy.copy_(source)
