"""The pages say nothing that is not so: links, commands, keys, printed output and shown files."""

from __future__ import annotations

import doctest
import re
import shlex
import tomllib

import pytest
import typer
import yaml
from pydantic import BaseModel, ValidationError

from rlinf.cli.main import app, main
from rlinf.config.load import recipe_names
from rlinf.config.schema import walk
from rlinf.config.yaml_source import read_yaml
from rlinf.errors import ConfigError
from rlinf.runners.task import REGISTRY
from tests.warm import Warm

from ..extending.conftest import PACKAGE
from .pages import (
    PAGES,
    ROOT,
    Block,
    blocks,
    commands,
    files_of,
    inline_code,
    prose,
    trainings,
)

OWNERS: dict[str, set[type[BaseModel]]] = {}
for _task in REGISTRY.names():
    for _name, _owner, _ in walk(REGISTRY.load(_task).config_class):
        OWNERS.setdefault(_name, set()).add(_owner)
KEYS = set(OWNERS)
SECTIONS = {key.partition(".")[0] for key in KEYS}
OPTION_KEYS = ("env.train.options.",)  # belong to the adapter, which checks them itself
OWN_KEYS = (
    "cluster.component_placement.",
    "data.observations.",
    "data.chat_template_kwargs.",
    "data.tasks.",
    "cluster.residency.",
    "reward.functions.",
    "rollout.agent.tools.",
    *OPTION_KEYS,
)
VERBS = typer.main.get_command(app).commands


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


def test_commands_and_their_options_exist():
    for page, line in commands():
        words = line.partition(" #")[0].split()[1:]
        if not words or not re.fullmatch(r"[a-z]+", words[0]):
            continue  # `rlinf --help`, `rlinf …`
        assert words[0] in VERBS, f"{page.name}: `{line}`"
        command = VERBS[words.pop(0)]
        if hasattr(command, "commands") and words:
            assert words[0] in command.commands, f"{page.name}: `{line}`"
            command = command.commands[words.pop(0)]
        options = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
        for word in words:
            assert not word.startswith("--") or word in options, f"{page.name}: `{line}`"


def test_every_command_and_page_is_named_where_one_looks_for_it():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in VERBS if not re.search(rf"\| `rlinf {name}[ `]", readme)] == []
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {page.name for page in PAGES if page.parent.name == "docs"} - {"index.md"}
    assert [name for name in sorted(pages) if f"({name})" not in index] == []
    recipes = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    names = [name.removeprefix("evaluation/") for name in recipe_names()]
    assert [name for name in names if name not in recipes] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    for code in inline_code(page):
        for path in re.findall(
            r"(?<![\w./])(?:rlinf|tests|benchmarks|recipes|docs)/[\w./-]+", code
        ):
            assert "NAME" in path or (ROOT / path).exists(), f"`{code}`: there is no {path}"


def test_programs_of_the_pages_exist_and_have_the_options():
    texts = [(str(block), block.text) for block in blocks()]
    texts += [(page.name, code) for page in PAGES for code in inline_code(page)]
    for where, text in texts:
        joined = re.sub(r"\\\n *", " ", text)
        for path, words in re.findall(r"python (benchmarks/[\w/]+\.py)([^\n#|;]*)", joined):
            assert (ROOT / path).exists(), f"{where}: there is no {path}"
            for option in re.findall(r"(?<= )--[a-z][\w-]*", words):
                program = (ROOT / path).read_text(encoding="utf-8")
                assert f'"{option}"' in program, f"{where}: {path} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_exist(page):
    for code in inline_code(page):
        key = code.partition("=")[0].removeprefix("~")
        looks_like_a_key = re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key)
        if looks_like_a_key and key.partition(".")[0] in SECTIONS:
            known = key in KEYS or key.startswith(OPTION_KEYS)
            assert known or (ROOT / key).exists(), f"`{code}` is no key"


# The others show a mistake, or keys of a package outside.
SECTIONS_SHOWN = [
    block
    for block in blocks()
    if block.info.startswith("yaml") and not re.search(r"typo|example_package", block.info)
]


@pytest.mark.parametrize("block", SECTIONS_SHOWN, ids=str)
def test_keys_of_shown_sections_exist(block: Block):
    for key in _keys(yaml.safe_load(block.text)):
        if key.partition(".")[0] in SECTIONS:
            assert key in KEYS or key.startswith(OWN_KEYS), f"{key} is no key"


@pytest.mark.parametrize("block", SECTIONS_SHOWN, ids=str)
def test_values_of_shown_sections_are_legal(block: Block):
    for key, value in _keys(read_yaml(block.text, str(block))[0]).items():
        if key in OWNERS and not isinstance(value, dict):
            name = key.rpartition(".")[2]
            assert any(_takes(owner, name, value) for owner in OWNERS[key]), f"{key} = {value!r}"


def _takes(owner: type[BaseModel], name: str, value: object) -> bool:
    """Whether a section has nothing against the value of this key."""
    try:
        owner.model_validate({name: value})
    except ValidationError as error:
        return all(each["loc"][:1] != (name,) for each in error.errors())
    except ConfigError:  # of keys that are not shown
        return True
    return True


def _keys(content: object, above: str = "") -> dict[str, object]:
    """Every section and value with its dotted key."""
    if not isinstance(content, dict):
        return {}
    found = {}
    for name, value in content.items():
        found |= {f"{above}{name}": value, **_keys(value, f"{above}{name}.")}
    return found


@pytest.mark.parametrize(("block", "line"), trainings(recipe_names()))
def test_shown_trainings_are_accepted(block: Block, line: str, capsys, monkeypatch, tmp_path):
    for name, text in files_of(block).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "--dry-run"]
    code, error = main([*words, "--dry-run"]), capsys.readouterr().err
    # All that may stand against it is a simulator that is not on this machine.
    missing = "1 problem" in error and "missing: " in error and "`rlinf env install " in error
    assert code == 0 or missing, error


@pytest.mark.parametrize(
    "block", [block for block in blocks() if block.info == "console checked"], ids=str
)
def test_printed_output_is_real(block: Block, capsys, monkeypatch, tmp_path):
    """A block ``console checked`` holds commands and what they print; ``…`` stands for lines."""
    for name, text in files_of(block).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for command, expected in _transcript(block.text):
        words = shlex.split(command)
        assert words[0] == "rlinf"
        main(words[1:])
        printed = capsys.readouterr()
        lines = [line.rstrip() for line in (printed.out + printed.err).strip().splitlines()]
        _assert_shown(expected, lines)


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


def test_shown_floors_are_those_that_import_linter_keeps():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| \d+ \|([^|]+)\|", page, re.M)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    [layers] = [each["layers"] for each in contracts if each["type"] == "layers"]
    kept = [re.findall(r"rlinf\.(\w+)", layer) for layer in layers if "__main__" not in layer]
    assert [sorted(rooms) for rooms in shown] == [sorted(rooms) for rooms in kept]


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
    done = Warm(["program.py"], directory=tmp_path)
    _, errors = done.communicate(timeout=240)
    assert done.returncode == 0, errors.decode()


@pytest.mark.parametrize("page", [page for page in PAGES if ">>> " in page.read_text()], ids=str)
def test_interactive_examples(page):
    assert doctest.testfile(str(page), module_relative=False).failed == 0
