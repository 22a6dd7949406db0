"""A user without a home directory: a container that runs under a number without a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.cli.main import main
from rlinf.config.home import home_directory, user_directory
from rlinf.envs import installation
from rlinf.errors import ConfigError
from rlinf.planner import kept_profiles


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "RLINF_ENVS", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_there_is_no_directory_below_it_but_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home_directory() is None
    assert user_directory("XDG_CACHE_HOME", ".cache") is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_directory("XDG_CACHE_HOME", ".cache") == tmp_path


def test_nothing_is_installed_and_nothing_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    assert "missing" in capsys.readouterr().out
    assert installation.variables("metaworld") is not None
    with pytest.raises(ConfigError, match="no home directory; set HOME, XDG_DATA_HOME or RLINF_E"):
        installation.home()


def test_nothing_is_kept() -> None:
    assert kept_profiles.kept_profiles() is None
    told = kept_profiles.why_not_kept(OSError(2, "there is no home directory"))
    assert told == "there is no home directory; XDG_CACHE_HOME names another place"


def test_a_path_that_begins_there_is_refused_by_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["eval", "~/run"]) == 2
    told = capsys.readouterr().err
    assert "there is no home directory" in told
    assert "~NAME" not in told
