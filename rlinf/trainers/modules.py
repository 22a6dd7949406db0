"""Modules by name, as ranks hold them: gradients, optimizer steps, memory, state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlinf.checkpoint.weights import check_compatible
from rlinf.checkpoint.weights_file import read_header
from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.adapters import begins_with_adapter, is_adapter, with_adapters, without_adapter
from rlinf.models.policy import Policy, repeated_layers
from rlinf.models.policy_weights import BASE, check_base, read_weights
from rlinf.scheduler.accelerators import AcceleratorUtil
from rlinf.trainers.config import OptimizerConfig, TrainerConfig
from rlinf.trainers.ranks import Grid, Ranks, Replicas
from rlinf.trainers.scoring import ScoringModel
from rlinf.trainers.trained import PlainModule, Source, TrainedModule

POLICY = "policy"
"""Name of the module that acts, and of the loss that trains it."""
CRITIC = "critic"
"""Name of the module that gives values, and of the loss that trains it."""

PartT = TypeVar("PartT")
Share = Callable[[PartT], tuple[Tensor, dict[str, Tensor]]]
"""From a micro batch to its share of the loss and of the metrics."""


class TrainedModules:
    """Modules by name, divided over ranks or whole on each.

    Args:
        modules: They lie on the host, the same on every rank; where ranks divide them, they are
            never whole on a device.
        config: How they compute.
        ranks: The processes that divide them, or the ranks that hold them whole.
        optim: Settings of the optimizer of each module that is trained. The others follow these,
            as target networks do; they are kept and saved.

    Attributes:
        ranks: The ranks that hold them now.
        held: What holds each of them.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        config: TrainerConfig,
        ranks: Ranks | Replicas,
        *,
        optim: Mapping[str, OptimizerConfig],
    ) -> None:
        self.config = config
        self.ranks = ranks if isinstance(ranks, Replicas) else Grid(ranks, config.ranks_per_replica)
        for name, module in modules.items():
            if name not in optim:
                module.requires_grad_(False)
        self._optim = dict(optim)
        self.held: dict[str, TrainedModule] = {
            name: self.hold(name, module, self.ranks) for name, module in modules.items()
        }

    def hold(
        self, name: str, module: nn.Module, ranks: Grid | Replicas, *, blank: bool = False
    ) -> TrainedModule:
        """A module as ranks hold it.

        It lies on the host; where it is divided it may also be without weights, on ``meta``. With
        ``blank`` weights and moments are going to be set.
        """
        optim = self._optim.get(name)
        if not isinstance(ranks, Grid) or ranks.mesh is None:
            return PlainModule(module.to(ranks.device), self.config, optim, blank=blank)
        # Imports a good deal that one rank does not need.
        from rlinf.trainers.sharded import ShardedModule

        layers = repeated_layers(module)
        if isinstance(module, Policy | ScoringModel):
            layers = module.repeated_layers()
        return ShardedModule(module, layers, self.config, optim, ranks)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What is called in forward passes, by name."""
        return {name: held.module for name, held in self.held.items()}

    def gradients(
        self, names: Collection[str], parts: Sequence[PartT], share: Share[PartT]
    ) -> dict[str, float]:
        """Add up the gradients of named modules, and of no other, over micro batches and ranks.

        Args:
            names: Of the modules.
            parts: This rank's micro batches.
            share: Loss and metrics of one, whose sums are returned.
        """
        self.need_loaded()
        if isinstance(self.ranks, Replicas):
            return self._tree_gradients(self.ranks, names, parts, share)
        return self._running_gradients(self.ranks, names, parts, share)

    def _tree_gradients(
        self, ranks: Replicas, names: Collection[str], parts: Sequence[PartT], share: Share[PartT]
    ) -> dict[str, float]:
        chosen = [self.held[name] for name in names]
        held = [each for each in chosen if isinstance(each, PlainModule)]
        parameters = [parameter for each in held for parameter in each.named.values()]
        found: list[str] = []

        def leaf(number: int) -> Tensor:
            """Gradient of one micro batch with its metrics behind it, as one vector."""
            loss, metrics = share(parts[number])
            found[:] = metrics
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            flat = [
                torch.zeros_like(p).flatten() if g is None else g.flatten()
                for p, g in zip(parameters, gradients, strict=True)
            ]
            return torch.cat([*flat, torch.stack([m.detach().to(loss) for m in metrics.values()])])

        total = ranks.tree_sum(len(parts), leaf)
        *summed, last = torch.split(total, [*(each.size for each in held), len(found)])
        for each, vector in zip(held, summed, strict=True):
            each.set_gradients(vector)
        return dict(zip(found, last.tolist(), strict=True))

    def _running_gradients(
        self, ranks: Grid, names: Collection[str], parts: Sequence[PartT], share: Share[PartT]
    ) -> dict[str, float]:
        for each in self.held.values():
            each.discard_gradients()
        totals: Tensor | None = None
        found: list[str] = []
        for number, part in enumerate(parts, start=1):
            loss, metrics = share(part)
            for each in self.held.values():
                each.begin_backward(last=number == len(parts))
            loss.backward()  # type: ignore[no-untyped-call]
            for name in names:
                self.held[name].end_backward()
            found = list(metrics)
            stacked = torch.stack([metric.detach().double() for metric in metrics.values()])
            totals = stacked if totals is None else totals + stacked
        assert totals is not None
        for name, each in self.held.items():
            if name not in names:
                each.discard_gradients()  # what a loss passes through is not trained by it
        return dict(zip(found, ranks.sum_data(totals).tolist(), strict=True))

    def norms(self, names: Collection[str]) -> dict[str, float]:
        """Global L2 norm of the gradient of each module, the same on every rank."""
        return {name: self.held[name].gradient_norm() for name in names}

    def step(
        self, norms: Mapping[str, float], *, factor: float, values_alone: bool = False
    ) -> None:
        """Clip the gradients of modules, of these norms, and apply them, or only those of their
        values."""
        for name, norm in norms.items():
            held = self.held[name]
            held.apply_step(norm=norm, factor=factor, values_alone=values_alone)

    def settle(self) -> None:
        """Let modules be written to as they are kept, not as a forward pass gathered them."""
        for held in self.held.values():
            held.changed()

    def offload(self) -> None:
        """Take from the device what ``offload`` in the config names; nothing else works until
        :meth:`onload`, but for what uses :meth:`loaded`."""
        for held in self.held.values():
            held.offload()
        AcceleratorUtil.empty_cache(self.ranks.device)

    def onload(self, *kinds: str) -> None:
        """Bring everything back, bit for bit, or some of ``weights``, ``gradients``,
        ``optimizer``."""
        for held in self.held.values():
            held.onload(*kinds)

    @property
    def offloaded(self) -> bool:
        """Whether something is away."""
        return any(held.offloaded for held in self.held.values())

    @contextmanager
    def loaded(self, *kinds: str) -> Iterator[bool]:
        """Bring back what is offloaded, or some of it, for a moment; whether anything was."""
        away = self.offloaded
        if away:
            self.onload(*kinds)
        try:
            yield away
        finally:
            if away:
                self.offload()

    def need_loaded(self) -> None:
        """Refuse to compute with what is not there, by a RuntimeError."""
        if self.offloaded:
            raise RuntimeError("weights, gradients or optimizer are offloaded; call onload first")

    def state_dict(self, *, keep: bool, copy: bool = False) -> dict[str, Any]:
        """Weights, buffers and moments whole, by module; see :meth:`TrainedModule.state_dict`."""
        return {name: held.state_dict(keep=keep, copy=copy) for name, held in self.held.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, given whole on every rank; a CheckpointError where it
        is of another model."""
        for name, held in self.held.items():
            held.load_state_dict(state[name])

    def save_sharded(self, directory: Path, more: Mapping[str, Any]) -> list[Path]:
        """Write the same, and tensors and plain data with it, into a directory of its own; each
        rank its own part, of whose files it gives the paths."""
        from rlinf.trainers.checkpoint import save_parts

        return save_parts(directory, self._tree() | dict(more), self.ranks)

    def load_sharded(self, directory: Path, more: Mapping[str, Any]) -> Mapping[str, Any]:
        """Continue from :meth:`save_sharded`, written by any number of ranks; what came with it."""
        from rlinf.trainers.checkpoint import load_parts

        found = load_parts(directory, self._tree() | dict(more), self.ranks)
        for name, held in self.held.items():
            held.optimizer.steps = int(found["modules"][name]["steps"])
            held.changed()
        return found

    def _tree(self) -> dict[str, Any]:
        """Parts that share memory with what they are parts of, so that reading fills them."""
        return {"modules": {name: held.parts() for name, held in self.held.items()}}


