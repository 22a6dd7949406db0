"""``rlinf explain KEY``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from rlinf.cli.screen import say, show_table


def explain(
    key: Annotated[
        str, typer.Argument(help="A key, such as algorithm.gae_lambda; its end may be enough.")
    ],
) -> None:
    """Say what a configuration key means, its default and legal values, and who sets it."""
    from rlinf.cli.tasks import task_names
    from rlinf.config.explain import Explanation, unlike_any
    from rlinf.config.explain import explain as look_up
    from rlinf.errors import ConfigError
    from rlinf.runners.task import REGISTRY

    found: dict[Explanation, list[str]] = {}
    settings: dict[Explanation, list[tuple[str, str]]] = {}
    problems: dict[str, list[str]] = {}
    for name in task_names():
        try:
            for entry in look_up(REGISTRY.load(name).config_class, key, task=name):
                # What two tasks share is said once.
                shared = replace(entry, settings=())
                found.setdefault(shared, []).append(name)
                settings.setdefault(shared, []).extend(entry.settings)
        except ConfigError as error:
            problems.setdefault(str(error), []).append(name)
    if not found:
        classes = [REGISTRY.load(name).config_class for name in task_names()]
        sections = sorted({section for each in classes for section in each.model_fields})
        raise ConfigError(_nearest(key, problems) or unlike_any(key, sections))
    several = len({tuple(names) for names in found.values()}) > 1
    for shared, names in found.items():
        entry = replace(shared, settings=tuple(settings[shared]))
        owner = [entry.owner] if entry.owner else []
        tags = [*owner, f"task {' and '.join(names)}"] if several else owner
        say(f"{entry.key}  ({', '.join(tags)})" if tags else entry.key)
        if entry.description:
            say("  " + entry.description.replace("\n", "\n  "))
        say(f"  type     {entry.kind}")
        say(f"  default  {entry.default}")
        if entry.legal:
            say(f"  legal    {entry.legal}")
        if entry.settings:
            say("  set by   " + ", ".join(f"{recipe}: {value}" for recipe, value in entry.settings))
        if entry.children:
            show_table("", ("  key", "meaning"), [(f"  {k}", text) for k, text in entry.children])
        for line in entry.broken:
            say(f"  {line}")
        say()


def _nearest(key: str, problems: Mapping[str, Sequence[str]]) -> str:
    """What to say of a key that no task has, from what is said of it for each; the more certain.
    Empty where it is like no key of any."""
    many = f"several keys end in `{key}`: "
    if ending := [text.removeprefix(many) for text in problems if text.startswith(many)]:
        return many + ", ".join(dict.fromkeys(each for told in ending for each in told.split(", ")))
    for words in ("; here that is ", "; did you mean "):
        hints = {text.partition(words)[2]: tasks for text, tasks in problems.items()
                 if words in text}  # fmt: skip
        if len(hints) == 1:
            return next(text for text in problems if words in text)
        if hints:
            told = [f"{hint.rstrip('?')} ({', '.join(tasks)})"
                    for hint, tasks in hints.items()]  # fmt: skip
            return f"no key `{key}`{words}{', '.join(told)}" + ("?" if "mean" in words else "")
    return "" if len(problems) > 1 else next(iter(problems))
