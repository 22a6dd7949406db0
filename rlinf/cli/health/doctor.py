"""``rlinf doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlinf.cli.screen import say, show_table


def doctor(
    ray: Annotated[bool, typer.Option("--ray", help="Start a Ray as well (about 10 s).")] = False,
) -> None:
    """Look at the machine: versions, cores, memory, disk, renderers; say how to fix what fails."""
    from rlinf.cli.health.machine import machine_findings, ray_finding
    from rlinf.cli.health.packages import package_findings
    from rlinf.cli.health.rendering import rendering_findings

    findings = [*package_findings(), *machine_findings(Path.cwd()), *rendering_findings()]
    if ray:
        findings.append(ray_finding())
    show_table("", ("", "", ""), [(f.name, f.status, f.detail) for f in findings])
    for finding in findings:
        if finding.fix and finding.status in ("failed", "warning"):
            say(f"\n{finding.status}: {finding.name}: {finding.detail}\n  fix: {finding.fix}")
    failed = [finding.name for finding in findings if finding.status == "failed"]
    say(f"\n{len(failed)} failed: {', '.join(failed)}" if failed else "\nEverything needed works.")
    if failed:
        raise typer.Exit(1)
