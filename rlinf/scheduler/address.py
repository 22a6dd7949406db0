"""Names of workers, what a worker tells others about itself, and which ways are slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from random import Random
from typing import Literal, SupportsIndex

from rlinf.scheduler.errors import AddressError
from rlinf.scheduler.hardware import AcceleratorType, HardwareInfo


@dataclass(init=False, order=True)
class WorkerAddress:
    """Path to a worker: its group and the ranks that lead to it, written ``group:0:1``.

    A path longer than one rank names a child process that a worker started and registered; an empty
    one names the group itself.

    Raises:
        AddressError: The group name is no text or contains ``:``, which separates ranks, or a rank
            is no whole number or negative.
    """

    root_group_name: str
    rank_path: list[int]

    def __init__(
        self, root_group_name: str, ranks: SupportsIndex | Sequence[SupportsIndex] = ()
    ) -> None:
        if not isinstance(root_group_name, str):
            raise AddressError(f"The name of a worker group is text, got {root_group_name!r}.")
        if ":" in root_group_name:
            raise AddressError(
                f"Root group name cannot contain ':' character, got '{root_group_name}': the colon "
                f"separates ranks. Use for example '{root_group_name.replace(':', '_')}'."
            )
        self.root_group_name = root_group_name
        path = [ranks] if isinstance(ranks, SupportsIndex) else ranks
        try:
            self.rank_path = [index(rank) for rank in path]
        except TypeError:
            raise AddressError(
                f"A rank of group '{root_group_name}' is a whole number, or a path of them for a "
                f"child of a worker, got {ranks!r}."
            ) from None
        if any(rank < 0 for rank in self.rank_path):
            raise AddressError(
                f"Ranks of a worker address start at 0, got {self.rank_path} for group "
                f"'{root_group_name}'."
            )

    @property
    def rank(self) -> int:
        """Rank among the siblings: the last of the path, 0 for the group itself."""
        return self.rank_path[-1] if self.rank_path else 0

    def get_name(self) -> str:
        """Text form, the inverse of :meth:`from_name`."""
        return ":".join([self.root_group_name, *map(str, self.rank_path)])

    def get_parent_rank(self) -> int:
        """Rank of the worker above this one, 0 where there is none."""
        return self.rank_path[-2] if len(self.rank_path) > 1 else 0

    def get_parent_address(self) -> WorkerAddress | None:
        """Address one rank shorter, None for the group itself."""
        if not self.rank_path:
            return None
        return WorkerAddress(self.root_group_name, self.rank_path[:-1])

    def get_child_address(self, rank: int) -> WorkerAddress:
        """Address of child ``rank`` of this worker."""
        return WorkerAddress(self.root_group_name, [*self.rank_path, rank])

    @classmethod
    def from_name(cls, worker_name: str) -> WorkerAddress:
        """Read ``group:0:1``; AddressError where no path of ranks follows the group name."""
        group, *ranks = worker_name.split(":")
        if not all(rank.isdecimal() for rank in ranks):
            raise AddressError(
                f"'{worker_name}' is not a worker name: expected 'group' followed by ':rank' once "
                "or more, with ranks of 0 or above, for example 'actor:0'."
            )
        return cls(group, [int(rank) for rank in ranks])

    @classmethod
    def from_parent_name_rank(cls, parent_name: str, rank: int) -> WorkerAddress:
        """Address of child ``rank`` of the worker that is called ``parent_name``."""
        return cls.from_name(parent_name).get_child_address(rank)

    def __hash__(self) -> int:
        return hash(self.get_name())

    def __repr__(self) -> str:
        return f"WorkerAddress('{self.get_name()}')"


@dataclass(frozen=True)
class WorkerInfo:
    """What is known about a running worker without asking its process."""

    address: WorkerAddress
    rank: int
    group_world_size: int
    cluster_node_rank: int
    accelerator_type: AcceleratorType  # of its node's devices
    accelerator_model: str  # of its node's devices, empty without any
    accelerator_rank: int  # its first device on the node, -1 without one
    node_ip: str  # where other nodes reach its node
    node_port: int  # that it holds on its node, 0 when it holds none
    available_accelerators: list[int]  # devices it may use, numbered over the whole cluster
    hardware_infos: list[HardwareInfo]  # other hardware that is assigned to it, such as robots

    def __hash__(self) -> int:
        return hash(self.address)


@dataclass(frozen=True)
class Delay:
    """How long a bit takes over a link, in seconds: ``mean``, or drawn anew for each message.

    ``spread`` is half the width of a uniform one and the standard deviation of a gaussian one.
    """

    mean: float
    spread: float = 0.0
    distribution: Literal["constant", "uniform", "exponential", "gaussian"] = "constant"

    def draw(self, random: Random) -> float:
        """One delay, 0 or more."""
        match self.distribution:
            case "uniform":
                return random.uniform(self.mean - self.spread, self.mean + self.spread)
            case "exponential":
                return random.expovariate(1 / self.mean)
            case "gaussian":
                return max(0.0, random.gauss(self.mean, self.spread))
        return self.mean


@dataclass(frozen=True)
class SlowLinks:
    """What of a network is slow.

    Attributes:
        delays: By the places of sender and receiver (:func:`place_of`); other links are not slow.
        bandwidths: Places that share a link, and its bytes per second: for all that they send over
            slow links, and again for all that they receive.
    """

    delays: Mapping[tuple[str, str], Delay]
    bandwidths: Sequence[tuple[Sequence[str], float]] = ()


def place_of(worker: str) -> str:
    """Where a worker is: ``env:0`` for ``EnvGroup:0`` too, and for what it started itself."""
    group, *ranks = worker.split(":")
    return ":".join([group.removesuffix("Group") or group, *ranks[:1]])
