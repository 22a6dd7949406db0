"""Virtual environments of simulators: which are there, what is wrong with one, how one is made."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import psutil
import pytest

from rlinf.cli.main import main
from rlinf.envs import installation
from rlinf.envs.base import ADAPTERS, REGISTRY, importing
from rlinf.envs.config import EnvConfig
from rlinf.envs.installation import State, interpreter, status
from rlinf.envs.requirements import SOURCE_VARIABLE, Requirements
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError

NAME = "panda_gym"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLINF_ENVS", str(tmp_path / "envs"))
    return tmp_path / "envs"


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Requirements of an env type that pip can fulfil at once: its lock file alone."""
    adapter = REGISTRY.load(NAME)
    if adapter.requirements.python != _version():
        pytest.skip(f"what {NAME} is pinned to is for Python {adapter.requirements.python}")
    small = Requirements(packages=(), module=NAME, python=_version())
    monkeypatch.setattr(adapter, "requirements", small)
    return Path(sys.executable)


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def test_every_adapter_says_exact_pins_its_licence_and_its_size() -> None:
    for name in ADAPTERS:
        needs = installation.requirements_of(name)
        if needs is not None:
            assert needs.packages
            assert all("==" in package for package in needs.packages), name
            assert needs.licence, name
            assert needs.disk_mb >= needs.download_mb > 0, name


def test_what_the_pins_bring_is_pinned_as_well() -> None:
    for name in ADAPTERS:
        needs = installation.requirements_of(name)
        if needs is not None:
            lock = installation.lock_file(name)
            assert lock is not None, f"rlinf env lock {name} > rlinf/envs/locks/{name}.txt"
            pins = lock.read_text().splitlines()
            assert all("==" in pin for pin in pins), name
            left_out = {pin for pin in needs.overrides if pin.endswith("sys_platform == 'never'")}
            assert {*needs.packages, *needs.overrides} - left_out <= set(pins), name
            absent = {pin.split("==")[0] for pin in left_out}
            assert not absent & {pin.split("==")[0] for pin in pins}, name


