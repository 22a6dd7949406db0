"""What planning and profiling must know of a recipe: items, limits, settings to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.config.dump import to_data
from rlinf.config.ranges import device_span

if TYPE_CHECKING:
    from rlinf.flow.constraints import Constraints
    from rlinf.flow.placed_config import PlacedConfig


@dataclass(frozen=True)
class Trial:
    """A setting in which a recipe is measured.

    Args:
        label: What is special about it.
        overrides: Values that replace the recipe's, as on the command line.
    """

    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Knob:
    """A key whose smaller values need less memory.

    Args:
        key: The key.
        now: Its value.
    """

    key: str
    now: int

    def smaller(self) -> tuple[int, ...]:
        """Smaller values that may be legal, descending: divisors, and halves of the value."""
        halves = {self.now >> n for n in range(1, self.now.bit_length())}
        divisors = {n for n in range(1, self.now) if self.now % n == 0}
        return tuple(sorted(halves | divisors, reverse=True))


@dataclass(frozen=True)
class Generation:
    """What a recipe says about the answers that it generates.

    Args:
        component: Who generates.
        most_tokens: Limit of an answer [tokens].
        max_running: Answers that run in one engine at the same time.
    """

    component: str
    most_tokens: int
    max_running: int


@dataclass(frozen=True)
class PlanningTraits:
    """What planning must know of a recipe.

    Args:
        items: Items of a step: environments or sequences.
        constraints: What its components can do.
        trials: Gives settings to measure, on the devices from one on, and so many of them; those
            that its rules refuse are left out.
        concurrent: Components that serve all items at once.
        packages: Distributions whose version changes times.
        sections: Sections of the recipe that change times, the model left out.
        worst_case: Overrides under which a step needs most memory, and the run is one step long.
        memory_knobs: Keys whose smaller values need less memory, those first that change the
            result of training least.
        generation: What it generates; None: no text.
    """

    items: int
    constraints: Constraints
    trials: Callable[[int, int], Iterable[Trial]]
    concurrent: frozenset[str]
    packages: tuple[str, ...]
    sections: Mapping[str, Any]
    worst_case: tuple[str, ...]
    memory_knobs: tuple[Knob, ...]
    generation: Generation | None = None


WARM_UP_STEPS = 2


def warm_up_steps(config: PlacedConfig) -> int:
    """First steps under a placement whose time does not count.

    Where rollouts run ahead, the first ones may have run before: under another placement.
    """
    return WARM_UP_STEPS + config.planning.constraints.staleness


def device_counts(devices: int) -> list[int]:
    """Numbers of devices to measure: powers of two, and all."""
    return sorted({devices, *(2**n for n in range(devices.bit_length()) if 2**n <= devices)})


def first_devices(count: int, first: int = 0) -> str:
    """So many devices from the first on, in the grammar of placements."""
    return device_span(first, first + count)


def timed_sections(config: PlacedConfig, names: tuple[str, ...]) -> dict[str, Any]:
    """Sections of a recipe that change times, with what does of its cluster.

    Not among it: seeds, paths, how long a run lasts, what is written. Numbers of items and pipeline
    stages, and placements, are what is measured.
    """
    data = to_data(config)
    found = {name: data[name] for name in names}
    cluster = data["cluster"]
    found["cluster"] = {
        key: cluster[key] for key in ("runtime", "num_nodes", "cpu_devices_per_node")
    }
    return found
