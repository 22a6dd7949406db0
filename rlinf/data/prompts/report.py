"""What was left out when prompts were loaded, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SHOWN = 5
"""Records that are named; the rest is counted."""


@dataclass(frozen=True, kw_only=True)
class LoadingReport:
    """How many records became prompts.

    Args:
        records: Records that were found.
        prompts: Prompts that they gave.
        broken: Records that were left out because they could not be read.
        long: Prompts that were longer than allowed.
        truncated: Those of them that were cut and kept.
        beyond_limit: Prompts that were not taken because enough were there.
        examples: The first broken and over-long records: where, and why.
    """

    records: int
    prompts: int
    broken: int = 0
    long: int = 0
    truncated: int = 0
    beyond_limit: int = 0
    examples: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.prompts} prompts of {self.records} records"]
        counts = {
            "broken": self.broken,
            "too long": self.long - self.truncated,
            "cut to length": self.truncated,
            "beyond the limit": self.beyond_limit,
        }
        parts += [f"{count} {name}" for name, count in counts.items() if count]
        lines = [", ".join(parts), *(f"  {example}" for example in self.examples)]
        hidden = self.broken + self.long - len(self.examples)
        if hidden:
            lines.append(f"  and {hidden} more")
        return "\n".join(lines)


@dataclass
class Notes:
    """Collects what happened while one set is loaded."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, kind: str, where: str, reason: str) -> None:
        """Count an event, and keep it if it is one of the first."""
        self.counts[kind] += 1
        if len(self.examples) < SHOWN:
            self.examples.append(f"{where}: {reason}")

    def report(self, prompts: int) -> LoadingReport:
        """Everything so far."""
        counts = self.counts
        return LoadingReport(
            records=counts["records"],
            prompts=prompts,
            broken=counts["broken"],
            long=counts["long"],
            truncated=counts["truncated"],
            beyond_limit=counts["beyond_limit"],
            examples=tuple(self.examples),
        )