def test_what_holds_against_the_packages_is_pinned_and_given_to_the_installer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="networkx"):
        Requirements(packages=(), overrides=("networkx",), module="nothing")
    seen: dict[str, str] = {}

    def note(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        file = command[command.index("--overrides") + 1]
        seen[command[2]] = Path(file).read_text()
        return subprocess.CompletedProcess(command, 0, "networkx==3.4.2\n", "")

    monkeypatch.setattr(subprocess, "run", note)
    assert installation.resolve("gsenv") == "networkx==3.4.2\n"
    assert "networkx==3.4.2" in seen["compile"].splitlines()


def test_a_loose_pin_is_refused() -> None:
    with pytest.raises(ValueError, match="not pinned exactly: mujoco<4"):
        Requirements(packages=("mujoco<4",), module="mujoco")


def test_what_is_missing_is_named_with_its_command_and_its_size() -> None:
    found = status(NAME)
    assert found.state is State.MISSING
    assert "rlinf env install panda_gym" in found.detail
    assert "470 MB" in found.detail
    with pytest.raises(ConfigError, match="rlinf env install panda_gym"):
        interpreter(NAME)


def test_of_what_needs_a_source_the_command_says_so() -> None:
    assert "run `rlinf env install calvin --source DIRECTORY` (" in status("calvin").detail


def test_a_recipe_of_a_missing_simulator_ends_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choice = ["env.train.type=panda_gym", "env.train.options={task: PandaReach-v3}"]
    assert main(["train", "quickstart", *choice, "--dry-run"]) == 2
    assert "rlinf env install panda_gym" in capsys.readouterr().err


def test_an_env_type_without_needs_runs_here() -> None:
    assert status("gymnasium").state is State.READY
    assert interpreter("gymnasium") is None


@pytest.mark.usefixtures("packages")
def test_an_environment_is_made_used_and_removed(home: Path) -> None:
    directory = installation.install(NAME)
    assert status(NAME) == installation.Availability(State.READY, str(directory))
    python = interpreter(NAME)
    assert python == str(home / NAME / "bin" / "python")
    run = [python, "-c", "import sys; print(sys.prefix)"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip() == str(
        directory
    )
    installation.remove(NAME)
    assert status(NAME).state is State.MISSING
    with pytest.raises(ConfigError, match="no environment of `panda_gym`"):
        installation.remove(NAME)


@pytest.mark.parametrize("given", ["", ".", "..", "../mine", "DIRECTORY"])
def test_what_is_no_environment_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    mine, made = tmp_path / "mine", tmp_path / "envs" / "pusht"
    mine.mkdir()
    made.mkdir(parents=True)
    monkeypatch.setenv("RLINF_ENVS", str(made.parent))
    with pytest.raises(ConfigError, match=r"no environment of .*; there: pusht"):
        installation.remove(str(mine) if given == "DIRECTORY" else given)
    assert mine.is_dir()
    assert made.is_dir()


@pytest.mark.usefixtures("packages")
def test_a_source_is_told_to_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    needs = Requirements(
        packages=(), module="nothing", python=_version(), disk_mb=2000,
        source="a checkout of it", source_folders=("engine", "scenes"),
    )  # fmt: skip
    monkeypatch.setattr(REGISTRY.load(NAME), "requirements", needs)
    words = ["env", "install", NAME, "--source", str(source)]
    for why in ("no such directory", "it holds no engine and no scenes"):
        assert main(words) == 2  # before it asks whether to take so much of the disk
        assert capsys.readouterr() == ("", f"error: --source = '{source}': {why}; nearest: a "
                                           "checkout of it\n")  # fmt: skip
        source.mkdir(exist_ok=True)
    for folder in needs.source_folders:
        (source / folder).mkdir()
    installation.install(NAME, source=source)
    assert installation.variables(NAME)[SOURCE_VARIABLE] == str(source)


@pytest.mark.usefixtures("packages")
def test_an_interrupted_install_is_never_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installation.install(NAME)
    (home / NAME / installation.MANIFEST).unlink()
    assert status(NAME).state is State.INCOMPLETE
    with pytest.raises(ConfigError, match="an install was interrupted"):
        interpreter(NAME)
    installation.install(NAME)  # made anew
    assert status(NAME).state is State.READY


@pytest.mark.parametrize(
    "content", ["{}", "null", "[]", '"x"', '{"pins": 3}', '{"pins": "p", "with": 3}', '{"pins"']
)
def test_a_manifest_of_another_form_is_that_of_no_install(
    home: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / NAME).mkdir(parents=True)
    (home / NAME / installation.MANIFEST).write_text(content)
    assert status(NAME).state is State.INCOMPLETE
    assert not installation.is_made(NAME)
    assert installation.variables(NAME) == {}
    assert main(["env", "list"]) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith(NAME))
    assert "incomplete" in line


@pytest.mark.usefixtures("packages")
def test_what_an_environment_has_lost_is_named_and_an_install_makes_it_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = installation.install(NAME)
    (packages,) = directory.glob("lib/python*/site-packages")
    for lost in (*(packages / each for each in (NAME, "numpy", "gymnasium")), directory / "bin"):
        lost.rename(tmp_path / "away")
        what = "bin/python that can be run" if lost.name == "bin" else lost.name
        why = f"{directory} has no {what} any more; run `rlinf env install {NAME}`"
        assert status(NAME) == installation.Availability(State.DAMAGED, why)
        with pytest.raises(ConfigError, match=r"damaged: .* any more"):
            interpreter(NAME)
        (tmp_path / "away").rename(lost)
        assert status(NAME).state is State.READY
    shutil.rmtree(packages / NAME)
    assert main(["env", "install", NAME]) == 0
    assert capsys.readouterr().out.endswith(f"\nready: {directory}\n")
    assert status(NAME).state is State.READY


@pytest.mark.usefixtures("packages")
def test_what_an_environment_cannot_import_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = installation.install(NAME)
    (packages,) = directory.glob("lib/python*/site-packages")
    config = EnvConfig(type=NAME, options={"task": "PandaReach-v3"}, max_episode_steps=5)
    anew = f"run `rlinf env remove {NAME}`, then `rlinf env install {NAME}`"
    for damaged, why in (("pybullet", "ImportError: "), ("numpy/_core/_multiarray_umath", "")):
        (compiled,) = packages.glob(f"{damaged}.*.so")
        compiled.unlink()  # the installer's cache may have the same file
        compiled.write_bytes(b"\x7fELF")
        with pytest.raises(ConfigError) as refused:
            SupervisedVectorEnv(config, num_envs=1, seed=0)
        assert refused.value.key == "type"
        told = refused.value.reason
        assert told.startswith(f"{directory}/bin/python cannot run env type `{NAME}`: {why}")
        assert told.endswith(f"; {anew}")
        assert "\n" not in told


@pytest.mark.parametrize("remedy", ["run it anew", ""])
def test_a_library_that_the_machine_lacks_is_no_fault_of_the_environment(remedy: str) -> None:
    cannot = "cannot open shared object file: No such file or directory"
    with pytest.raises(ConfigError) as refused, importing(NAME, remedy):
        raise ImportError(f"libGL.so.1: {cannot}")
    why = f"{sys.executable} cannot run env type `{NAME}`: ImportError: libGL.so.1: {cannot}"
    helps = "; the machine lacks libGL.so.1, which its package manager installs"
    assert refused.value.reason.startswith(why)
    assert refused.value.reason.endswith(helps)
    brought = next(file for file in importlib.metadata.files("numpy") or () if ".so" in file.name)
    with pytest.raises(ConfigError if remedy else ImportError) as damaged, importing(NAME, remedy):
        raise ImportError(f"{brought.name}: {cannot}")
    assert str(damaged.value).endswith(remedy or cannot)


@pytest.mark.usefixtures("packages")
def test_the_interpreter_that_runs_need_not_be_on_the_path(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    installation.install(NAME)
    asked = (interpreter(NAME), "-c", "import sys; print(*sys.version_info[:2], sep='.')")
    assert subprocess.check_output(asked, text=True).strip() == _version()


@pytest.mark.usefixtures("packages")
def test_what_is_ready_is_not_taken_away_by_another_install(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installation.install(NAME)
    made = (home / NAME / installation.MANIFEST).stat().st_ino
    with monkeypatch.context() as without:
        without.setattr(installation, "_uv", None)  # which nothing may call
        assert main(["env", "install", NAME]) == 0
    assert f"`rlinf env remove {NAME}` first makes it anew" in capsys.readouterr().out
    assert (home / NAME / installation.MANIFEST).stat().st_ino == made
    manifest = json.loads((home / NAME / installation.MANIFEST).read_text())
    for other in ({"source": "/elsewhere"}, {"pins": "others"}):
        (home / NAME / installation.MANIFEST).write_text(json.dumps({**manifest, **other}))
        assert main(["env", "install", NAME]) == 0
        assert json.loads((home / NAME / installation.MANIFEST).read_text()) == manifest


@pytest.mark.usefixtures("packages")
def test_an_environment_keeps_its_further_packages(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = home / NAME / installation.MANIFEST
    adapters: list[str] = []
    for pins in ("", "others"):  # ready, and of another version
        installation.install(NAME)
        found = json.loads(manifest.read_text())
        found = {**found, "with": ["some-adapter"], "pins": pins or found["pins"]}
        manifest.write_text(json.dumps(found))
        with monkeypatch.context() as noted:
            noted.setattr(
                installation, "_uv", lambda *words, **_: adapters.extend(words) or Path(words[-1])
            )
            noted.setattr(installation.shutil, "rmtree", lambda *_, **__: None)
            assert main(["env", "install", NAME]) == 0
        assert json.loads(manifest.read_text())["with"] == ["some-adapter"]
        assert adapters.count("some-adapter") == bool(pins)
    assert "with some-adapter" in capsys.readouterr().out


@pytest.mark.usefixtures("packages")
def test_other_pins_than_those_of_the_adapter_are_refused(home: Path) -> None:
    installation.install(NAME)
    manifest = home / NAME / installation.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "pins": "others"}))
    assert status(NAME).state is State.OUTDATED
    with pytest.raises(ConfigError, match="its pins have changed since"):
        interpreter(NAME)


@pytest.mark.usefixtures("packages")
def test_a_failed_install_says_why_and_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = Requirements(
        packages=("rlinf-no-such-package==1.0",), module="nothing", python=_version()
    )
    monkeypatch.setattr(REGISTRY.load(NAME), "requirements", needs)
    monkeypatch.setenv("UV_OFFLINE", "1")
    with pytest.raises(ConfigError, match="rlinf-no-such-package"):
        installation.install(NAME)
    assert not (home / NAME).exists()


def test_a_full_disk_is_seen_before_anything_is_downloaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = Requirements(packages=(), module="nothing", disk_mb=10**9)
    monkeypatch.setattr(REGISTRY.load(NAME), "requirements", needs)
    with pytest.raises(ConfigError, match="takes 1000000000 MB"):
        installation.install(NAME)
    assert not (home / NAME).exists()


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Requirements(packages=(), module="nothing", libraries={"libnone.so.9": "libnone9"})
    monkeypatch.setattr(REGISTRY.load(NAME), "requirements", needs)
    assert status(NAME) == installation.Availability(
        State.UNFIT, "no shared library libnone.so.9 (Debian: libnone9)"
    )
    with pytest.raises(ConfigError, match=r"cannot run here: no shared library libnone\.so\.9"):
        installation.install(NAME)


def test_a_simulator_without_a_package_asks_for_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Requirements(packages=(), module="nothing", source="a checkout of its repository")
    monkeypatch.setattr(REGISTRY.load(NAME), "requirements", needs)
    with pytest.raises(ConfigError, match="give --source, a checkout of its repository"):
        installation.install(NAME)
    with pytest.raises(ConfigError, match="is a package: leave --source out"):
        installation.install("metaworld", source=Path())


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("kind", ["train", "check env"])
def test_an_environment_of_other_pins_ends_in_one_line(
    home: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / NAME).mkdir(parents=True)
    (home / NAME / installation.MANIFEST).write_text('{"pins": "others", "source": ""}')
    choice = [f"env.train.type={NAME}", "env.train.options={task: PandaReach-v3}"]
    arguments = {
        "train": ["train", "quickstart", *choice, "--dry-run"],
        "check env": ["check", "env", NAME, "options.task=PandaReach-v3"],
    }
    assert main(arguments[kind]) == 2
    head, problem = capsys.readouterr().err.strip().splitlines()
    assert "1 problem" in head
    assert f"its pins have changed since; run `rlinf env install {NAME}`" in problem


@pytest.mark.usefixtures("packages")
def test_two_installs_at_once_do_not_meet(home: Path) -> None:
    home.mkdir()
    with (home / f".{NAME}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process"):
            installation.install(NAME)


_ENDED = """
import os, sys
from rlinf.cli.main import main
from rlinf.envs import installation
installation.find_uv_bin = lambda: sys.argv[1]
sys.exit(main(["env", "install", sys.argv[2], "--yes"]))
"""


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_install_that_is_ended_leaves_nothing_or_the_lock_to_its_installer(
    home: Path, tmp_path: Path, number: signal.Signals
) -> None:
    uv, began = tmp_path / "uv", tmp_path / "began"
    uv.write_text(
        f"#!/bin/sh\nmkdir -p {home / NAME}\necho $$ > {began}.new\nmv {began}.new {began}\n"
        "exec sleep 60\n"
    )
    uv.chmod(0o755)
    command = [sys.executable, "-c", _ENDED, str(uv), NAME]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as install:
        while not began.exists():
            assert install.poll() is None
            time.sleep(0.02)
        install.send_signal(number)
        code = install.wait(20)
    installer = psutil.Process(int(began.read_text())) if number == signal.SIGKILL else None
    if installer is None:
        assert code == 130
        assert not psutil.pid_exists(int(began.read_text()))
        assert not (home / NAME).exists()
    else:
        with pytest.raises(ConfigError, match="another process installs"):
            installation.install(NAME)
        installer.kill()
        assert status(NAME).state is State.INCOMPLETE
        psutil.wait_procs([installer], timeout=20)
    with installation._alone(home / NAME):
        pass


def test_options_are_judged_under_the_interpreter_that_runs_the_env() -> None:
    wrong = EnvConfig(
        type="panda_gym", options={"task": "PandaReach-v3"}, max_episode_steps=5,
        python=sys.executable,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="rlinf env install panda_gym"):
        wrong.check()


def _refused(python: Path | str) -> str:
    config = EnvConfig(
        type="gymnasium", options={"id": "Pendulum-v1"}, max_episode_steps=5, python=str(python)
    )
    with pytest.raises(ConfigError) as refused:
        config.check()
    assert refused.value.key == "python"
    assert "\n" not in str(refused.value)
    return refused.value.reason


def test_an_interpreter_without_gymnasium_or_numpy_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    python = bare / "bin" / "python"
    install = f"`{python} -m pip install numpy gymnasium` installs it"
    assert f"it lacks gymnasium; {install}" in _refused(python)
    (packages,) = bare.glob("lib/python*/site-packages")
    (packages / "gymnasium").symlink_to(Path(gymnasium.__file__).parent)
    assert f"it lacks numpy; {install}" in _refused(python)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("exit 0", "it ended with exit code 0"),
        ("echo nonsense; exit 3", "exit code 3 and said: nonsense"),
        ("kill -9 $$", "SIGKILL"),
    ],
)
def test_what_is_no_interpreter_is_named(tmp_path: Path, program: str, why: str) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    reason = _refused(script)
    assert why in reason
    assert "give the path of an interpreter" in reason