class KeptWeights:
    """Copies of the policy's trained weights, of which this rank has a part, and perhaps of its
    buffers, which can stand in their place for a while.

    Attributes:
        weights: They.
        buffers: They; none: the buffers of the policy hold.
        keeps: Whether there are copies.
    """

    weights: Source
    buffers: list[Tensor]
    keeps: bool = True
    _dtype: torch.dtype | None = None  # that whole weights are given in; None: their own

    def __init__(self, modules: TrainedModules) -> None:
        self._modules = modules

    @property
    def _held(self) -> TrainedModule:
        return self._modules.held[POLICY]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the weights of the policy for these."""
        self._modules.need_loaded()
        held, kept = self._held, [*self.weights, *self.buffers]
        used = [*held.used(), *held.buffers().values()][: len(kept)]
        with torch.no_grad():
            present = [tensor.clone() for tensor in used]
            _copy(used, kept)
            held.forget_gathered()
            try:
                yield
            finally:
                _copy(used, present)
                held.forget_gathered()

    def _named_buffers(self) -> dict[str, Tensor]:
        return dict(zip(self._held.buffers(), self.buffers, strict=False))

    def state_dict(self, *, keep: bool, copy: bool = False) -> dict[str, Any] | None:
        """Whole weights by name, and buffers, where ``keep``; None without copies. See
        :meth:`TrainedModule.state_dict`."""
        if not self.keeps:
            return None
        whole = self._held.gather(self.weights, keep=keep, copy=copy, dtype=self._dtype)
        return {"weights": whole, "buffers": self._named_buffers()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, given whole on every rank."""
        for name, value in state["weights"].items():
            self._held.fill(name, self.weights, value)
        _copy(self.buffers, list(state["buffers"].values()))

    def parts(self) -> dict[str, Any]:
        """The same, as this rank keeps it; empty without copies."""
        if not self.keeps:
            return {}
        held = self._held
        weights = {name: held.part(name, self.weights) for name in held.named}
        return {"weights": weights, "buffers": self._named_buffers()}

    def load_parts(self, parts: Mapping[str, Any]) -> None:
        """Continue from :meth:`parts`, into whose memory was read."""
        held = self._held
        for name in held.named if self.keeps else ():
            # On an accelerator they may be copies of what lies on the host.
            held.fill(name, self.weights, held.whole(parts["weights"][name]))


