"""Pydantic's findings about a cluster configuration, told as one error of ours."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from rlinf.errors import UserError
from rlinf.scheduler.errors import ClusterConfigError


def cluster_config_error(error: ValidationError, model: type[BaseModel], where: str) -> UserError:
    """Return the exception to raise for what pydantic found.

    A rule of ours that failed inside a validator is returned as it was raised. Otherwise missing
    fields are told first, then unknown ones, then the first value of a wrong type.

    Args:
        error: What pydantic found.
        model: Class that was being built; its fields are the legal keys.
        where: Part of the configuration, in words.
    """
    findings = error.errors()
    for finding in findings:
        cause = finding.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            return cause
    missing = [str(f["loc"][-1]) for f in findings if f["type"] == "missing"]
    if missing:
        return ClusterConfigError(f"Missing fields '{missing}' detected {_at(findings, where)}.")
    unknown = {str(f["loc"][-1]) for f in findings if f["type"] == "extra_forbidden"}
    if unknown:
        return ClusterConfigError(
            f"Unknown fields '{unknown}' detected {_at(findings, where)}."
            f"{_suggestion(unknown, model, findings)}"
        )
    first = findings[0]
    key = ".".join(str(part) for part in first["loc"])
    return ClusterConfigError(f"{key} = {first['input']!r} {where}: {first['msg']}.")


def _at(findings: list[Any], where: str) -> str:
    path = ".".join(str(part) for part in findings[0]["loc"][:-1])
    return f"{where} at '{path}'" if path else where


def _suggestion(unknown: set[str], model: type[BaseModel], findings: list[Any]) -> str:
    if any(len(finding["loc"]) > 1 for finding in findings):
        return " Check the spelling against `rlinf explain cluster`."
    legal = sorted(model.model_fields)
    near = [difflib.get_close_matches(key, legal, n=1) for key in sorted(unknown)]
    meant = ", ".join(f"'{match[0]}'" for match in near if match)
    return (f" Did you mean {meant}?" if meant else "") + f" Valid fields are: {legal}."
