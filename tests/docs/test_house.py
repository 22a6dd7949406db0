"""The package as a house: no circle of imports, and how many modules a task is read with."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rlinf

ROOT = Path(rlinf.__file__).parent


def imports_of(name: str, tree: ast.AST, modules: set[str]) -> set[str]:
    """Modules of the package that one imports, in functions, too, but not for types alone."""
    found: set[str] = set()
    todo = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inner = [f"{node.module}.{each.name}" for each in node.names]
                found |= {each if each in modules else node.module for each in inner}
            elif isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
            todo.append(node)
    return (found & modules) - {name}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """What each module imports."""
    files = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in ROOT.rglob("*.py")
    }
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    return {name: imports_of(name, tree, set(files)) for name, tree in trees.items()}


def reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += imports[name]
    return seen


def test_imports_have_no_circle(imports: dict[str, set[str]]) -> None:
    left = {name: set(others) for name, others in imports.items()}
    while ends := {name for name, others in left.items() if not others}:
        left = {name: others - ends for name, others in left.items() if name not in ends}
    assert not left, f"in a circle, or above one: {sorted(left)}"


def test_a_language_task_is_read_without_the_planner_and_simulators(
    imports: dict[str, set[str]],
) -> None:
    found = reached("rlinf.runners.reasoning", imports)
    assert len(found) <= 150
    rooms = {name.split(".")[1] for name in found if "." in name}
    assert not rooms & {"planner", "rescale", "cli"}
    assert {"rlinf.envs.config", "rlinf.envs.supervised.vector"}.isdisjoint(found)
