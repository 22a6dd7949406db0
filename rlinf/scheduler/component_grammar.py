"""The grammar of ``cluster.component_placement``, read without a cluster.

::

    component_placement = { name {"," name} : entry }
    entry               = spec | {node_group: label | "a,b" | [labels], placement: spec}
    spec                = segment {"," segment}
    segment             = resources [":" processes]
    resources           = "all" | rank | first "-" last      (both ends included)
    processes           = rank | first "-" last

Without processes, a segment has one process per resource, counted on from the segment before. In a
segment one count divides the other: each process has several resources in a row, or each resource
several processes in a row. ``0-1:0-3,3-5,7-10:7-14`` is 4 processes on resources 0 and 1, one each
on 3, 4 and 5, and 8 on 7 to 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf.scheduler.errors import PlacementSyntaxError
from rlinf.scheduler.rank_text import ALL, format_ranks, parse_range


@dataclass(frozen=True)
class PlacementEntry:
    """One entry of ``cluster.component_placement``."""

    components: tuple[str, ...]  # share the placement
    node_groups: tuple[str, ...] | None  # whose resources are counted; None is the whole cluster
    spec: str

    def processes(self, num_resources: int | None = None) -> list[tuple[int, ...]]:
        """Read the text, see :func:`parse_spec`."""
        return parse_spec(self.spec, num_resources, ",".join(self.components))


def parse_component_placement(placement: Mapping[Any, Any]) -> list[PlacementEntry]:
    """Read all of ``cluster.component_placement``, in its order.

    Raises:
        PlacementSyntaxError: An entry is malformed, or a component is named twice.
    """
    entries = [_parse_entry(str(names), value) for names, value in placement.items()]
    seen: dict[str, str] = {}
    for entry in entries:
        key = ",".join(entry.components)
        for name in entry.components:
            if name in seen:
                raise PlacementSyntaxError(
                    f"Duplicate component names in component_placement: '{name}' is in "
                    f"'{seen[name]}' and in '{key}'. Component names must be unique; remove it "
                    "from one of them."
                )
            seen[name] = key
        entry.processes()
    return entries


def _parse_entry(names: str, value: Any) -> PlacementEntry:
    components = tuple(name.strip() for name in names.split(","))
    if not all(components):
        legal = ",".join(name for name in components if name)
        raise PlacementSyntaxError(
            f"component_placement has an empty component name in the key '{names}'. Nearest legal: "
            f"'{legal or 'actor'}'."
        )
    if not isinstance(value, Mapping):
        return PlacementEntry(components, None, _spec_text(value, names))
    unknown = sorted(set(map(str, value)) - {"node_group", "placement"})
    if unknown:
        raise PlacementSyntaxError(
            f"component_placement['{names}'] has unknown fields {unknown}. Legal fields are "
            "'node_group' and 'placement'."
        )
    if "placement" not in value:
        raise PlacementSyntaxError(
            f"component_placement['{names}']: placement must be specified, got {dict(value)}. "
            "Nearest legal: add 'placement: all'."
        )
    groups = _labels(value.get("node_group"), names)
    return PlacementEntry(components, groups, _spec_text(value["placement"], names))


def _spec_text(value: Any, names: str) -> str:
    if isinstance(value, str) or type(value) is int:
        return str(value)
    if value is None:
        raise PlacementSyntaxError(
            f"component_placement['{names}'] says no placement. Several components that share one "
            f"stand in quotes: '{names},NAME': 0."
        )
    raise PlacementSyntaxError(
        f"component_placement['{names}'] must be text such as '0-3:0-7', a number, or "
        f"{{node_group: ..., placement: ...}}, got {type(value).__name__}: {value!r}."
    )


def _labels(value: Any, names: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    listed = value if isinstance(value, list | tuple) else str(value).split(",")
    labels = tuple(str(label).strip() for label in listed)
    if not labels or not all(labels) or len(set(labels)) < len(labels):
        raise PlacementSyntaxError(
            f"component_placement['{names}'].node_group must name one or several different node "
            f"groups, got {value!r}. For example 'a800' or 'a800,4090'."
        )
    return labels


def parse_spec(
    spec: str, num_resources: int | None = None, components: str = ""
) -> list[tuple[int, ...]]:
    """Resource ranks of each process, ascending, by process rank.

    ``components`` names whose placement it is, for messages. Without ``num_resources`` it is not
    checked that a resource exists, and there are no processes in the list for ``all``.

    Raises:
        PlacementSyntaxError: The message tells position, reason and the nearest legal text.
    """
    return _SpecParser(spec, num_resources, components).parse()


class _SpecParser:
    """Reads parts of a text from left to right and remembers what they used."""

    def __init__(self, spec: str, num_resources: int | None, components: str) -> None:
        self.spec = spec
        self.num_resources = num_resources
        self.components = components
        self.resources: list[int] = []
        self.num_processes = 0
        self.position = 0
        self.part = ""

    def parse(self) -> list[tuple[int, ...]]:
        parts = self.spec.split(",")
        assigned: list[tuple[int, ...]] = []
        for self.part in parts:
            assigned += self._parse_part(alone=len(parts) == 1)
            self.position += len(self.part) + 1
        return assigned

    def _parse_part(self, *, alone: bool) -> list[tuple[int, ...]]:
        if not self.part.strip():
            whole = ",".join(part for part in self.spec.split(",") if part.strip())
            raise self._error("is empty", "a segment names resources", whole or ALL)
        first, *others = self.part.split(":")
        if len(others) > 1:
            reason = "a segment is 'resources' or 'resources:processes'"
            raise self._error("has more than one ':'", reason, f"{first}:{others[0]}")
        resources = self._parse_resources(first, alone)
        many = self._count_processes(others[0]) if others else None
        if resources is None:
            return []
        few = len(resources)
        if many is None:
            many = few
            self.num_processes += few
        if few % many == 0:
            size = few // many
            return [tuple(resources[i * size : (i + 1) * size]) for i in range(many)]
        if many % few == 0:
            return [(rank,) for rank in resources for _ in range(many // few)]
        counts = [n for n in range(1, max(many, few) * 2) if n % few == 0 or few % n == 0]
        nearest = min(counts, key=lambda n: abs(n - many))
        start = self.num_processes - many
        reason = (
            f"the number of process ranks {many} must be divisible by the number of resource ranks "
            f"{few}, or the other way round"
        )
        legal = self._with_processes(start, nearest)
        raise self._error(f"puts {many} processes on {few} resources", reason, legal)

    def _parse_resources(self, text: str, alone: bool) -> range | None:
        if text.strip().lower() != ALL:
            ranks = self._range(text, "resource")
        elif not alone:
            reason = "'all' leaves no resource for another segment"
            raise self._error("cannot stand beside other segments", reason, ALL)
        elif self.num_resources is None:
            return None
        else:
            ranks = range(self.num_resources)
        self._check_resources(ranks)
        self.resources.extend(ranks)
        return ranks

    def _check_resources(self, ranks: range) -> None:
        if self.num_resources is not None and (not ranks or ranks[-1] >= self.num_resources):
            available = format_ranks(range(self.num_resources))
            last = max(self.num_resources - 1, 0)
            legal = format_ranks([r for r in ranks if r <= last] or [last])
            reason = f"there are {self.num_resources} resources: {available}"
            raise self._error("is out of range", reason, legal if self.num_resources else None)
        after = self.resources[-1] + 1 if self.resources else 0
        if ranks[0] >= after:
            return
        used = sorted(set(ranks).intersection(self.resources))
        legal = format_ranks(range(after, max(after, ranks[-1]) + 1))
        if used:
            reason = f"Resource ranks must be unique, {format_ranks(used)} is used before"
            raise self._error("names a resource twice", reason, legal)
        reason = "Resource ranks must be in ascending order across segments"
        raise self._error(f"comes after resource {after - 1}", reason, legal)

    def _count_processes(self, text: str) -> int:
        if text.strip().lower() == ALL:
            reason = "the number of processes (after ':') must be written out, it cannot be 'all'"
            raise self._error("has 'all' processes", reason, self.part.split(":", maxsplit=1)[0])
        ranks, first = self._range(text, "process"), self.num_processes
        if ranks[0] != first:
            reason = (
                "Process ranks must be in ascending order and continuous from 0 across segments, "
                f"so this one starts at {first}"
            )
            legal = self._with_processes(first, len(ranks))
            raise self._error(f"starts at process {ranks[0]}", reason, legal)
        self.num_processes += len(ranks)
        return len(ranks)

    def _with_processes(self, first: int, count: int) -> str:
        return f"{self.part.split(':')[0].strip()}:{format_ranks(range(first, first + count))}"

    def _range(self, text: str, kind: str) -> range:
        try:
            return parse_range(text.strip(), kind)
        except PlacementSyntaxError as error:
            raise PlacementSyntaxError(f"{self._where()}: {error}") from None

    def _where(self) -> str:
        entry = f"component_placement['{self.components}'] = " if self.components else "placement "
        indent = len(self.part) - len(self.part.lstrip())
        return f"{entry}'{self.spec}', position {self.position + indent} ('{self.part.strip()}')"

    def _error(self, what: str, why: str, legal: str | None) -> PlacementSyntaxError:
        nearest = "" if legal is None else f" Nearest legal: '{legal}'."
        return PlacementSyntaxError(f"{self._where()} {what}: {why}.{nearest}")
