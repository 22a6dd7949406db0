"""A module whose parameters, gradients and moments are divided over ranks, by FSDP2 and by torch's
tensor parallelism."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rlinf.errors import ConfigError
from rlinf.trainers.config import OptimizerConfig, TrainerConfig
from rlinf.trainers.optimizer import Place, learning_rates
from rlinf.trainers.ranks import Grid
from rlinf.trainers.trained import DTYPES, Source, TrainedModule, local_part

_LITTLE = 256 * 2**20
"""Bytes of weights that `reshard: auto` gathers in one message, and keeps gathered."""


class ShardedModule(TrainedModule):
    """Each layer is gathered for its computation, and its gradients summed into their parts.

    With ``reshard: auto`` a little module is taken for one layer, whose weights stay gathered:
    messages of its own layers would take longer than what they carry.

    The module lies on the host, the same on every rank, or on ``meta`` where its weights and
    moments are going to be set. It is divided while it has no weights, and then each rank takes
    its float32 parts of them: of the whole weights one at a time comes to the device.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: list[nn.Module],
        config: TrainerConfig,
        optim: OptimizerConfig | None,
        ranks: Grid,
    ) -> None:
        super().__init__(module, config, optim)
        self._ranks = ranks
        self._data = ranks.mesh["data"]
        together = config.reshard == "auto" and _bytes(module, config) <= _LITTLE
        self._keeps = together or config.reshard == "after_update"
        blank = any(parameter.is_meta for parameter in module.parameters())
        weights = {} if blank else take_weights(module)
        if ranks.tensor_size > 1:
            parallelize(module, ranks.mesh["tensor"])
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.precision.param],
            reduce_dtype=DTYPES[config.precision.reduce],
            cast_forward_inputs=False,
        )
        for unit in [module] if together else [*layers, module]:
            reshard = not self._keeps
            fully_shard(unit, mesh=self._data, mp_policy=policy, reshard_after_forward=reshard)
        _allocate(module, ranks.device)
        for name, parameter in module.named_parameters():
            if not blank:
                # Dropped at once: the host has room for the parts as the weights go.
                self._write(parameter, local_part(parameter), weights.pop(name))
        self._sharded = [m for m in module.modules() if isinstance(m, FSDPModule)]
        for part in self._sharded:
            # Losses are already shares of a global batch: gradients are summed, not averaged.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        self.named = self._kept()
        self.rates = list(learning_rates(module, self.named, optim or config.optim).values())
        self._numbers = {name: number for number, name in enumerate(self.named)}
        self.restart_optimizer(blank=blank)

    def begin_backward(self, *, last: bool) -> None:
        """See :meth:`TrainedModule.begin_backward`."""
        if self._keeps:
            for part in self._sharded:
                part.set_requires_gradient_sync(last, recurse=False)
                part.set_reshard_after_backward(last, recurse=False)

    def gradients(self) -> Source:
        """Local part of each parameter's gradient."""
        return [
            torch.zeros_like(local_part(p)) if p.grad is None else local_part(p.grad)
            for p in self.named.values()
        ]

    def gradient_norm(self) -> float:
        """See :meth:`TrainedModule.gradient_norm`."""
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for parameter, gradient in zip(self.named.values(), self.gradients(), strict=True):
            square = torch.linalg.vector_norm(gradient).double() ** 2
            total += square / self._copies(parameter)
        return float(self._ranks.sum_all(total).sqrt())

    def _copies(self, parameter: nn.Parameter) -> int:
        """Ranks that hold the same part."""
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            placements = dict(zip(names, parameter.placements, strict=True))
            if not isinstance(placements.get("tensor", Replicate()), Replicate):
                return 1
        return self._ranks.tensor_size

    def discard_gradients(self) -> None:
        """See :meth:`TrainedModule.discard_gradients`."""
        for parameter in self.named.values():
            parameter.grad = None

    def changed(self) -> None:
        """Gather anew."""
        self.forget_gathered()

    def keep_gathered(self) -> None:
        """See :meth:`TrainedModule.keep_gathered`."""
        if self._keeps:
            for part in self._sharded:
                part.unshard()

    def forget_gathered(self) -> None:
        """See :meth:`TrainedModule.forget_gathered`."""
        for part in self._sharded:
            part.reshard()

    def used(self) -> Source:
        """Local parts."""
        return [local_part(parameter) for parameter in self.named.values()]

    def master(self) -> Source:
        """The same: they are rounded when they are gathered."""
        return self.used()

    def _place(self, name: str) -> Place:
        """The whole of a tensor of its own."""
        return self._numbers[name], ...

    def part(self, name: str, source: Source) -> Tensor:
        """A DTensor."""
        parameter, local = self.named[name], source[self._numbers[name]]
        return self._of_ranks(local, parameter) if isinstance(parameter, DTensor) else local

    @torch.no_grad()
    def whole(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Gathered from all ranks."""
        local = local_part(tensor).to(dtype or tensor.dtype)
        if not isinstance(tensor, DTensor):
            return local
        whole: Tensor = self._of_ranks(local, tensor).full_tensor()
        return whole

    def _of_ranks(self, local: Tensor, like: DTensor) -> DTensor:
        """This rank's part of a tensor that is divided as another one, over the present ranks.

        Torch keeps results of operations on DTensors by their meshes, and takes two meshes of the
        same ranks for equal whatever their process groups. After ranks left and came back, the mesh
        of a parameter may so be the former one, whose group is gone.
        """
        mesh = self._data if like.device_mesh.ndim == 1 else like.device_mesh
        return DTensor.from_local(
            local.to(self._ranks.device),
            mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def fill(self, name: str, source: Source, value: Tensor) -> None:
        """See :meth:`TrainedModule.fill`."""
        self._write(self.named[name], source[self._numbers[name]], value)

    @torch.no_grad()
    def _write(self, parameter: nn.Parameter, local: Tensor, value: Tensor) -> None:
        """Each rank takes its part; as every rank has the whole, nothing is sent."""
        value = value.detach()
        if isinstance(parameter, DTensor):
            value = distribute_tensor(
                value.to(self._ranks.device),
                parameter.device_mesh,
                parameter.placements,
                src_data_rank=None,
            ).to_local()
        local.copy_(value)

    def _buffers(self, kind: str) -> list[Tensor]:
        parameters = self.module.parameters() if kind == "weights" else ()
        return [local_part(parameter) for parameter in parameters]

    def offload(self) -> None:
        """See :meth:`TrainedModule.offload`."""
        if self._config.offload.gradients:
            self.discard_gradients()
        self.forget_gathered()
        super().offload()


def _bytes(module: nn.Module, config: TrainerConfig) -> int:
    """Of all weights as they are gathered."""
    numbers = sum(parameter.numel() for parameter in module.parameters())
    return numbers * DTYPES[config.precision.param].itemsize


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Put the parts of a module without weights on a device; buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def replace_parameters(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put another parameter in the place of each; ``make`` is called once for a tied one, which
    stays tied. The former ones stay as they are."""
    found: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in found:
                found[id(parameter)] = make(parameter)
            setattr(part, name, found[id(parameter)])


def take_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a module by name, as they were, a tied one once; it is left without, with
    float32 parameters on the device ``meta``."""
    weights: dict[str, Tensor] = dict(module.named_parameters())
    replace_parameters(module, _hollow)
    return weights


def _hollow(parameter: nn.Parameter) -> nn.Parameter:
    empty = torch.empty(parameter.shape, device="meta", dtype=torch.float32)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def parallelize(module: Any, mesh: Any) -> None:
    """Divide the linear layers of ``module.model``, of transformers, over a one-dimensional mesh by
    the plan of its architecture; a ConfigError where it has none, or its heads do not divide."""
    model = module.model
    text = model.config.get_text_config()
    patterns: dict[str, str] = dict(text.base_model_tp_plan or {})
    if not patterns:
        raise ConfigError(
            f"{type(model).__name__} has no plan for tensor parallelism; nearest: 1",
            key="tensor_parallel_size",
        )
    for heads in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(text, heads, None)
        if number is not None and number % mesh.size():
            raise ConfigError(
                f"{mesh.size()} does not divide the model's {heads} {number}",
                key="tensor_parallel_size",
            )
    backbone = model.base_model
    plan = {}
    embedding = backbone.get_input_embeddings()
    for name, part in backbone.named_modules():
        for pattern, style in patterns.items():
            if part is not embedding and re.fullmatch(
                re.escape(pattern).replace(r"\*", r"\d+"), name
            ):
                plan[name] = _style(style, type(model).__name__)
    parallelize_module(backbone, mesh, plan)
    _parallelize_vocabulary(model, mesh)


def _style(name: str, architecture: str) -> ParallelStyle:
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        # A norm of each head: the heads are divided, its weights are not.
        "replicated_with_grad_allreduce": lambda: SequenceParallel(
            sequence_dim=2, use_local_output=True
        ),
    }
    if name not in styles:
        raise ConfigError(
            f"{architecture} divides a layer by `{name}`, which is not known here; nearest: 1",
            key="tensor_parallel_size",
        )
    return styles[name]()


def _parallelize_vocabulary(model: Any, mesh: Any) -> None:
    """Divide the output layer by rows of the vocabulary, and the embedding with it where tied."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return
    embedding = model.get_input_embeddings()
    tied = head.weight is embedding.weight
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    if tied:
        by_rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(embedding, mesh, by_rows)
        head.weight = embedding.weight