def test_a_file_that_cannot_be_run_is_no_interpreter(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("no program")
    assert "is no executable file" in _refused(tmp_path / "python")
    (tmp_path / "python").chmod(0o755)
    assert "cannot start" in _refused(tmp_path / "python")


def test_the_command_line_lists_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "ready" in lines["gymnasium"]
    assert "missing" in lines["panda_gym"]
    assert "rlinf env install panda_gym" in " ".join(shown.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("metaworld", {"task": "reach-v3"}),
        ("panda_gym", {"task": "PandaReachDense-v3"}),
        ("pusht", {"task": "gym_pusht/PushT-v0"}),
    ],
)
def test_small_simulators_are_installed_and_keep_the_protocol(name: str, options: dict) -> None:
    from rlinf.envs.env_conformance import check_env

    directory = installation.install(name)
    megabytes = sum(f.stat().st_size for f in directory.rglob("*") if f.is_file()) >> 20
    needs = installation.requirements_of(name)
    assert needs is not None
    assert megabytes <= 1.2 * needs.disk_mb
    results = check_env(EnvConfig(type=name, options=options, max_episode_steps=20))
    assert [result for result in results if not result.passed] == []


def _small_disk(folder: Path, megabytes: int) -> None:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no disk of its own can be mounted here: {mounted.stderr.decode().strip()}")


