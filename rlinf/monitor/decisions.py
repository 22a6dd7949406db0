"""What a run decided about its own execution: ``decisions.jsonl``, appended to and never changed.

One JSON object per line. Decisions of steps that a resumed run repeats stay: they were taken.

    {"time": 1764000000.0, "step": 12, "what": "switch", "reason": "…", "cost_seconds": 0.8,
     "gain_predicted": 0.21, "gain_measured": null, "numbers": {…}, "plan": {…}}
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

log = logging.getLogger(__name__)

DECISIONS_FILE = "decisions.jsonl"

What = Literal[
    "start", "profile", "refuse", "stay", "switch", "keep", "return", "drop", "replan", "rescale"
]
"""``start``: the plan that a run begins with; ``profile``: what was measured; ``refuse``: a rule of
the recipe stands against a faster plan; ``stay``: no better plan was found; ``switch``: another
plan is tried; ``keep``: it measured faster and stays; ``return``: it did not, the plan before is
back; ``drop``: a plan did not start, and is not tried again; ``replan``: measured times left the
prediction; ``rescale``: workers were moved inside a step."""


@dataclass(frozen=True)
class Decision:
    """One decision, taken after ``step`` training steps at ``time`` (seconds since 1970)."""

    step: int
    what: What
    reason: str
    """A sentence with its numbers."""
    cost_seconds: float | None = None
    """Time that carrying it out took from training."""
    gain_predicted: float | None = None
    """Seconds per step that it was expected to save."""
    gain_measured: float | None = None
    """Seconds per step that it saved; negative: it cost them."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    """The plan in force from here on, as plain data; None where it did not change."""
    time: float = field(default_factory=time.time)


_DECISION = TypeAdapter(Decision)


def note_decision(run_dir: Path | str, decision: Decision) -> None:
    """Write one decision behind the others of a run; it is with the system when this returns.

    That it cannot be written, such as on a full disk, is a warning: no reason to stop training.
    """
    line = json.dumps(asdict(decision)).encode() + b"\n"
    path = Path(run_dir) / DECISIONS_FILE
    try:
        with open(path, "ab+", buffering=0) as file:
            file.seek(max(file.tell() - 1, 0))
            # A killed process may have left a line without its end; this one must not join it.
            torn = file.read(1) not in (b"", b"\n")
            file.write(b"\n" + line if torn else line)
    except OSError as error:
        log.warning("a decision was not written (%s): %s", error.strerror, decision)


def read_decisions(run_dir: Path | str) -> list[Decision]:
    """The decisions of a run, oldest first; none where none were taken.

    A line that is no decision is left out: a killed process may have left it half, and others may
    write to the file.
    """
    path = Path(run_dir) / DECISIONS_FILE
    if not path.is_file():
        return []
    decisions = []
    for line in path.read_bytes().splitlines():
        try:
            decisions.append(_DECISION.validate_python(json.loads(line)))
        except ValueError:  # what is no JSON, no text or, to pydantic, no decision
            continue
    return decisions
