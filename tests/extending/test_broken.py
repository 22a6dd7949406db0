"""A package that cannot be used is in nobody's way until it is asked for."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from rlinf.cli.main import main
from rlinf.config.registry import Registry
from rlinf.errors import ConfigError

GROUPS = {
    "envs": "rlinf.envs",
    "models": "rlinf.models",
    "algorithms": "rlinf.algorithms",
    "loggers": "rlinf.loggers",
}
ASK = {
    "envs": "env.train.type",
    "models": "model.type",
    "algorithms": "algorithm.type",
    "loggers": "logger.backends",
}
REASONS = {
    "unimportable": "cannot be imported: RuntimeError: no such simulator",
    "absent": "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
    "function": "is no subclass of rlinf.",
}


@pytest.fixture(autouse=True)
def _broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "broken_things-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-things\nVersion: 1.0\n")
    points = {
        "unimportable": "broken_things:Env",
        "absent": "no_such_module:Thing",
        "function": "textwrap:dedent",
    }
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group in GROUPS.values()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "broken_things.py").write_text("raise RuntimeError('no such\\nsimulator')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


@pytest.mark.parametrize("kind", GROUPS)
def test_list_shows_it_in_one_line(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, reason in REASONS.items():
        text = " ".join("\n".join(lines).split())
        assert f"{name} " in text
        assert f"(entry point {GROUPS[kind]} of broken-things) {reason}" in text


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("kind", GROUPS)
def test_asked_for_by_name_it_is_a_user_error(
    capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    value = f"[{name}]" if kind == "loggers" else name
    assert main(["train", "quickstart", "--dry-run", f"{ASK[kind]}={value}"]) == 2
    message = capsys.readouterr().err
    assert f"`{name}` is broken: " in message
    assert f"(entry point {GROUPS[kind]} of broken-things) {REASONS[name]}" in message
    assert "Traceback" not in message


def test_everything_else_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--dry-run"]) == 0
    assert main(["train", "quickstart", "--dry-run", "gae_lambda=1"]) == 2
    assert "did you mean `algorithm.gae_lambda`?" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["model", "env.train.options", "algorithm"])
def test_explain_shows_it_in_one_line(capsys: pytest.CaptureFixture[str], key: str) -> None:
    assert main(["explain", key]) == 0
    lines = capsys.readouterr().out.splitlines()
    for reason in REASONS.values():
        assert sum(reason in line for line in lines) == 1


def test_a_key_that_a_broken_package_may_have_is_not_found_and_it_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "model.bandwidth"]) == 2
    message = capsys.readouterr().err
    assert "no key `model.bandwidth`" in message
    assert "model `absent` is broken" in message


def test_the_projects_own_names_cannot_be_taken() -> None:
    registry = Registry("thing", "rlinf.models", {"absent": "collections:OrderedDict"}, dict)
    assert registry.load("absent").__name__ == "OrderedDict"
    with pytest.raises(ConfigError, match="unknown thing `functoin`; did you mean `function`"):
        registry.load("functoin")
