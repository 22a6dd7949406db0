"""Configuration of the weight syncers; imports no torch, so that a recipe is checked in an instant.

Example::

    weight_sync: {type: patch, bucket_size: 67108864}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.registry import Registry, load_attribute

if TYPE_CHECKING:
    from torch import Tensor

    from rlinf.scheduler.worker import Worker
    from rlinf.weight_sync.protocol import Parties, WeightReceiver, WeightSender


class WeightSyncConfig(StrictModel):
    """Base of every syncer's config section."""

    sender: ClassVar[str]
    """``module:Class`` of the sending side, imported when it is built."""
    receiver: ClassVar[str]
    """``module:Class`` of the receiving side."""

    type: str
    """Which syncer this section configures."""

    def problems(self, runtime: str, away: int) -> Iterator[tuple[str, str, str]]:
        """What stands against it on ``cluster.runtime`` with so many receivers ``away`` from the
        sender's node: key of the section, why, what would do."""
        del runtime, away
        yield from ()

    @property
    def of_accelerators(self) -> str:
        """The key by which it moves the memory of accelerators alone; empty: it does not."""
        return ""

    def build_sender(self, worker: Worker, parties: Parties) -> WeightSender[Any]:
        """The sending side, inside a worker of the sending group."""
        sender: WeightSender[Any] = load_attribute(self.sender)(self, worker, parties)
        return sender

    def build_receiver(
        self, worker: Worker, parties: Parties, targets: Mapping[str, Tensor] | None = None
    ) -> WeightReceiver[Any]:
        """The receiving side, inside a worker of the receiving group.

        ``targets`` are the tensors that the weights are for, such as ``module.state_dict()``:
        values arrive in their types. None: in the types of the sender.
        """
        receiver: WeightReceiver[Any] = load_attribute(self.receiver)(
            self, worker, parties, targets
        )
        return receiver


class ReferenceConfig(WeightSyncConfig):
    """No copy: receivers in the sender's process look at the sender's tensors."""

    sender = "rlinf.weight_sync.reference:ReferenceSender"
    receiver = "rlinf.weight_sync.reference:ReferenceReceiver"
    type: Literal["reference"] = "reference"
    """Which syncer this section configures."""

    def problems(self, runtime: str, away: int) -> Iterator[tuple[str, str, str]]:
        """It needs workers that are threads of one process."""
        del away
        if runtime != "local":
            why = f"reaches the process of the sender alone, and the runtime is {runtime}"
            yield "type", why, "nearest: shared_memory on one node, or auto"


class SharedMemoryConfig(WeightSyncConfig):
    """One double-buffered block of shared memory, for receivers on the sender's node."""

    sender = "rlinf.weight_sync.shared_memory:SharedMemorySender"
    receiver = "rlinf.weight_sync.shared_memory:SharedMemoryReceiver"
    type: Literal["shared_memory"] = "shared_memory"
    """Which syncer this section configures."""
    reads: Literal["copy", "view"] = "copy"
    """`copy`: a receiver copies the weights out and keeps them until its next receive. `view`: it
    looks at the block itself, read-only, and the sender waits before it overwrites what a receiver
    has not released."""

    def problems(self, runtime: str, away: int) -> Iterator[tuple[str, str, str]]:
        """It reaches no other node."""
        del runtime
        if away:
            many = f"{away} rollout processes are" if away > 1 else "a rollout process is"
            why = f"reaches the node of the first actor process alone, and {many} on another"
            yield "type", why, "nearest: patch, or bucket"


class BucketConfig(WeightSyncConfig):
    """All weights in flat buckets, to any node."""

    sender = "rlinf.weight_sync.bucket:BucketSender"
    receiver = "rlinf.weight_sync.bucket:BucketReceiver"
    type: Literal["bucket"] = "bucket"
    """Which syncer this section configures."""
    bucket_size: int = Field(default=64 << 20, ge=1)
    """Most bytes of a bucket. A tensor that is larger travels in parts."""
    transport: Literal["scheduler", "gloo", "nccl"] = "scheduler"
    """How buckets travel: as messages of the scheduler, or by a collective of torch, for which
    every worker needs an own process (and for `nccl` an own device)."""

    def problems(self, runtime: str, away: int) -> Iterator[tuple[str, str, str]]:
        """A collective needs a process for each of its members."""
        del away
        if runtime == "local" and self.transport != "scheduler":
            why = "needs every worker in an own process, and the runtime is local"
            yield "transport", why, "nearest: scheduler, or cluster.runtime: ray"

    @property
    def of_accelerators(self) -> str:
        """See :attr:`WeightSyncConfig.of_accelerators`."""
        return "transport" if self.transport == "nccl" else ""


class PatchConfig(BucketConfig):
    """Only the entries that changed, found by bit pattern; all weights at first, after a version
    skew, and where a patch would be larger."""

    sender = "rlinf.weight_sync.patch:PatchSender"
    receiver = "rlinf.weight_sync.patch:PatchReceiver"
    type: Literal["patch"] = "patch"  # type: ignore[assignment]
    """Which syncer this section configures."""
    delta_encoding: bool = True
    """Send distances between changed entries instead of their positions."""
    retry_after: int = Field(default=8, ge=0)
    """After changes that were too dense for a patch, send that many times all weights before
    looking again."""
    in_place: bool = False
    """Let receivers write into the tensors that they were built for, which saves a copy of the
    weights; nothing else may change those tensors."""

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if self.transport != "scheduler":
            raise illegal(
                "transport",
                f"patches do not travel by {self.transport}",
                hint="nearest: scheduler, or type `bucket`",
            )
        return self


class AutoConfig(PatchConfig):
    """`reference` within one process, `shared_memory` on one node, else `patch`, which sends
    buckets whenever it measures that too much changed."""

    sender = "rlinf.weight_sync.auto:AutoSender"
    receiver = "rlinf.weight_sync.auto:AutoReceiver"
    type: Literal["auto"] = "auto"  # type: ignore[assignment]
    """Which syncer this section configures."""
    reads: Literal["copy", "view"] = "copy"
    """How receivers read where `shared_memory` is chosen."""


REGISTRY = Registry(
    "weight syncer",
    "rlinf.weight_syncers",
    {
        "auto": "rlinf.weight_sync.config:AutoConfig",
        "reference": "rlinf.weight_sync.config:ReferenceConfig",
        "shared_memory": "rlinf.weight_sync.config:SharedMemoryConfig",
        "bucket": "rlinf.weight_sync.config:BucketConfig",
        "patch": "rlinf.weight_sync.config:PatchConfig",
    },
    WeightSyncConfig,
)
"""A package adds a syncer by an entry point in the group ``rlinf.weight_syncers`` that names its
config class, a subclass of :class:`WeightSyncConfig`."""

WeightSyncSection = Annotated[WeightSyncConfig, Component(REGISTRY)]
"""The section of a recipe that says how weights go from who trains them to who uses them."""
