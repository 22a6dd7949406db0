"""The pages say nothing that is not so: links, commands, keys, printed output and shown files."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys

import pytest
import typer

from rlinf.cli.main import app, main
from rlinf.cli.tasks import TASKS
from rlinf.config.schema import walk

from ..extending.conftest import PACKAGE
from .pages import PAGES, ROOT, Block, blocks, commands, inline_code, prose

KEYS = {name for task in TASKS.values() for name, _, _ in walk(task.config_class())}
SECTIONS = {key.partition(".")[0] for key in KEYS}
OPTION_KEYS = ("env.train.options.",)  # belong to the adapter, which checks them itself


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in _anchors(file.read_text(encoding="utf-8")), f"no heading {target}"


def _anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_commands_exist():
    group = typer.main.get_command(app)
    verbs = {name: set(command.commands) if hasattr(command, "commands") else set()
             for name, command in group.commands.items()}  # fmt: skip
    for page, line in commands():
        words = [word for word in line.split()[1:] if not word.startswith("-")]
        if not words or not re.fullmatch(r"[a-z]+", words[0]):
            continue  # `rlinf --help`, `rlinf …`
        assert words[0] in verbs, f"{page.name}: `{line}`"
        if verbs[words[0]] and len(words) > 1:
            assert words[1] in verbs[words[0]], f"{page.name}: `{line}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_exist(page):
    for code in inline_code(page):
        key = code.partition("=")[0].removeprefix("~")
        looks_like_a_key = re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key)
        if looks_like_a_key and key.partition(".")[0] in SECTIONS:
            known = key in KEYS or key.startswith(OPTION_KEYS)
            assert known or (ROOT / key).exists(), f"`{code}` is no key"


@pytest.mark.parametrize(
    "block", [block for block in blocks() if block.info == "console checked"], ids=str
)
def test_printed_output_is_real(block: Block, capsys, monkeypatch, tmp_path):
    """A block ``console checked`` holds commands and what they print; ``…`` stands for lines."""
    for name, text in _files_of(block).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for command, expected in _transcript(block.text):
        words = shlex.split(command)
        assert words[0] == "rlinf"
        main(words[1:])
        printed = capsys.readouterr()
        lines = [line.rstrip() for line in (printed.out + printed.err).strip().splitlines()]
        _assert_shown(expected, lines)


def _files_of(block: Block) -> dict[str, str]:
    """Recipes that the page shows before: blocks marked with a file name without a folder."""
    found = {}
    for other in blocks():
        title = re.search(r'title="([\w.-]+\.yaml)"', other.info)
        if other.page == block.page and title:
            found[title[1]] = other.text
    return found


def _transcript(text: str) -> list[tuple[str, list[str]]]:
    parts = re.split(r"^\$ (.*)$", text, flags=re.MULTILINE)[1:]
    return [
        (command, [line.rstrip() for line in shown.strip().splitlines()])
        for command, shown in zip(parts[::2], parts[1::2], strict=True)
    ]


def _assert_shown(expected: list[str], lines: list[str]) -> None:
    start = 0
    free = False
    for line in expected:
        if line == "…":
            free = True
            continue
        rest = lines[start:]
        assert line in rest, f"not printed: {line!r}; printed was:\n" + "\n".join(lines)
        skipped = rest.index(line)
        assert free or skipped == 0, f"{rest[0]!r} was printed before {line!r}"
        start += skipped + 1
        free = False
    assert free or start == len(lines), f"also printed: {lines[start:]}"


FILES_SHOWN = [block for block in blocks() if 'title="' in block.info and "example" in block.info]


@pytest.mark.parametrize("block", FILES_SHOWN, ids=lambda block: block.info)
def test_shown_files_are_the_tested_ones(block: Block):
    name = re.search(r'title="example_package/([^"]+)"', block.info)
    assert name, block.info
    assert block.text == (PACKAGE / name[1]).read_text(encoding="utf-8")


def test_every_file_of_the_example_is_shown():
    shown = " ".join(block.info for block in FILES_SHOWN)
    files = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix in (".py", ".toml", ".yaml")
    ]
    assert [name for name in files if f'"example_package/{name}"' not in shown] == [
        "rlinf_example/__init__.py"
    ]


@pytest.mark.parametrize(
    "block", [block for block in blocks() if block.info == "python checked"], ids=str
)
def test_programs_run(block: Block, tmp_path):
    (tmp_path / "program.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if ">>> " in page.read_text()], ids=str)
def test_interactive_examples(page):
    assert doctest.testfile(str(page), module_relative=False).failed == 0