class Average(KeptWeights):
    """Weights that follow the trained ones at a distance, float32 beside them, and by which is
    acted; statistics of observations are those of the policy itself."""

    def __init__(self, modules: TrainedModules) -> None:
        super().__init__(modules)
        self.weights = [tensor.clone() for tensor in self._held.master()]
        self.buffers = []
        self._held.beside = self.weights

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Average ← (1 − share) average + share trained; with 1 they are equal, bit for bit."""
        for kept, trained in zip(self.weights, self._held.master(), strict=True):
            kept.copy_(trained) if share == 1.0 else kept.lerp_(trained, share)


class Reference(KeptWeights):
    """The policy that a run began with, or that of a file, on the host; no copy is kept where only
    a fresh adapter is trained, which can be off.

    Args:
        modules: Of the run.
        path: Weights that a run with the same model left behind; None: those of ``modules``.

    Raises:
        ConfigError: They are of another model.
    """

    def __init__(self, modules: TrainedModules, path: Path | None = None) -> None:
        super().__init__(modules)
        # Without the adapter the policy is not what the run began with where that had been trained
        # before, or something beside it is trained.
        begun = begins_with_adapter(self._held.module)
        self.keeps = path is not None or begun or not all(map(is_adapter, self._held.named))
        self._dtype = self._held.dtype
        self.weights, self.buffers = [], []
        if self.keeps:
            self.weights = [tensor.to("cpu", copy=True) for tensor in self._held.used()]
            self.buffers = [tensor.to("cpu", copy=True) for tensor in self._held.buffers().values()]
        if path is not None:
            self._read(path)

    def _read(self, path: Path) -> None:
        held, key = self._held, "algorithm.teacher"
        # A run leaves the policy itself, without adapters of its matrices.
        found = with_adapters(read_weights(path, key=key), {**held.named, **held.buffers()})
        own = {name: tuple(each.shape) for name, each in held.named.items()} | held.buffers()
        policy = held.module
        if isinstance(policy, Policy):
            # One that has imitated has no values, which a reference is not asked for.
            values = {id(parameter) for parameter in policy.value_parameters()}
            absent = {n for n, p in held.named.items() if id(p) in values and n not in found}
            own = {name: each for name, each in own.items() if name not in absent}
            left_over = {
                n for n in found.keys() - own.keys() if n.split(".")[0] in policy.critic_parts
            }
            found = {name: each for name, each in found.items() if name not in left_over}
            if any(name not in found for name, _ in policy.named_parameters()):
                check_base(policy, read_header(path).get(BASE), source=str(path), key=key)
        try:
            check_compatible(own, found, source=str(path))
        except CheckpointError as error:
            raise ConfigError(str(error), key=key) from error
        for name in held.named:  # on all ranks in the same order
            if name in found:
                held.fill(name, self.weights, found[name])
        _copy(self.buffers, [found[name] for name in held.buffers()])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """See :meth:`KeptWeights.in_place`."""
        if self.keeps:
            with super().in_place():
                yield
            return
        self._modules.need_loaded()
        with without_adapter(self._held.module):
            yield


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
