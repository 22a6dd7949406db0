"""The doctor: it finds what works, and names the cause and the fix of what does not."""

from __future__ import annotations

import importlib.util
import resource
import shlex
import sys
from pathlib import Path

import pytest

from rlinf.cli.health import machine, packages, rendering
from rlinf.cli.health.packages import Finding
from rlinf.cli.main import main
from rlinf.errors import install_command
from rlinf.planner import cluster_shape

ROOT = Path(__file__).resolve().parents[2]


def test_missing_and_wrong_packages_get_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [
        "numpy>=1.26",
        "no-such-package>=2",
        "psutil>=9999",
        'no-such-simulator; extra == "arm"',
        'safetensors>=9999; extra == "arm"',
        'no-such-linter; extra == "dev"',
    ]
    monkeypatch.setattr(packages.importlib.metadata, "requires", lambda _: declared)
    found = {finding.name: finding for finding in packages.package_findings()}
    assert found["numpy"].status == "ok"
    assert found["no-such-package"].status == "failed"
    assert found["no-such-package"].fix == "pip install 'no-such-package>=2'"
    assert found["psutil"].status == "failed"
    assert found["psutil"].detail.endswith("is not >=9999")
    assert found["no-such-simulator"].status == "absent"
    assert found["no-such-simulator"].fix == install_command("arm")
    assert found["safetensors"].status == "warning"
    assert "no-such-linter" not in found


def test_every_declared_package_is_named() -> None:
    found = {finding.name: finding for finding in packages.package_findings()}
    assert found["torch"].status == "ok"
    assert {"transformers", "ray", "metaworld", "wandb"} <= set(found)


def test_machine_has_cores_memory_and_a_video_encoder(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in machine.machine_findings(tmp_path)}
    assert found["video encoder"].status == "ok"
    assert found["video encoder"].detail.startswith("5 frames")
    assert "failed" not in {finding.status for finding in found.values()}


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(int(1.5e9), int(0.5e9))]
    monkeypatch.setattr(cluster_shape, "_control_groups", lambda: iter(limits))
    found = machine._memory()
    assert (found.status, found.detail) == ("warning", "1.0 GB free of 1.5 GB")


@pytest.mark.parametrize(
    ("soft", "hard", "fix"),
    [
        (256, 1_000_000, "ulimit -n 65536"),
        (256, 4096, "ulimit -n 4096"),
        (256, resource.RLIM_INFINITY, "ulimit -n 65536"),
        (256, 256, "docker run --ulimit nofile=65536; or the administrator allows more than 256"),
    ],
)
def test_more_open_files_are_asked_of_who_may_allow_them(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, fix: str
) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (soft, hard))
    found = machine._open_files()
    assert (found.status, found.detail) == ("warning", "at most 256 per process")
    assert found.fix.startswith(fix)
    endless = resource.RLIM_INFINITY
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (endless, endless))
    assert machine._open_files().status == "ok"


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    found = {finding.name: finding for finding in machine.machine_findings(Path.cwd())}
    assert found["threads"].status == "warning"
    assert found["threads"].fix.startswith("export OMP_NUM_THREADS=")


FRAME = """
class Env:
    def reset(self, seed): pass
    def render(self):
        import numpy
        return numpy.full((4, 6, 3), {shade}, numpy.uint8)
env = Env()
"""


@pytest.mark.parametrize(
    ("program", "status", "detail"),
    [
        (FRAME.format(shade=7), "ok", "frame 6x4 brightness 7.0"),
        (FRAME.format(shade=0), "failed", "all black"),
        ("raise ImportError('no libEGL.so')", "failed", "ImportError: no libEGL.so"),
        ("import os; os.abort()", "failed", "exit code"),
    ],
)
def test_a_frame_is_drawn_in_a_process_of_its_own(program: str, status: str, detail: str) -> None:
    found = rendering.draw("simulator", "egl", program)
    assert found.status == status
    assert detail in found.detail
    if status == "failed":
        assert found.fix == "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri"


def test_one_working_renderer_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(simulator: str, renderer: str, program: str, python: str) -> Finding:
        return Finding(renderer, "ok" if renderer == "egl" else "failed", "", "a fix")

    monkeypatch.setattr(rendering, "draw", draw)
    monkeypatch.setattr(rendering, "SIMULATORS", {"s": ("numpy", "", ("egl", "osmesa"))})
    assert [finding.status for finding in rendering.rendering_findings()] == ["ok", "warning"]
    monkeypatch.setattr(rendering, "SIMULATORS", {"s": ("numpy", "", ("osmesa",))})
    assert [finding.status for finding in rendering.rendering_findings()] == ["failed"]


@pytest.mark.parametrize("broken", [False, True])
def test_exit_code_says_whether_something_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    finding = Finding("render", "failed", "all black", "apt-get install x")
    monkeypatch.setattr(rendering, "rendering_findings", lambda: [finding] if broken else [])
    assert main(["doctor"]) == int(broken)
    out = capsys.readouterr().out
    assert "torch" in out
    if broken:
        assert "failed: render: all black" in out
        assert "fix: apt-get install x" in out


@pytest.mark.slow
def test_ray_starts() -> None:
    finding = machine.ray_finding()
    assert finding.status == "ok", finding


def test_an_extra_is_installed_from_the_checkout_or_else_by_name(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install"]
    assert shlex.split(install_command("ray")) == [*pip, "-e", f"{ROOT}[ray]"]
    copy = tmp_path / "errors.py"
    copy.write_bytes((ROOT / "rlinf/errors.py").read_bytes())
    spec = importlib.util.spec_from_file_location("installed_errors", copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert shlex.split(module.install_command("ray")) == [*pip, "rlinf[ray]"]