@pytest.mark.slow
@pytest.mark.parametrize("full", ["environments", "cache"])
def test_a_disk_that_fills_up_ends_the_install_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing half made is left, and with room the same command makes the environment."""
    asked = ("numpy==2.2.6", "toposort==1.10")
    small = Requirements(packages=asked, module="toposort", python=_version(), disk_mb=1)
    monkeypatch.setattr(REGISTRY.load(NAME), "requirements", small)
    monkeypatch.setattr(installation, "lock_file", lambda name: None)
    disk = tmp_path / "disk"
    _small_disk(disk, 20)
    try:
        roomy = tmp_path / "roomy"
        places = {"RLINF_ENVS": roomy / "envs", "UV_CACHE_DIR": roomy / "cache"}
        tight = "RLINF_ENVS" if full == "environments" else "UV_CACHE_DIR"
        for key, place in {**places, tight: disk / "there"}.items():
            monkeypatch.setenv(key, str(place))
        assert main(["env", "install", NAME]) == 2
        problem = capsys.readouterr().err.strip()
        assert "No space left on device" in problem
        assert "UV_CACHE_DIR" in problem
        assert len(problem.splitlines()) == 1
        assert status(NAME).state is State.MISSING
        assert not (installation.home() / NAME).exists()
        monkeypatch.setenv(tight, str(places[tight]))
        assert main(["env", "install", NAME]) == 0
        assert status(NAME).state is State.READY
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_where_nothing_may_be_written_the_install_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = Requirements(packages=(), module="nothing", python=_version())
    monkeypatch.setattr(REGISTRY.load(NAME), "requirements", needs)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLINF_ENVS", str(tmp_path / "file" / "envs"))
    with pytest.raises(ConfigError, match=r"cannot write to .*file/envs: Not a directory; "):
        installation.install(NAME)
